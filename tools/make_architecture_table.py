"""Try every architecture that transformers maps to a causal class; write docs/reference/architectures.md.

    $ python tools/make_architecture_table.py             # all: about 15 minutes on one core
    $ python tools/make_architecture_table.py mamba llama # prints the rows of some

Each architecture is tried in a process of its own, with limits of time and memory. A tiny random model is measured by
prompts and by text, in padded batches and one sequence at a time, and compared with sums over the vocabulary of the
network's own logits in float64.
"""

import json
import multiprocessing
import os
import resource
import sys
import tempfile
import warnings
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny_architectures import tiny_config

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "architectures.md"
MEMORY_LIMIT = 16 << 30
"""Bytes of address space of a trial."""
CPU_LIMIT = 120
"""Seconds of processor time of a trial."""
MEASURED = ("hidden states", "logits")
"""Outcomes of architectures that kleash measures."""
TEXTS = (
    "The sea was calm and the boat went out before the sun had come up over the hills.",
    "She counted the birds.",
    "A long road leads out of the town; nobody remembers where it was meant to end, or why.",
)
TOLERANCE = 1e-6
"""Largest difference of a KL in nats, absolute and relative, that is rounding in float64."""
TOLERANCE_FLOAT32 = 2e-3
"""The same for architectures that do not run in float64."""


def try_architecture(architecture: str, folder: Path, dtype: str = "float64") -> dict[str, Any]:
    """Make and measure a tiny model of an architecture.

    Returns:
        ``outcome``: "hidden states", "logits", "refused", "not made" (transformers cannot make or run it), or "wrong";
        ``reason``, and the largest differences from the network's own logits and between batches.
    """
    from kleash.errors import KleashError
    from kleash.models import Sampling, generate, load_pair, read_text, score, tokenise_prompts

    try:
        policy, reference = (
            make_model(architecture, folder / role, shift) for role, shift in (("p", 0.1), ("q", 0.0))
        )
        networks = [load_network(path, dtype) for path in (policy, reference)]
        logits_of(networks[0], (3, 4, 5, 6, 7))
    except Exception as error:  # each architecture has its own
        return {
            "outcome": "not made",
            "reason": f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}",
        }
    try:
        pair = load_pair(str(policy), str(reference), dtype=dtype)
        (folder / "text.txt").write_text("\n\n".join(TEXTS))
        windows = list(read_text(str(folder / "text.txt"), pair, window=32, stride=24))
        prompts = tokenise_prompts(["The sea", TEXTS[1], "A long road leads out"], pair)
        sequences = [*windows, *generate(pair.policy, prompts, Sampling(max_new_tokens=6, temperature=1.0))]
        batched, single = score(pair, sequences), score(pair, sequences, batch_tokens=1)
    except KleashError as error:
        return {"outcome": "refused", "reason": str(error).replace(str(folder), "")}
    truth = [exact_kl(networks[0], networks[1], sequence, pair.vocab_size) for sequence in sequences]
    kl = np.concatenate(truth)
    sampled = ~np.isnan(batched["logp_sampled"])
    errors = {
        "truth": largest_error(batched["kl_policy_reference"], kl),
        "alone": largest_error(single["kl_policy_reference"], batched["kl_policy_reference"]),
        "generated": largest_error(batched["logp_sampled"][sampled], batched["logp_policy"][sampled]) / 10,
    }
    tolerance = TOLERANCE if dtype == "float64" else TOLERANCE_FLOAT32
    heads = {model.head.weight is not None for model in (pair.policy, pair.reference)}
    outcome = "hidden states" if heads == {True} else "logits"
    is_right = max(errors.values()) <= tolerance and kl.max() > 1e-3
    return {
        "outcome": outcome if is_right else "wrong",
        "network": type(pair.policy.network).__name__,
        "dtype": dtype,
        "kl": float(kl.mean()),
        "padding": "batches of equal lengths" if pair.policy.max_padded_length == 0 else "",
        **errors,
    }


def make_model(architecture: str, folder: Path, shift: float) -> Path:
    """A random model with a tokenizer in ``folder``; ``shift`` moves its weights by that share of noise."""
    config = tiny_config(architecture)
    for part in (config, config.get_text_config(decoder=True)):
        for name, value in (("initializer_range", 0.3), ("init_std", 0.3), ("is_decoder", True)):
            if hasattr(part, name):
                setattr(part, name, value)
    torch.manual_seed(0)
    network = from_transformers("from_config", config)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in network.parameters():
            if weight.is_floating_point() and weight.numel() > 1:
                weight.add_(shift * torch.randn_like(weight) * (weight.std() + 0.01))
    network.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def from_transformers(method: str, source: Any, **options: Any) -> Any:
    """The network that a method of the causal class makes, or of the multimodal one where the first knows it not."""
    import transformers

    try:
        return getattr(transformers.AutoModelForCausalLM, method)(source, **options)
    except ValueError as error:
        if "Unrecognized configuration" not in str(error):
            raise
        return getattr(transformers.AutoModelForMultimodalLM, method)(source, **options)


def load_network(folder: Path, dtype: str) -> Any:
    """The network in a folder as transformers loads it, in evaluation mode."""
    network = from_transformers("from_pretrained", folder, dtype=getattr(torch, dtype))
    if network._can_set_experts_implementation():
        network.set_experts_implementation("eager")
    return network.eval()


def logits_of(network: Any, token_ids: tuple[int, ...]) -> np.ndarray:
    """The network's own logits for one sequence alone, in float64."""
    with torch.no_grad():
        return network(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0].double().numpy()


