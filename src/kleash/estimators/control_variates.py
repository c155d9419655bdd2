"""Leave-one-out control-variate weights, used for rewards (``leash``) and for losses (``losses``)."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

MIN_OTHER_SEQUENCES = 3
"""Fewest other sequences to fit a weight on."""


def leave_one_out_weights(
    sampled: Float[Tensor, "batch"], exact: Float[Tensor, "batch_e"], is_counted: Bool[Tensor, "batch_c"]
) -> Float[Tensor, "batch"]:
    """For each sequence, the regression weight fitted to all other sequences that count.

        a_i = Cov(U, U - C) / Var(U - C), over the sequences other than i

    It minimises the variance of ``U - a (U - C)``; since sequence i has no part in a_i, the combination has the mean of
    U and C. It is 1, not fitted, with fewer than three other sequences, if U - C does not vary among them, and for a
    sequence with an infinite sum.

    Args:
        sampled: U, the sum of log ratios.
        exact: C, the sum of exact KLs.
        is_counted: which sequences count.
    """
    usable = is_counted & sampled.isfinite() & exact.isfinite()
    is_other = (
        usable.unsqueeze(0) & ~torch.eye(len(is_counted), dtype=torch.bool, device=is_counted.device)
    ).to(sampled.dtype)
    n = is_other.sum(-1)
    u = torch.where(usable, sampled, 0.0)
    d = torch.where(usable, sampled - exact, 0.0)
    mean_u, mean_d = (is_other @ u) / n.clamp(min=1), (is_other @ d) / n.clamp(min=1)
    deviation_u, deviation_d = u - mean_u.unsqueeze(-1), d - mean_d.unsqueeze(-1)
    variance = (is_other * deviation_d.square()).sum(-1)
    covariance = (is_other * deviation_u * deviation_d).sum(-1)
    can_fit = (n >= MIN_OTHER_SEQUENCES) & (variance > 0) & usable
    return torch.where(can_fit, covariance / torch.where(can_fit, variance, 1.0), 1.0)
