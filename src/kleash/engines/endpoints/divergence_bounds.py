"""Bounds of the divergences between a server's distribution and a local model's, from the tokens that it lists."""

from collections.abc import Iterator, Mapping
from math import inf, log
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from kleash.divergences import DIVERGENCES
from kleash.engines.endpoints.answer_precision import LogprobPrecision
from kleash.engines.endpoints.listed_logprobs import ListedLogprobs
from kleash.estimators import Tail
from kleash.estimators.bounds import LogpInterval, bounds_of_intervals, logp_interval, rounding_nats
from kleash.linear import Head, log_probabilities

SYMMETRIC: Mapping[str, float] = MappingProxyType({"jensen_shannon": log(2), "total_variation": 1.0})
"""The divergences that do not depend on the order of the models, and their largest value."""
COPIES = 4
"""Arrays of a chunk's logits that are in memory at once."""


def divergence_bounds(
    hidden: Float[Tensor, "tokens dim"],
    head: Head,
    answer: ListedLogprobs,
    token_ids: Tensor,
    *,
    endpoint_role: str,
    precision: LogprobPrecision,
    buffer_bytes: int,
) -> dict[str, np.ndarray]:
    """Bounds of the divergences at each position, and the part of the KL that lies in the listed tokens.

    The local model's distribution is exact: ``log_probabilities`` of its hidden states, a chunk of positions at a time.
    The head of the bounds is the listed tokens and the scored one, of which both log-probabilities are known; of the
    others, the server's are at most ``unlisted_most`` and the local model's lie between the least and the largest.

    Args:
        hidden: the local model's hidden states at the positions that predict the tokens.
        head: the local model's.
        answer: of the server, on the same positions.
        token_ids: the scored tokens.
        endpoint_role: the role of the server's model, "policy" or "reference".
        precision: of the server's log-probabilities.
        buffer_bytes: memory for a chunk's logits.

    Returns:
        The columns ``BOUND_COLUMNS`` of ``tokens/``, in float64; NaN where the server's probabilities contradict each
        other.
    """
    parts = [
        _columns_of_chunk(
            log_probabilities(hidden[rows], head), answer, rows, token_ids[rows], endpoint_role, precision
        )
        for rows in _chunks(len(hidden), head, hidden, buffer_bytes)
    ]
    names = list(parts[0]) if parts else []
    return {name: np.concatenate([part[name] for part in parts]) for name in names}