def exact_kl(policy: Any, reference: Any, sequence: Any, vocab_size: int) -> np.ndarray:
    """KL(policy || reference) at each scored token, by sums over the vocabulary."""
    from scipy.special import log_softmax

    token_ids = (*sequence.prompt_ids, *sequence.response_ids)[:-1]
    at = slice(len(sequence.prompt_ids) - 1, None)
    logp, logq = (
        log_softmax(logits_of(net, token_ids)[at, :vocab_size], axis=-1) for net in (policy, reference)
    )
    return (np.exp(logp) * (logp - logq)).sum(-1)


def largest_error(values: np.ndarray, truth: np.ndarray) -> float:
    """The largest difference, absolute below 1 and relative above; NaN counts as infinite."""
    error = np.abs(values - truth) / np.maximum(1, np.abs(truth))
    return float(np.nan_to_num(error, nan=np.inf).max()) if len(error) else 0.0


def row_of(architecture: str) -> dict[str, Any]:
    """Try an architecture in float64, and in float32 if it does not run in float64."""
    import transformers

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    row: dict[str, Any] = {}
    for dtype in ("float64", "float32"):
        with tempfile.TemporaryDirectory() as folder:
            row = {"architecture": architecture, **try_architecture(architecture, Path(folder), dtype)}
        if row["outcome"] in ("hidden states", "logits"):
            break
    return row


def byte_tokenizer() -> Any:
    """A tokenizer of single bytes with <s>, </s> and <pad> as ids 0 to 2, and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = {token: index for index, token in enumerate(["<s>", "</s>", "<pad>", *alphabet])}
    backend = Tokenizer(models.BPE(vocab=tokens, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    return tokenizer


def try_in_fork(architecture: str) -> dict[str, Any]:
    """The row of an architecture, tried within the limits; an exception is a fault of kleash and shows in the table."""
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("fork"), initializer=limit_trial)
    with pool:
        try:
            return pool.submit(row_of, architecture).result()
        except BrokenProcessPool:
            outcome = "not made"
            reason = f"took more than {CPU_LIMIT} s of processor time, or {MEMORY_LIMIT >> 30} GiB"
        except Exception as error:
            outcome, reason = "wrong", f"{type(error).__name__}: {str(error)[:300]}"
    return {"architecture": architecture, "outcome": outcome, "reason": reason}


def limit_trial() -> None:
    """Limit memory and processor time of this process, and leave out what it prints."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT, CPU_LIMIT))
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)


def main() -> None:
    """Try the architectures that are named, or all; print each row, and with all write the page."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    rows: list[dict[str, Any]] = []
    row_of("llama")  # so that the forks need not import what every trial does
    for architecture in sys.argv[1:] or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        rows.append(try_in_fork(architecture))
        print(json.dumps(rows[-1]), flush=True)
    if not sys.argv[1:]:
        PAGE.write_text(make_page(rows), encoding="utf-8")


def remark(row: dict[str, Any]) -> str:
    """In brackets, what is special about an architecture that is measured."""
    remarks = [row["padding"]] if row.get("padding") else []
    remarks += ["float32 only"] if row["dtype"] == "float32" else []
    return f" ({', '.join(remarks)})" if remarks else ""


def make_page(rows: list[dict[str, Any]]) -> str:
    """The page of all rows, with the versions and the date."""
    rows = sorted(rows, key=lambda row: row["architecture"])
    made = [row for row in rows if row["outcome"] != "not made"]
    measured = [row for row in made if row["outcome"] in MEASURED]
    share = f"{100 * len(measured) / len(made):.1f} %"
    lines = [
        "# Architectures",
        "",
        "<!-- Made by tools/make_architecture_table.py; change that, not this page. -->",
        "",
        f"transformers {version('transformers')} maps {len(rows)} architectures to a causal class. A tiny random model",
        f"was made of {len(made)}, and kleash measured {len(measured)} of them ({share}), with",
        f"torch {version('torch')} on a CPU, {datetime.now(timezone.utc):%Y-%m-%d}.",
        "",
        "Each model is compared with a copy whose weights have moved, on prompts (with generation) and on text. The KL",
        "of every token agrees with sums over the vocabulary of the network's own logits of that sequence alone, in",
        "float64, to 1e-6 (2e-3 for those that run in float32 only). Padded batches and single ones agree likewise.",
        "[Models](models.md) explains hidden states and logits.",
        "",
    ]
    for outcome in MEASURED:
        names = [f"`{row['architecture']}`{remark(row)}" for row in measured if row["outcome"] == outcome]
        lines += [f"## Measured through {outcome}", "", ", ".join(names), ""]
    not_measured = [row for row in made if row["outcome"] not in MEASURED]
    lines += ["## Not measured", "", *failures(not_measured), "", "## Not made", ""]
    lines += [
        "transformers does not build or run a tiny model with the sizes that the tool gives it. This says nothing of",
        "published checkpoints.",
        "",
        ", ".join(f"`{row['architecture']}`" for row in rows if row["outcome"] == "not made"),
    ]
    return "\n".join(lines) + "\n"


def failures(rows: list[dict[str, Any]]) -> list[str]:
    """The lines of a table of architectures with the reason why each was not measured."""
    lines = ["| architecture | reason |", "| --- | --- |"]
    for row in rows:
        reason = row.get("reason") or (
            "differs from its own logits by up to {truth:.2g}, between batches by {alone:.2g}, and the log-probability "
            "with which a token was drawn by {drawn:.2g}"
        ).format(**row, drawn=10 * row.get("generated", 0))
        cell = " ".join(reason.replace("|", "\\|").replace("<", "&lt;").split())[:200]
        lines.append(f"| `{row['architecture']}` | {cell} |")
    return lines


if __name__ == "__main__":
    main()
