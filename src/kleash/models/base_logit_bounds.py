"""Bounds of the KL divergence between a model and a base whose log-probabilities are stored in 16 bits a token."""

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from kleash.models.base_logits import MAX_CODE, RANGE, BaseLogitsRows

CODE_ERROR = 0.53
"""Largest difference of a logit from its code in steps: half a step, and rounding of the code's float32
arithmetic."""
FLOAT32_STEPS = 4 * 2.0**-24
"""Relative rounding of the stored minimum, from four operations in float32."""


def logp_intervals(rows: BaseLogitsRows) -> tuple[Float[Tensor, "rows vocab"], Float[Tensor, "rows vocab"]]:
    """The smallest and the largest log-probability of each token that its code allows, in float64.

    Where the codes of a row span 16 nats, the smallest for code 0 is -inf: it stands for every logit that is 16 nats or
    more below the largest.
    """
    scale = torch.from_numpy(rows.scale.astype(np.float64))[:, None]
    minimum = torch.from_numpy(rows.minimum.astype(np.float64))[:, None]
    codes = torch.from_numpy(rows.codes.astype(np.int32)).double()
    margin = CODE_ERROR * scale + FLOAT32_STEPS * (minimum.abs() + 1)
    center = minimum + scale * codes
    is_clipped = scale > (1 - FLOAT32_STEPS) * RANGE / MAX_CODE
    lowest = torch.where((codes == 0) & is_clipped, -torch.inf, center - margin)
    return lowest, (center + margin).clamp(max=0)


def kl_bounds(
    lowest: Float[Tensor, "rows vocab"],
    highest: Float[Tensor, "rows vocab"],
    logq: Float[Tensor, "rows vocab"],
) -> tuple[Float[Tensor, " rows"], Float[Tensor, " rows"]]:
    """Bounds of KL(p ‖ q) for every p with log p between ``lowest`` and ``highest`` that sums to 1.

    Weak duality: for any number λ, a sum over tokens bounds f(p) = Σ p (log p - log q) subject to Σ p = 1,

        λ + Σ min_p h(p)  ≤  f  ≤  λ + Σ max_p h(p),      h(p) = p (log p - log q - λ),

    each over its own token's interval. h is convex, so its largest value is at an end and its smallest at
    q exp(λ - 1), or the end next to it. λ is the KL of the centres plus 1, at which the bounds are narrow.
    """
    center = torch.where(lowest.isfinite(), (lowest + highest) / 2, highest).log_softmax(-1)
    multiplier = (center.exp() * (center - logq)).sum(-1, keepdim=True) + 1
    ends = [_term(end, logq + multiplier) for end in (lowest, highest)]
    inner = torch.minimum(torch.maximum(logq + multiplier - 1, lowest), highest)
    lower = multiplier[:, 0] + _term(inner, logq + multiplier).sum(-1)
    upper = multiplier[:, 0] + torch.maximum(*ends).sum(-1)
    return lower.clamp(min=0), upper


def reverse_kl_bounds(
    lowest: Float[Tensor, "rows vocab"],
    highest: Float[Tensor, "rows vocab"],
    logq: Float[Tensor, "rows vocab"],
) -> tuple[Float[Tensor, " rows"], Float[Tensor, " rows"]]:
    """Bounds of KL(q ‖ p), for the same p as in ``kl_bounds``; the upper one is inf if a token has no lowest value.

        Σ q log q - Σ max_x (q x - e^x) - 1  ≤  KL(q ‖ p)  ≤  Σ q log q - Σ min_x (q x - e^x) - 1

    with x = log p in its token's interval; q x - e^x is concave with its largest value at x = log q.
    """
    q = logq.exp()
    negentropy = _term(logq, torch.zeros_like(logq)).sum(-1)
    inner = torch.minimum(torch.maximum(logq, lowest), highest)
    largest_sum = (q * inner - inner.exp()).sum(-1)
    ends = [torch.where(end.isfinite(), q * end - end.exp(), -torch.inf) for end in (lowest, highest)]
    smallest_sum = torch.minimum(*ends).sum(-1)
    return (negentropy - largest_sum - 1).clamp(min=0), negentropy - smallest_sum - 1


def _term(logp: Tensor, shifted: Tensor) -> Tensor:
    """p (log p - shifted), and 0 at p = 0."""
    p = logp.exp()
    return torch.where(p > 0, p * (torch.where(p > 0, logp, 0) - shifted), 0)
