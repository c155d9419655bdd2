"""kleash beside llama.cpp: the same GGUF files and the same text.

    python -m venv llama && llama/bin/pip install llama-cpp-python==0.3.36       # nine CPU minutes
    PYTHONPATH=llama/lib/python3.11/site-packages python benchmarks/gguf_beside_llama_cpp.py

The shipped reference is written as a GGUF file in float32, the base, and quantised to Q8_0, Q5_0 and Q4_0. llama.cpp
runs the base and each quantisation on chunks of the shipped text; its logits of the base are encoded in 16 bits, as
llama-perplexity does, and its formulas give the mean KLD of the quantisation. kleash measures the same files by their
decoded weights: exactly, from hidden states in float32, on the same positions. llama.cpp rounds activations to 8 bits
before each product with a quantised matrix, and keys and values to float16; the base against kleash's base shows the
second alone.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import parser_of, write_result

KINDS = ("F32", "Q8_0", "Q5_0", "Q4_0")


def main() -> None:
    arguments = parser_of(__doc__, context=256, chunks=12).parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        figures = compare(Path(folder), arguments.context, arguments.chunks)
    for kind, row in figures["kinds"].items():
        print(kind, row)
    write_result("gguf_beside_llama_cpp", figures, packages=("gguf", "transformers"))


def compare(folder: Path, context: int, chunks: int) -> dict[str, Any]:
    """The figures of all quantisations."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))
    from gguf_file import write_gguf

    from kleash.models import load_pair
    from kleash.models.base_logits import split_chunks
    from kleash.shipped import shipped_folder
    from kleash.sources.files import source_path

    base = shipped_folder("shipped:reference")
    files = {kind: write_gguf(base, folder / f"{kind}.gguf", kind) for kind in KINDS}
    pair = load_pair(str(files["F32"]), "shipped:reference")
    text = source_path("shipped:text", "text").read_text(encoding="utf-8")
    ids = pair.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    tokens = split_chunks([pair.tokenizer.bos_token_id, *ids], context, chunks)
    llama = {kind: llama_logits(path, tokens, pair.tokenizer.bos_token_id) for kind, path in files.items()}
    policies = {kind: load_pair(str(path), "shipped:reference").policy for kind, path in files.items()}
    ours = {name: kleash_logits(of, tokens, pair.tokenizer.bos_token_id) for name, of in policies.items()}
    return {
        "context": context,
        "chunks": len(tokens),
        "tokens": len(tokens) * (context - 1 - context // 2),
        "kinds": {kind: row_of(kind, llama, ours, tokens) for kind in KINDS},
    }


def llama_logits(path: Path, tokens: np.ndarray, begin: int) -> torch.Tensor:
    """llama.cpp's logits at the scored positions of all chunks."""
    import llama_cpp

    context = tokens.shape[1]
    threads = {"n_threads": 1, "n_threads_batch": 1}
    model = llama_cpp.Llama(
        str(path), n_ctx=context, n_batch=context, logits_all=True, verbose=False, **threads
    )
    parts = []
    for chunk in tokens:
        model.reset()
        model.eval([begin, *chunk[1:].tolist()])
        parts.append(np.array(model.scores[context // 2 : context - 1], dtype=np.float32))
    return torch.from_numpy(np.concatenate(parts))


@torch.inference_mode()
def kleash_logits(policy: Any, tokens: np.ndarray, begin: int) -> torch.Tensor:
    """kleash's logits at the same positions."""
    from kleash.models.heads import head_logits

    context = tokens.shape[1]
    chunks = (policy.hidden_states(torch.tensor([[begin, *chunk[1:].tolist()]]))[0] for chunk in tokens)
    return torch.cat([head_logits(hidden[context // 2 : context - 1], policy.head) for hidden in chunks])


def row_of(
    kind: str, llama: dict[str, torch.Tensor], ours: dict[str, torch.Tensor], tokens: np.ndarray
) -> dict[str, float]:
    """The KL of a quantisation from the base, by llama.cpp's formulas and exactly."""
    from kleash.engines.base_logits import columns_of_rows
    from kleash.models.base_logit_bounds import logp_intervals
    from kleash.models.base_logits import BaseLogitsRows, encode_rows

    targets = tokens[:, tokens.shape[1] // 2 + 1 :].reshape(-1)
    stored = encode_rows(llama["F32"])
    numbers = np.ascontiguousarray(stored[:, :4]).view("<f4")
    rows = BaseLogitsRows(
        scale=numbers[:, 0], minimum=numbers[:, 1], codes=stored[:, 4 : 4 + llama["F32"].shape[1]]
    )
    kld = columns_of_rows(llama[kind], rows, logp_intervals(rows), targets)["llama_cpp_kld"]
    of_llama, of_kleash = exact_kl(llama["F32"], llama[kind]), exact_kl(ours["F32"], ours[kind])
    chunk_means = of_kleash.reshape(len(tokens), -1).mean(-1)
    return {
        "llama_cpp_kld": float(kld.mean()),
        "llama_cpp_kld_error": float(kld.std() / (len(kld) - 1) ** 0.5),
        "exact_kl_of_llama_cpp_logits": float(of_llama.mean()),
        "kleash_kl_of_decoded_weights": float(of_kleash.mean()),
        "kleash_error_clustered_by_chunk": float(chunk_means.std() / len(tokens) ** 0.5),
        "largest_difference_of_a_logit": float((llama[kind] - ours[kind]).abs().max()),
    }


def exact_kl(base: torch.Tensor, quantised: torch.Tensor) -> torch.Tensor:
    """KL(base || quantised) of each row of logits, in float64."""
    logp, logq = (logits.double().log_softmax(-1) for logits in (base, quantised))
    return (logp.exp() * (logp - logq)).sum(-1)


if __name__ == "__main__":
    main()
