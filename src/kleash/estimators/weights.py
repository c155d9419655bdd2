"""Importance weights of samples from a behaviour distribution, and control-variate weights of two sums of a KL."""

from math import inf, log
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor
from torch.nn.functional import pad

from kleash.arguments import validated
from kleash.errors import OptionError
from kleash.masking import as_mask
from kleash.precision import at_least_float32
from kleash.registry import require_choice

Level = Literal["token", "before", "prefix", "sequence"]
LEVELS: tuple[Level, ...] = ("token", "before", "prefix", "sequence")

MIN_OTHER_SEQUENCES = 3
"""Fewest other sequences to fit a control-variate weight on."""


class ImportanceWeights(NamedTuple):
    """Importance weights of tokens, with the effective sample size; without gradients."""

    values: Float[Tensor, "batch time"]
    """One weight per token, after the cap; 0 where masked."""
    effective_sample_size: Float[Tensor, ""]
    """Number of equally weighted units (tokens, or sequences at level "sequence") with the same variance:
    (sum w)^2 / sum w^2, after the cap. NaN if there are no units, all weights are 0, or a drawn token has probability 0
    under the behaviour distribution."""
    truncated_share: Float[Tensor, ""]
    """Share of units whose weight was lowered by the cap. NaN if there are no units."""


@validated
def importance_weights(
    token_logp: Float[Tensor, "batch time"],
    behaviour_logp: Float[Tensor, "batch time"],
    mask: Bool[Tensor, "batch time"] | Integer[Tensor, "batch time"],
    *,
    level: Level = "token",
    cap: float | None = None,
) -> ImportanceWeights:
    """Importance weights that convert averages over behaviour samples into averages over ``p``.

        token      p(x_t | prefix) / behaviour(x_t | prefix)
        before     the product of these over the tokens before t
        prefix     the product of these up to and including t
        sequence   the product over the whole response, the same for each of its tokens

    For an unbiased estimator of the KL, token weights give the sum of exact next-token KLs along prefixes of the
    *behaviour* distribution; prefix and sequence weights give the KL between responses, with a variance that grows
    with the number of factors. An *exact* next-token KL does not depend on the drawn token, so its weight is that of
    the prefix alone: "before", with one factor less.

    A masked token contributes a factor of 1 and has weight 0; its log-probabilities may be NaN or inf. Products are
    computed and capped in logarithms, so a capped weight never overflows, and the effective sample size is correct
    even if an uncapped weight does (the weight is then ``inf``).

    ``cap`` introduces a bias: the weight ``rho`` becomes ``min(rho, cap)``, and the average of an estimate f changes by

        E_behaviour[(min(rho, cap) - rho) f] = -E_p[(1 - cap / rho)+ f]

    so the KL and its gradient are too small, most where ``p`` exceeds the behaviour distribution most.
    ``truncated_share`` is the share of units concerned.

    Args:
        token_logp: log-probabilities of the drawn tokens under ``p``.
        behaviour_logp: the same under the distribution that they were drawn from.
        mask: true (or 1) for the tokens that count.
        level: "token", "before", "prefix" or "sequence".
        cap: the largest weight, above 0.

    Raises:
        ShapeError: if the three differ in shape, or are not [batch, time].
        OptionError: if there is no such level, or ``cap`` is not above 0.

    >>> token_logp, behaviour_logp = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -2.0]])
    >>> kleash.importance_weights(token_logp, behaviour_logp, torch.ones(1, 2).bool()).values
    tensor([[1.6487, 1.0000]])
    """
    require_choice(LEVELS, level=level)
    require_valid_cap(cap)
    is_counted = as_mask(mask)
    log_ratio = detached_where(token_logp, is_counted) - detached_where(behaviour_logp, is_counted)
    if level == "sequence":
        units = is_counted.any(-1)
        log_weights = log_ratio.sum(-1)
    else:
        units = is_counted
        product = log_ratio if level == "token" else log_ratio.cumsum(-1)
        log_weights = pad(product, (1, 0))[..., :-1] if level == "before" else product
    log_cap = inf if cap is None else log(cap)
    above_cap = log_weights > log_cap
    log_weights = torch.where(above_cap, log_cap, log_weights)
    weights = log_weights.exp().unsqueeze(-1) if level == "sequence" else log_weights.exp()
    return ImportanceWeights(
        values=torch.where(is_counted, weights, 0.0),
        effective_sample_size=effective_sample_size(torch.where(units, log_weights, -inf)),
        truncated_share=(above_cap & units).sum().float() / units.sum(),
    )


def require_valid_cap(cap: float | None) -> None:
    """Raise OptionError unless the largest weight is above 0, or None: at a cap of 0 nothing would be trained."""
    if cap is not None and not cap > 0:
        raise OptionError(f"cap is {cap}; give a weight above 0, or leave it out")


def detached_where(values: Tensor, is_counted: Tensor) -> Tensor:
    """The values where ``is_counted`` is true and 0 elsewhere, detached, in at least float32."""
    return torch.where(is_counted, at_least_float32(values.detach()), 0.0)


def effective_sample_size(log_weights: Tensor) -> Tensor:
    """(sum w)^2 / sum w^2, from weights divided by the largest; NaN if there are none, or all are 0."""
    flat = log_weights.flatten()
    if flat.numel() == 0:
        return flat.new_tensor(torch.nan)
    weights = (flat - flat.max()).exp()
    return weights.sum().square() / weights.square().sum()


def controlled(sampled: Tensor, exact: Tensor, weight: Tensor) -> Tensor:
    """``U - a (U - C)`` of a sampled U and an exact C of the same mean; one of weight 0 is not read."""
    combination = (1 - weight) * sampled + weight * exact
    return torch.where(weight == 1, exact, torch.where(weight == 0, sampled, combination))


def leave_one_out_weights(
    sampled: Float[Tensor, "batch"], exact: Float[Tensor, "batch"], is_counted: Bool[Tensor, "batch"]
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
    is_self = torch.eye(len(is_counted), dtype=torch.bool, device=is_counted.device)
    is_other = (usable & ~is_self).to(sampled.dtype)
    n = is_other.sum(-1)
    u = torch.where(usable, sampled, 0.0)
    difference = torch.where(usable, sampled - exact, torch.nan)
    # Of equal numbers the mean may be rounded, but not the median: their variance is exactly 0.
    d = torch.where(usable, difference - difference.nanmedian(), 0.0)
    mean_u, mean_d = (is_other * u).sum(-1) / n, (is_other * d).sum(-1) / n
    deviation_u, deviation_d = u - mean_u.unsqueeze(-1), d - mean_d.unsqueeze(-1)
    variance = (is_other * deviation_d.square()).sum(-1)
    covariance = (is_other * deviation_u * deviation_d).sum(-1)
    can_fit = (n >= MIN_OTHER_SEQUENCES) & (variance > 0) & usable
    return torch.where(can_fit, covariance / torch.where(can_fit, variance, 1.0), 1.0)
