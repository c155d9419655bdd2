"""The weight of a control variate, fitted for each sequence on the others."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

FEWEST = 3
"""Other sequences that a weight is fitted on, at least."""


def weights_of_the_others(
    sampled: Float[Tensor, "batch"], exact: Float[Tensor, "batch_e"], counts: Bool[Tensor, "batch_c"]
) -> Float[Tensor, "batch"]:
    """For each sequence the regression weight of all the others that count.

        a_i = Cov(U, U - C) / Var(U - C), over the sequences other than i

    It makes ``U - a (U - C)`` vary least, and as sequence i had no part in a_i, the mean of the combination
    stays that of U and C. It is 1, not fitted, with fewer than three others, where U - C does not vary
    among them, and where a sum is infinite.

    Args:
        sampled: U, the sum of log ratios.
        exact: C, the sum of exact KLs.
        counts: which sequences there are.
    """
    usable = counts & sampled.isfinite() & exact.isfinite()
    others = (usable.unsqueeze(0) & ~torch.eye(len(counts), dtype=torch.bool, device=counts.device)).to(
        sampled.dtype
    )
    n = others.sum(-1)
    u = torch.where(usable, sampled, 0.0)
    d = torch.where(usable, sampled - exact, 0.0)
    mean_u, mean_d = (others @ u) / n.clamp(min=1), (others @ d) / n.clamp(min=1)
    spread_u, spread_d = u - mean_u.unsqueeze(-1), d - mean_d.unsqueeze(-1)
    variance = (others * spread_d.square()).sum(-1)
    covariance = (others * spread_u * spread_d).sum(-1)
    fitted = (n >= FEWEST) & (variance > 0) & usable
    return torch.where(fitted, covariance / torch.where(fitted, variance, 1.0), 1.0)
