"""Bounds of the divergences between a server's distribution and a local model's, from the tokens that it lists."""

from collections.abc import Iterator, Mapping
from math import inf, log
from types import MappingProxyType

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from kleash.engines.endpoints.listed_logprobs import ListedLogprobs
from kleash.estimators import Tail, kl_bounds
from kleash.estimators.bounds import rounding_nats
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
    buffer_bytes: int,
) -> dict[str, np.ndarray]:
    """Bounds of the divergences at each position, and the part of the KL that lies in the listed tokens.

    The local model's distribution is exact: ``log_probabilities`` of its hidden states, a chunk of positions at a time.
    The head of ``kl_bounds`` is the listed tokens and the scored one, of which both log-probabilities are known; of the
    others, the server's are at most ``unlisted_most`` and the local model's lie between the least and the largest.

    Args:
        hidden: the local model's hidden states at the positions that predict the tokens.
        head: the local model's.
        answer: of the server, on the same positions.
        token_ids: the scored tokens.
        endpoint_role: the role of the server's model, "policy" or "reference".
        buffer_bytes: memory for a chunk's logits.

    Returns:
        The columns ``BOUND_COLUMNS`` of ``tokens/``, in float64; NaN where the server's probabilities sum to more than
        1.
    """
    parts = [
        _bounds_of_chunk(log_probabilities(hidden[rows], head), answer, rows, token_ids[rows], endpoint_role)
        for rows in _chunks(len(hidden), head, hidden, buffer_bytes)
    ]
    names = list(parts[0]) if parts else []
    return {name: np.concatenate([part[name] for part in parts]) for name in names}


def _chunks(tokens: int, head: Head, hidden: Tensor, buffer_bytes: int) -> Iterator[slice]:
    """Slices of consecutive positions whose logits fit into ``buffer_bytes``."""
    size = max(1, buffer_bytes // (COPIES * 4 * head.vocabulary(hidden)))
    for begin in range(0, tokens, size):
        yield slice(begin, min(begin + size, tokens))


def _bounds_of_chunk(
    local_logp: Float[Tensor, "tokens vocab"],
    answer: ListedLogprobs,
    rows: slice,
    token_ids: Tensor,
    endpoint_role: str,
) -> dict[str, np.ndarray]:
    """``divergence_bounds`` of a few positions."""
    device = local_logp.device
    listed_ids = torch.from_numpy(answer.listed_ids[rows]).to(device)
    listed_logp = torch.from_numpy(answer.listed_logp[rows]).to(device)
    token_logp = torch.from_numpy(answer.token_logp[rows]).to(device)
    token_is_listed = (listed_ids == token_ids.unsqueeze(-1)).any(-1)
    ids = torch.cat([listed_ids, torch.where(token_is_listed, -1, token_ids).unsqueeze(-1)], dim=-1)
    endpoint_logp = torch.cat(
        [listed_logp, torch.where(token_is_listed, -torch.inf, token_logp).unsqueeze(-1)], dim=-1
    ).to(torch.float32)
    is_padding = ids < 0
    known_logp = local_logp.gather(-1, ids.clamp(min=0)).masked_fill(is_padding, -torch.inf)
    known_ids = torch.where(is_padding, token_ids.unsqueeze(-1), ids)
    least = local_logp.scatter(-1, known_ids, torch.inf).amin(-1)
    most = local_logp.scatter(-1, known_ids, -torch.inf).amax(-1)
    is_whole = ((~is_padding).sum(-1) == local_logp.shape[-1]).cpu()
    endpoint_most = torch.from_numpy(answer.unlisted_most[rows]).to(device, torch.float32)
    local = (least - rounding_nats(least), most + rounding_nats(most))
    served = (torch.full_like(endpoint_most, -torch.inf), endpoint_most + rounding_nats(endpoint_most))
    heads = {"local": known_logp.cpu(), "endpoint": endpoint_logp.cpu()}
    limits = {"local": [x.cpu() for x in local], "endpoint": [x.cpu() for x in served]}
    p, q = ("endpoint", "local") if endpoint_role == "policy" else ("local", "endpoint")
    columns: dict[str, np.ndarray] = {}
    directions = {"kl_policy_reference": ("kl", p, q), "kl_reference_policy": ("kl", q, p)}
    directions |= {name: (name, p, q) for name in SYMMETRIC}
    for name, (divergence, first, second) in directions.items():
        tail = Tail(
            logp_least=limits[first][0],
            logp_most=limits[first][1],
            logq_least=limits[second][0],
            logq_most=limits[second][1],
        )
        lower, upper, *_ = kl_bounds(heads[first], heads[second], divergence=divergence, tail=tail)
        if is_whole.any():
            whole = kl_bounds(heads[first], heads[second], divergence=divergence, tail=None)
            lower = torch.where(is_whole, whole.lower, lower)
            upper = torch.where(is_whole, whole.upper, upper)
        columns[f"{name}_lower"] = lower.clamp(min=0).numpy()
        columns[f"{name}_upper"] = upper.clamp(max=SYMMETRIC.get(name, inf)).numpy()
    width = listed_ids.shape[-1]
    logp, logq = (heads[which].double()[:, :width] for which in (p, q))
    terms = torch.where(logp == -torch.inf, 0.0, logp.exp() * (logp - logq))
    is_complete = torch.from_numpy(answer.is_complete[rows])
    columns["kl_of_listed"] = torch.where(is_complete, terms.sum(-1), torch.nan).numpy()
    columns["listed_probability"] = heads["endpoint"][:, :width].double().exp().sum(-1).clamp(max=1).numpy()
    columns["token_is_listed"] = token_is_listed.cpu().double().numpy()
    return columns
