"""The engine's log-probabilities beside those of saved hidden states, and the cause where they differ."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from kleash.linear import Head
from kleash.models.cache.saved_records import SavedRequest
from kleash.models.cache.state_causes import SMALLEST_SHIFT_ROWS
from kleash.models.heads import head_logits
from kleash.models.pair import Model
from kleash.sources.sequences import TokenSequence

LOGP_TOLERANCES = {torch.float64: 0.01, torch.float32: 0.01, torch.float16: 0.1, torch.bfloat16: 0.5}
"""Largest difference of a token's log-probability, in nats, that is rounding of hidden states and logits."""
TYPICAL_SHARE = 0.1
"""The median difference may be this share of the largest."""
EXPLAINED_ROWS = 256
"""Rows whose logits are computed to find the cause of a difference."""
LOGIT_ELEMENTS = 1 << 24
"""Elements of a block of logits."""


def token_logps(
    hidden: Tensor, head: Head, tokens: Sequence[int], temperature: float = 1.0
) -> Float[np.ndarray, " tokens"]:
    """The log-probability of each token in nats, a block of logits at a time."""
    vocab_size = head.weight.shape[0] if head.weight is not None else hidden.shape[-1]
    block = max(1, LOGIT_ELEMENTS // vocab_size)
    ids = torch.tensor(list(tokens), device=hidden.device)
    parts: list[Tensor] = []
    with torch.inference_mode():
        for rows, chunk in zip(hidden.split(block), ids.split(block), strict=True):
            logits = head_logits(rows, head) / temperature
            token_logits = logits.gather(-1, chunk[:, None]).squeeze(-1)
            parts.append((token_logits - logits.logsumexp(-1)).double().cpu())
    return torch.cat(parts).numpy()


def logps_agree(differences: Float[np.ndarray, " rows"], dtype: torch.dtype) -> bool:
    """Whether differences of log-probabilities are rounding."""
    tolerance = LOGP_TOLERANCES[dtype]
    return bool(differences.max() <= tolerance and np.median(differences) <= TYPICAL_SHARE * tolerance)


def explain_logps(
    request: SavedRequest,
    sequence: TokenSequence,
    hidden: Tensor,
    model: Model,
    logps: Float[np.ndarray, " response"],
    differences: Float[np.ndarray, " rows"],
) -> str:
    """A sentence with the cause of log-probabilities that are not those of verified hidden states."""
    rows = np.flatnonzero(~np.isnan(logps))[:EXPLAINED_ROWS]
    tokens = np.asarray(sequence.response_ids)
    temperature = _fitted_temperature(hidden[rows], model, tokens[rows], logps[rows])
    if temperature is not None:
        return (
            f"{request}: the engine's log-probabilities are those at temperature {temperature:.3g}; save them at "
            "temperature 1, before any processing"
        )
    computed = token_logps(hidden, model.head, sequence.response_ids)
    widest = len(logps) - max(SMALLEST_SHIFT_ROWS, len(logps) // 2)
    for shift in (sign * size for size in range(1, widest + 1) for sign in (-1, 1)):
        count = len(logps) - abs(shift)
        shifted = np.abs(logps[max(0, -shift) :][:count] - computed[max(0, shift) :][:count])
        shifted = shifted[~np.isnan(shifted)]
        if len(shifted) >= SMALLEST_SHIFT_ROWS and logps_agree(shifted, model.dtype):
            direction = "later" if shift > 0 else "earlier"
            return (
                f"{request}: the engine's log-probabilities are shifted: each is that of the token {abs(shift)} "
                f"{direction}; give one for each token, null for the first"
            )
    wrong = differences > LOGP_TOLERANCES[model.dtype]
    if np.median(differences) <= TYPICAL_SHARE * LOGP_TOLERANCES[model.dtype]:
        first = int(np.flatnonzero(~np.isnan(logps))[int(np.flatnonzero(wrong)[0])])
        return (
            f"{request}: the log-probabilities of {int(wrong.sum())} of {len(wrong)} tokens are not those of their "
            f"rows, the first being response token {first} of {sequence.name} (by {differences[wrong][0]:.3g} nats); "
            "let the engine save it again"
        )
    return (
        f"{request}: the hidden states are those of {model.path} and the engine's log-probabilities are not, by "
        f"{float(np.median(differences)):.2g} nats in the median: the engine has another head; give the model "
        "with that head as --reference"
    )


def _fitted_temperature(
    hidden: Tensor, model: Model, tokens: np.ndarray, logps: Float[np.ndarray, " rows"]
) -> float | None:
    """The temperature other than 1 at which the model gives these log-probabilities; None if there is none."""

    def error(temperature: float) -> float:
        computed = token_logps(hidden, model.head, tokens.tolist(), temperature)
        return float(np.abs(computed - logps).mean())

    grid = np.geomspace(0.05, 20.0, 61)
    best = int(np.argmin([error(temperature) for temperature in grid]))
    low, high = grid[max(0, best - 1)], grid[min(len(grid) - 1, best + 1)]
    for _ in range(30):  # ternary search between the neighbours
        third = (high - low) / 3
        if error(low + third) < error(high - third):
            high -= third
        else:
            low += third
    temperature = float(low + high) / 2
    differences = np.abs(token_logps(hidden, model.head, tokens.tolist(), temperature) - logps)
    is_other = abs(temperature - 1) > 0.005
    return temperature if is_other and logps_agree(differences, model.dtype) else None
