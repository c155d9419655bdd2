"""kleash beside llama.cpp: the same GGUF files and the same text.

    python -m venv llama && llama/bin/pip install llama-cpp-python==0.3.36       # nine CPU minutes
    PYTHONPATH=llama/lib/python3.11/site-packages python benchmarks/gguf_beside_llama_cpp.py

The shipped reference is written as a GGUF file in float32, the base, and quantised to Q8_0, Q5_0 and Q4_0. llama.cpp
runs the base and each quantisation on chunks of the shipped text; its logits of the base are encoded in 16 bits, as
llama-perplexity does, and its formulas give the mean KLD of the quantisation. kleash measures the same files by their
decoded weights: exactly, from hidden states in float32, on the same positions. llama.cpp rounds activations to 8 bits
before each product with a quantised matrix, and keys and values to float16; the base against kleash's base shows the
second alone. Seconds are those of the forward passes of a quantisation, each in one thread.
"""

import sys
import tempfile
from pathlib import Path
from time import perf_counter
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
    from gguf_file import write_gguf  # pyright: ignore[reportMissingImports]

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
    ours = {}
    for kind, path in files.items():
        policy = load_pair(str(path), "shipped:reference").policy
        ours[kind] = kleash_logits(policy, tokens, pair.tokenizer.bos_token_id)
    return {
        "context": context,
        "chunks": len(tokens),
        "tokens": len(tokens) * (context - 1 - context // 2),
        "kinds": {kind: row_of(kind, llama, ours, tokens) for kind in KINDS},
    }


def llama_logits(path: Path, tokens: np.ndarray, begin: int) -> tuple[np.ndarray, float]:
    """llama.cpp's logits at the scored positions of all chunks, and seconds."""
    import llama_cpp  # pyright: ignore[reportMissingImports]

    context = tokens.shape[1]
    model = llama_cpp.Llama(
        str(path),
        n_ctx=context,
        n_batch=context,
        n_threads=1,
        n_threads_batch=1,
        logits_all=True,
        verbose=False,
    )
    parts, seconds = [], 0.0
    for chunk in tokens:
        model.reset()
        start = perf_counter()
        model.eval([begin, *chunk[1:].tolist()])
        seconds += perf_counter() - start
        parts.append(np.array(model.scores[context // 2 : context - 1], dtype=np.float32))
    return np.concatenate(parts), seconds


def kleash_logits(policy: Any, tokens: np.ndarray, begin: int) -> tuple[np.ndarray, float]:
    """kleash's logits at the same positions, and seconds."""
    from kleash.models.heads import head_logits

    context = tokens.shape[1]
    parts, seconds = [], 0.0
    for chunk in tokens:
        start = perf_counter()
        with torch.inference_mode():
            hidden = policy.hidden_states(torch.tensor([[begin, *chunk[1:].tolist()]]))[0]
            parts.append(head_logits(hidden[context // 2 : context - 1], policy.head).numpy())
        seconds += perf_counter() - start
    return np.concatenate(parts), seconds


def row_of(kind: str, llama: dict[str, Any], ours: dict[str, Any], tokens: np.ndarray) -> dict[str, float]:
    """The KL of a quantisation from the base, by llama.cpp's formulas and exactly, and the differences of logits."""
    from kleash.engines.base_logits import columns_of_rows
    from kleash.models.base_logit_bounds import kl_bounds, logp_intervals
    from kleash.models.base_logits import BaseLogitsRows, encode_rows

    context = tokens.shape[1]
    targets = tokens[:, context // 2 + 1 :].reshape(-1)
    stored = encode_rows(torch.from_numpy(llama["F32"][0]))
    numbers = np.ascontiguousarray(stored[:, :4]).view("<f4")
    rows = BaseLogitsRows(
        scale=numbers[:, 0], minimum=numbers[:, 1], codes=stored[:, 4 : 4 + llama["F32"][0].shape[1]]
    )
    intervals = logp_intervals(rows)
    kld = columns_of_rows(torch.from_numpy(llama[kind][0]), rows, intervals, targets)["llama_cpp_kld"]
    logp, logq = (torch.from_numpy(llama[name][0]).double().log_softmax(-1) for name in ("F32", kind))
    exact_of_llama = (logp.exp() * (logp - logq)).sum(-1)
    lower, upper = kl_bounds(intervals, logq)
    inside = ((lower <= exact_of_llama + 1e-12) & (exact_of_llama <= upper + 1e-12)).float().mean()
    logp, logq = (torch.from_numpy(ours[name][0]).double().log_softmax(-1) for name in ("F32", kind))
    exact_of_ours = (logp.exp() * (logp - logq)).sum(-1)
    chunk_means = exact_of_ours.reshape(len(tokens), -1).mean(-1)
    difference = np.abs(llama[kind][0] - ours[kind][0])
    llama_error = float(kld.std() / (len(kld) - 1) ** 0.5)
    return {
        "llama_cpp_kld": float(kld.mean()),
        "llama_cpp_kld_error": llama_error,
        "exact_kl_of_llama_cpp_logits": float(exact_of_llama.mean()),
        "share_of_tokens_within_the_bounds": float(inside),
        "mean_width_of_the_bounds": float((upper - lower).mean()),
        "kleash_kl_of_decoded_weights": float(exact_of_ours.mean()),
        "kleash_error_clustered_by_chunk": float(chunk_means.std() / len(tokens) ** 0.5),
        "largest_difference_of_a_logit": float(difference.max()),
        "mean_difference_of_a_logit": float(difference.mean()),
        "llama_cpp_seconds": round(llama[kind][1], 3),
        "kleash_seconds": round(ours[kind][1], 3),
    }


if __name__ == "__main__":
    main()
