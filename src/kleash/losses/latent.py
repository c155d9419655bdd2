"""The KL term of a variational autoencoder: per dimension, free bits, annealing, active units."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kleash.arguments import validated
from kleash.divergences import kl_gaussian
from kleash.errors import OptionError, ShapeError
from kleash.precision import at_least_float32
from kleash.registry import require_at_least, require_positive_share

ACTIVE_VARIANCE = 0.01
"""The threshold of Burda et al. Its value matters little, since the variances of most units are far from it."""


class ActiveUnits(NamedTuple):
    """The latent dimensions that depend on the data."""

    number: Int[Tensor, ""]
    """Number of active dimensions."""
    active: Bool[Tensor, "dim"]
    """Whether each dimension is active."""
    variance: Float[Tensor, "dim"]
    """The variance over the data of each dimension's posterior mean, relative to the prior's variance."""


@validated
def kl_per_dimension(
    mean_p: Float[Tensor, "..."],
    log_variance_p: Float[Tensor, "..."],
    mean_q: Float[Tensor, "..."] | float = 0.0,
    log_variance_q: Float[Tensor, "..."] | float = 0.0,
) -> Float[Tensor, "*batch dim"]:
    """KL between Gaussians in nats for each dimension: the terms of ``kl_gaussian``.

    By default ``q`` is the standard normal. The four arguments broadcast against each other.

    Raises:
        ShapeError: if they do not broadcast.
    """
    of_q = (x.unsqueeze(-1) if isinstance(x, Tensor) else x for x in (mean_q, log_variance_q))
    return kl_gaussian(mean_p.unsqueeze(-1), log_variance_p.unsqueeze(-1), *of_q)


@validated
def free_bits(
    dimension_kl: Float[Tensor, "batch dim"], floor_nats: float, *, per_example: bool = False
) -> Float[Tensor, ""]:
    """The KL per example in nats, where each dimension contributes at least ``floor_nats``.

        sum_d max(floor_nats, mean_b KL_bd)            or, per_example,    mean_b sum_d max(floor_nats, KL_bd)

    This is not a divergence. A dimension with a KL up to the floor costs the floor and has gradient 0; above the floor,
    value and gradient are those of its KL. The floor applies to the mean over the batch, or with ``per_example`` to
    each example. NaN stays NaN.

    Args:
        dimension_kl: the result of ``kl_per_dimension``.
        floor_nats: nats of each dimension that are not penalised (0.69 is one bit); at least 0.
        per_example: whether the floor applies to each example instead of the mean over the batch.

    Raises:
        ShapeError: if ``dimension_kl`` is not [batch, dim].
        OptionError: if the floor is negative or not finite.

    References:
        Kingma et al., "Improving Variational Inference with Inverse Autoregressive Flow" (2016),
        https://arxiv.org/abs/1606.04934, appendix C.8
    """
    require_at_least(0.0, floor_nats=floor_nats)
    kls = at_least_float32(dimension_kl)
    kls = kls if per_example else kls.mean(0, keepdim=True)
    # The comparison is false for NaN, which is therefore not replaced by the floor.
    return torch.where(kls <= floor_nats, floor_nats, kls).sum(-1).mean()


@validated
def linear_annealing(step: int, *, steps: int, begin: float = 0.0, end: float = 1.0) -> float:
    """The weight of the KL at ``step`` (from 0): linear from ``begin`` to ``end``, then constant.

    Args:
        step: number of training steps made, at least 0.
        steps: length of the linear part, at least 1.
        begin: the weight at step 0, at least 0.
        end: the weight from ``steps`` on, at least 0.

    Raises:
        OptionError: if an argument is outside its range.

    References:
        Bowman et al., "Generating Sentences from a Continuous Space" (2015), https://arxiv.org/abs/1511.06349
    """
    _require_schedule(step, steps, begin, end)
    return begin + (end - begin) * min(step / steps, 1.0)


@validated
def cyclical_annealing(
    step: int, *, steps: int, cycles: int = 4, rising: float = 0.5, begin: float = 0.0, end: float = 1.0
) -> float:
    """The weight of the KL at ``step`` (from 0): repeated linear increases, and ``end`` after the last cycle.

    In each of ``cycles`` cycles of ``steps / cycles`` steps, the weight increases from ``begin`` to ``end`` during the
    fraction ``rising`` of the cycle and then stays at ``end``. From ``steps`` on it is ``end``.

    Args:
        step: number of training steps made, at least 0.
        steps: length of all cycles, at least 1.
        cycles: number of cycles, at least 1 and at most ``steps``.
        rising: the fraction of a cycle in which the weight increases, above 0 and at most 1.
        begin: the weight at the beginning of each cycle, at least 0.
        end: the weight at the end of each cycle, at least 0.

    Raises:
        OptionError: if an argument is outside its range.

    References:
        Fu et al., "Cyclical Annealing Schedule: A Simple Approach to Mitigating KL Vanishing" (2019),
        https://arxiv.org/abs/1903.10145
    """
    _require_schedule(step, steps, begin, end)
    if not 1 <= cycles <= steps:
        raise OptionError(
            f"there are {cycles} cycles in {steps} steps; give at least 1, and no more than steps"
        )
    require_positive_share(rising=rising)
    if step >= steps:
        return end
    cycle_fraction = (step * cycles % steps) / steps  # fraction of the current cycle that has passed
    return begin + (end - begin) * min(cycle_fraction / rising, 1.0)


@validated
def active_units(
    posterior_mean: Float[Tensor, "examples dim"], threshold: float = ACTIVE_VARIANCE
) -> ActiveUnits:
    """The active units: latent dimensions whose posterior mean varies over the data.

        Var_x(E[z_d | x]) > threshold

    The posterior of a collapsed dimension is the prior for every example, so its mean is constant. The variance has
    examples - 1 in the denominator. Pass the whole data set or a large sample, not a mini-batch.

    Args:
        posterior_mean: the means that the encoder returns, one row per example.
        threshold: smallest variance of an active dimension, relative to the prior's variance.

    Raises:
        ShapeError: if ``posterior_mean`` is not [examples, dim], or has fewer than two examples.

    References:
        Burda et al., "Importance Weighted Autoencoders" (2015), https://arxiv.org/abs/1509.00519
    """
    if len(posterior_mean) < 2:
        raise ShapeError(f"posterior_mean is of {len(posterior_mean)} examples; give at least two")
    variance = at_least_float32(posterior_mean.detach()).var(0)
    active = variance > threshold
    return ActiveUnits(active.sum(), active, variance)


def _require_schedule(step: int, steps: int, begin: float, end: float) -> None:
    """Raise OptionError unless the steps and the weights of a schedule are in their ranges."""
    require_at_least(0, step=step, begin=begin, end=end)
    require_at_least(1, steps=steps)
