"""Bounds of the divergences between a server's distribution and a local model's, from the tokens that it lists."""

from collections.abc import Mapping
from math import inf, log
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kleash.divergences import DIVERGENCES
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
    *,
    endpoint_role: str,
    buffer_bytes: int,
    is_padding: Bool[Tensor, " vocab"] | None = None,
) -> dict[str, np.ndarray]:
    """Bounds of the divergences at each position, and the part of the KL that lies in the listed tokens.

    The local model's distribution is exact: ``log_probabilities`` of its hidden states, a chunk of positions at a time.
    The head of the bounds is the listed tokens and the scored one, of which both log-probabilities are known; of the
    others, the server's are at most ``unlisted_most`` and the local model's lie between the least and the largest.

    Args:
        hidden: the local model's hidden states at the positions that predict the tokens.
        head: the local model's.
        answer: of the server, on the same positions.
        endpoint_role: the role of the server's model, "policy" or "reference".
        buffer_bytes: memory for a chunk's logits.
        is_padding: whether each logit is of no token; None if all are of tokens.

    Returns:
        The columns ``BOUND_COLUMNS`` of ``tokens/``, in float64, NaN where the server's probabilities contradict each
        other; and with ``is_padding`` whether the scored token is such a row, and their probability: of the server's
        model, that of the rows among the listed and the scored tokens.
    """
    parts: list[dict[str, np.ndarray]] = []
    size = max(1, buffer_bytes // (COPIES * 4 * head.vocabulary(hidden)))
    for begin in range(0, len(hidden), size):
        rows = slice(begin, min(begin + size, len(hidden)))
        local_logp = log_probabilities(hidden[rows], head)
        parts.append(_columns_of_chunk(local_logp, answer, rows, endpoint_role))
        if is_padding is not None:
            parts[-1] |= _padding_columns(local_logp, answer, rows, endpoint_role, is_padding.numpy())
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


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
    local_logp: Float[Tensor, "tokens vocab"], answer: ListedLogprobs, rows: slice, endpoint_role: str
) -> dict[str, np.ndarray]:
    """``divergence_bounds`` of a few positions."""
    known = _known_logprobs(local_logp, answer, rows, endpoint_role)
    listed_p, listed_q = (known.heads[role][:, :-1].double() for role in ("policy", "reference"))
    terms = torch.where(listed_p == -torch.inf, 0.0, listed_p.exp() * (listed_p - listed_q))
    listed_probability = known.heads[endpoint_role][:, :-1].double().exp().sum(-1).clamp(max=1)
    return {
        **_bound_columns(known),
        "kl_of_listed": terms.sum(-1).numpy(),
        "listed_probability": listed_probability.numpy(),
        "token_is_listed": known.token_is_listed.double().numpy(),
    }


def _padding_columns(
    local_logp: Float[Tensor, "tokens vocab"],
    answer: ListedLogprobs,
    rows: slice,
    endpoint_role: str,
    is_padding: Bool[np.ndarray, " vocab"],
) -> dict[str, np.ndarray]:
    """The columns about rows that are no tokens, of a few positions."""
    local_role = "reference" if endpoint_role == "policy" else "policy"
    is_of_scored = is_padding[answer.token_ids[rows]]
    listed = np.where(is_padding[answer.listed_ids[rows]], np.exp(answer.listed_logp[rows]), 0).sum(-1)
    scored = np.where(is_of_scored & ~answer.is_listed[rows], np.exp(answer.token_logp[rows]), 0)
    of_local = local_logp[:, torch.from_numpy(is_padding).to(local_logp.device)].double().exp().sum(-1)
    return {
        "is_padding": is_of_scored,
        f"padding_probability_{local_role}": of_local.cpu().numpy(),
        f"padding_probability_{endpoint_role}": listed + scored,
    }


def _known_logprobs(
    local_logp: Float[Tensor, "tokens vocab"], answer: ListedLogprobs, rows: slice, endpoint_role: str
) -> _KnownLogprobs:
    """What is known of both models at the positions ``rows``, on the CPU; the limits allow for rounding."""
    names = ("listed_ids", "token_ids", "listed_logp", "token_logp", "is_listed", "unlisted_most")
    listed_ids, token_ids, listed_logp, token_logp, token_is_listed, unlisted_most = (
        torch.from_numpy(getattr(answer, name)[rows]) for name in names
    )
    ids = torch.cat([listed_ids, token_ids.unsqueeze(-1)], dim=-1)
    is_absent = torch.cat([torch.zeros_like(listed_ids, dtype=torch.bool), token_is_listed.unsqueeze(-1)], -1)
    endpoint_head = torch.cat([listed_logp, token_logp.unsqueeze(-1)], dim=-1)
    endpoint_head = endpoint_head.masked_fill(is_absent, -torch.inf)
    there = ids.to(local_logp.device)
    local_head = local_logp.gather(-1, there).cpu().masked_fill(is_absent, -torch.inf)
    local_least = local_logp.scatter(-1, there, torch.inf).amin(-1)
    local_most = local_logp.scatter(-1, there, -torch.inf).amax(-1)
    endpoint_most = unlisted_most + rounding_nats(unlisted_most, torch.float32)
    errors = rounding_nats(endpoint_head, torch.float32)
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
        is_whole=(~is_absent).sum(-1) == local_logp.shape[-1],
        token_is_listed=token_is_listed,
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