def _chunks(tokens: int, head: Head, hidden: Tensor, buffer_bytes: int) -> Iterator[slice]:
    """Slices of consecutive positions whose logits fit into ``buffer_bytes``."""
    size = max(1, buffer_bytes // (COPIES * 4 * head.vocabulary(hidden)))
    for begin in range(0, tokens, size):
        yield slice(begin, min(begin + size, tokens))


class _KnownLogprobs(NamedTuple):
    """What is known of both models at a few positions: some tokens' log-probabilities, and limits of all others'."""

    heads: Mapping[str, Float[Tensor, "tokens known"]]
    """Role -> log-probabilities of the listed tokens, and in the last column of the scored one if it is not listed;
    -inf where there is no token."""
    intervals: Mapping[str, LogpInterval]
    """Role -> these log-probabilities minus and plus their largest errors."""
    least: Mapping[str, Float[Tensor, " tokens"]]
    """Role -> no token outside the head has a smaller log-probability."""
    most: Mapping[str, Float[Tensor, " tokens"]]
    """Role -> no token outside the head has a larger one."""
    is_whole: Tensor
    """Whether the head is the whole vocabulary."""
    token_is_listed: Tensor
    """Whether the scored token is one of the likeliest."""


def _columns_of_chunk(
    local_logp: Float[Tensor, "tokens vocab"],
    answer: ListedLogprobs,
    rows: slice,
    token_ids: Tensor,
    endpoint_role: str,
    precision: LogprobPrecision,
) -> dict[str, np.ndarray]:
    """``divergence_bounds`` of a few positions."""
    known = _known_logprobs(local_logp, answer, rows, token_ids, endpoint_role, precision)
    listed_p, listed_q = (known.heads[role][:, :-1].double() for role in ("policy", "reference"))
    terms = torch.where(listed_p == -torch.inf, 0.0, listed_p.exp() * (listed_p - listed_q))
    listed_probability = known.heads[endpoint_role][:, :-1].double().exp().sum(-1).clamp(max=1)
    return {
        **_bound_columns(known),
        "kl_of_listed": terms.sum(-1).numpy(),
        "listed_probability": listed_probability.numpy(),
        "token_is_listed": known.token_is_listed.double().numpy(),
    }


def _known_logprobs(
    local_logp: Float[Tensor, "tokens vocab"],
    answer: ListedLogprobs,
    rows: slice,
    token_ids: Tensor,
    endpoint_role: str,
    precision: LogprobPrecision,
) -> _KnownLogprobs:
    """What is known of both models at the positions ``rows``, on the CPU; the limits allow for rounding."""
    device = local_logp.device
    listed_ids = torch.from_numpy(answer.listed_ids[rows]).to(device)
    listed_logp = torch.from_numpy(answer.listed_logp[rows]).to(device)
    token_logp = torch.from_numpy(answer.token_logp[rows]).to(device)
    token_is_listed = (listed_ids == token_ids.unsqueeze(-1)).any(-1)
    ids = torch.cat([listed_ids, torch.where(token_is_listed, -1, token_ids).unsqueeze(-1)], dim=-1)
    endpoint_head = torch.cat(
        [listed_logp, torch.where(token_is_listed, -torch.inf, token_logp).unsqueeze(-1)], dim=-1
    ).cpu()
    is_padding = ids < 0
    local_head = local_logp.gather(-1, ids.clamp(min=0)).masked_fill(is_padding, -torch.inf).cpu()
    known_ids = torch.where(is_padding, token_ids.unsqueeze(-1), ids)
    local_least = local_logp.scatter(-1, known_ids, torch.inf).amin(-1)
    local_most = local_logp.scatter(-1, known_ids, -torch.inf).amax(-1)
    unlisted_most = answer.unlisted_most[rows]
    endpoint_most = torch.from_numpy(unlisted_most + precision.error_nats(unlisted_most))
    errors = torch.from_numpy(precision.error_nats(endpoint_head.numpy()))
    local_role = "reference" if endpoint_role == "policy" else "policy"
    return _KnownLogprobs(
        heads={local_role: local_head, endpoint_role: endpoint_head},
        intervals={
            local_role: logp_interval(local_head),
            endpoint_role: logp_interval(endpoint_head, errors),
        },
        least={
            local_role: (local_least - rounding_nats(local_least)).cpu(),
            endpoint_role: torch.full_like(endpoint_most, -torch.inf),
        },
        most={
            local_role: (local_most + rounding_nats(local_most)).cpu(),
            endpoint_role: endpoint_most,
        },
        is_whole=((~is_padding).sum(-1) == local_logp.shape[-1]).cpu(),
        token_is_listed=token_is_listed.cpu(),
    )


def _bound_columns(known: _KnownLogprobs) -> dict[str, np.ndarray]:
    """The bounds of each divergence; exact where the head is the whole vocabulary."""
    directions = {
        "kl_policy_reference": ("kl", "policy", "reference"),
        "kl_reference_policy": ("kl", "reference", "policy"),
        **{name: (name, "policy", "reference") for name in SYMMETRIC},
    }
    columns: dict[str, np.ndarray] = {}
    for name, (divergence, p, q) in directions.items():
        tail = Tail(
            logp_least=known.least[p],
            logp_most=known.most[p],
            logq_least=known.least[q],
            logq_most=known.most[q],
        )
        record, heads = DIVERGENCES[divergence], (known.intervals[p], known.intervals[q])
        lower, upper = bounds_of_intervals(*heads, divergence=record, tail=tail)
        if known.is_whole.any():
            whole = bounds_of_intervals(*heads, divergence=record, tail=None)
            lower, upper = (
                torch.where(known.is_whole, *bounds) for bounds in zip(whole, (lower, upper), strict=True)
            )
        columns[f"{name}_lower"] = lower.clamp(min=0).numpy()
        columns[f"{name}_upper"] = upper.clamp(max=SYMMETRIC.get(name, inf)).numpy()
    return columns
