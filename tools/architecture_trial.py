"""One row of the table of architectures: a tiny random model of an architecture is made and measured.

    $ python tools/architecture_trial.py qwen3

The model is measured by prompts and by text, in padded batches and one sequence at a time, and compared with sums over
the vocabulary of the network's own logits in float64. The result is printed as a line of JSON.
"""

import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny_architectures import VOCABULARY, tiny_config

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
    import transformers
    from tiny_tokenizers import byte_tokenizer

    config = tiny_config(architecture)
    for part in (config, config.get_text_config(decoder=True)):
        for name, value in (("initializer_range", 0.3), ("init_std", 0.3), ("is_decoder", True)):
            if hasattr(part, name):
                setattr(part, name, value)
    torch.manual_seed(0)
    try:
        network = transformers.AutoModelForCausalLM.from_config(config)
    except ValueError as error:
        if "Unrecognized configuration" not in str(error):
            raise
        network = transformers.AutoModelForMultimodalLM.from_config(config)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in network.parameters():
            if weight.is_floating_point() and weight.numel() > 1:
                weight.add_(shift * torch.randn_like(weight) * (weight.std() + 0.01))
    network.save_pretrained(folder)
    byte_tokenizer(VOCABULARY).save_pretrained(folder)
    return folder


def load_network(folder: Path, dtype: str) -> Any:
    """The network in a folder as transformers loads it, in evaluation mode."""
    import transformers

    options: dict[str, Any] = {"dtype": getattr(torch, dtype)}
    try:
        network = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
    except ValueError as error:
        if "Unrecognized configuration" not in str(error):
            raise
        network = transformers.AutoModelForMultimodalLM.from_pretrained(folder, **options)
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


def main(architecture: str) -> dict[str, Any]:
    """Try an architecture in float64, and in float32 if it does not run in float64."""
    import transformers

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    row: dict[str, Any] = {}
    for dtype in ("float64", "float32"):
        with tempfile.TemporaryDirectory() as folder:
            row = {"architecture": architecture, **try_architecture(architecture, Path(folder), dtype)}
        if row["outcome"] in ("hidden states", "logits"):
            break
    return row


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
