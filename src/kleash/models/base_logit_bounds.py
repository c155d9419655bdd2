"""Bounds of the KL divergence between a model and a base whose log-probabilities are stored in 16 bits a token."""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kleash.models.base_logits import IK_RANGE, MAX_CODE, RANGE, BaseLogitsRows

CODE_ERROR = 0.53
"""Largest difference of a logit from its code in steps: half a step, and rounding of the code's float32
arithmetic."""
FLOAT32_STEPS = 4 * 2.0**-24
"""Relative rounding of the stored minimum, from four operations in float32."""
RANGE_ERROR = 2.0**-10
"""Relative error up to which codes span a whole range: it is a difference of two logits, rounded in float32. The bounds
of a row that is taken for clipped hold also if it is not."""


class LogpIntervals(NamedTuple):
    """The smallest and the largest log-probability of each token that its code allows, and their exponentials."""

    lowest: Float[Tensor, "rows vocab"]
    highest: Float[Tensor, "rows vocab"]
    p_lowest: Float[Tensor, "rows vocab"]
    p_highest: Float[Tensor, "rows vocab"]


def logp_intervals(rows: BaseLogitsRows) -> LogpIntervals:
    """The log-probabilities that the codes allow, in float64.

    Where the codes of a row span 16 nats, or 24 as in ik_llama.cpp, the smallest for code 0 is -inf: it stands for
    every logit that is so far or farther below the largest.
    """
    scale = torch.from_numpy(rows.scale.astype(np.float64))[:, None]
    minimum = torch.from_numpy(rows.minimum.astype(np.float64))[:, None]
    center = torch.from_numpy(rows.codes.astype(np.float64)).mul_(scale).add_(minimum)
    margin = CODE_ERROR * scale + FLOAT32_STEPS * (minimum.abs() + 1)
    ranges = torch.tensor([RANGE, IK_RANGE], dtype=torch.float64)
    is_clipped = ((MAX_CODE * scale / ranges - 1).abs() < RANGE_ERROR).any(-1, keepdim=True)
    is_open = torch.from_numpy(rows.codes == 0) & is_clipped
    p_center = center.exp()
    return LogpIntervals(
        lowest=(center - margin).masked_fill_(is_open, -torch.inf),
        highest=(center + margin).clamp_(max=0),
        p_lowest=(p_center * (-margin).exp()).masked_fill_(is_open, 0),
        p_highest=(p_center * margin.exp()).clamp_(max=1),
    )


def restricted(base: LogpIntervals, mask: Bool[Tensor, " vocab"]) -> LogpIntervals:
    """The intervals of the distribution that is restricted to the tokens in ``mask`` and normalised."""
    rest_highest = 1 - base.p_lowest[:, ~mask].sum(-1, keepdim=True)
    rest_lowest = 1 - base.p_highest[:, ~mask].sum(-1, keepdim=True).clamp(max=1)
    return LogpIntervals(
        lowest=base.lowest[:, mask] - rest_highest.log(),
        highest=(base.highest[:, mask] - rest_lowest.log()).clamp(max=0),
        p_lowest=base.p_lowest[:, mask] / rest_highest,
        p_highest=(base.p_highest[:, mask] / rest_lowest).clamp(max=1),
    )


def impossible_row(base: LogpIntervals) -> int | None:
    """The first row of which no probabilities within the intervals sum to 1, such as one with a changed code."""
    is_possible = (base.p_lowest.sum(-1) <= 1) & (base.p_highest.sum(-1) >= 1)
    return None if bool(is_possible.all()) else int(is_possible.logical_not().nonzero()[0, 0])


def kl_bounds(
    base: LogpIntervals, logq: Float[Tensor, "rows vocab"]
) -> tuple[Float[Tensor, " rows"], Float[Tensor, " rows"]]:
    """Bounds of KL(p ‖ q) for every p whose log-probabilities are in the intervals of ``base`` and that sums to 1.

    Weak duality: for any number λ, a sum over tokens bounds f(p) = Σ p (log p - log q) subject to Σ p = 1,

        λ + Σ min_p h(p)  ≤  f  ≤  λ + Σ max_p h(p),      h(p) = p (log p - log q - λ),

    each over its own token's interval. h is convex, so its largest value is at an end and its smallest at
    q exp(λ - 1), or the end next to it. λ is 1 and the KL of the normalised largest p, at which the bounds are narrow.
    Where q is 0, h is infinite but for p = 0.
    """
    is_zero = logq.isneginf()
    has_zeros = bool(is_zero.any())
    positive_logq = logq.masked_fill(is_zero, 0) if has_zeros else logq
    mass = base.p_highest.sum(-1, keepdim=True)
    divergence = (base.p_highest * (base.highest - positive_logq)).sum(-1, keepdim=True) / mass - mass.log()
    shifted = positive_logq + (divergence + 1)
    at_lowest = (base.lowest - shifted).mul_(base.p_lowest).nan_to_num_(nan=0)  # h(0) = 0
    at_highest = (base.highest - shifted).mul_(base.p_highest)
    inner = (shifted - 1).clamp_(min=base.lowest, max=base.highest)
    at_inner = inner.exp().mul_(inner.sub_(shifted))
    if has_zeros:
        at_inner = at_inner.masked_fill_(is_zero, 0).masked_fill_(is_zero & (base.p_lowest > 0), torch.inf)
        at_highest = at_highest.masked_fill_(is_zero, torch.inf)
    multiplier = divergence[:, 0] + 1
    lower = multiplier + at_inner.sum(-1)
    upper = multiplier + torch.maximum(at_lowest, at_highest).sum(-1)
    return lower.clamp(min=0), upper


def reverse_kl_bounds(
    base: LogpIntervals, logq: Float[Tensor, "rows vocab"]
) -> tuple[Float[Tensor, " rows"], Float[Tensor, " rows"]]:
    """Bounds of KL(q ‖ p), for the same p as in ``kl_bounds``.

        Σ q log q - Σ max_x (q x - e^x) - 1  ≤  KL(q ‖ p)  ≤  Σ q log q - Σ min_x (q x - e^x) - 1

    with x = log p in its token's interval; q x - e^x is concave with its largest value at x = log q. The upper bound is
    inf if a token of q > 0 has no lowest value.
    """
    is_open = (base.lowest.isneginf() & ~logq.isneginf()).any(-1)
    q = logq.exp()
    negentropy = _products(q, logq).sum(-1)
    inner = _products(q, logq.clamp(min=base.lowest, max=base.highest))
    largest_sum = inner.sub_(q.clamp(min=base.p_lowest, max=base.p_highest)).sum(-1)
    ends = [
        _products(q, x).sub_(p) for x, p in ((base.lowest, base.p_lowest), (base.highest, base.p_highest))
    ]
    upper = negentropy - torch.minimum(*ends).sum(-1) - 1
    return (negentropy - largest_sum - 1).clamp(min=0), upper.masked_fill(is_open, torch.inf)


def _products(q: Float[Tensor, "rows vocab"], x: Float[Tensor, "rows vocab"]) -> Float[Tensor, "rows vocab"]:
    """q x, and 0 where q is 0."""
    return (q * x).nan_to_num_(nan=0, neginf=-torch.inf)
