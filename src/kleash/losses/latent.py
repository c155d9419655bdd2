"""The KL term of a variational autoencoder: per dimension, free bits, annealing, active units."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kleash.arguments import validated
from kleash.divergences import kl_gaussian
from kleash.errors import OptionError, ShapeError
from kleash.precision import at_least_float32

ACTIVE_VARIANCE = 0.01
"""Burda et al.'s threshold, which they found to matter little: units lie far to either side of it."""


class ActiveUnits(NamedTuple):
    """The latent dimensions that depend on the data."""

    number: Int[Tensor, ""]
    """How many are active."""
    active: Bool[Tensor, "dim"]
    """Which ones."""
    variance: Float[Tensor, "dim"]
    """The variance over the data of each dimension's posterior mean, in the prior's variances."""


@validated
def kl_per_dimension(
    mean_p: Float[Tensor, "*batch dim"],
    log_variance_p: Float[Tensor, "*batch dim"],
    mean_q: Float[Tensor, "..."] | float = 0.0,
    log_variance_q: Float[Tensor, "..."] | float = 0.0,
) -> Float[Tensor, "*batch dim"]:
    """KL between Gaussians in nats, one number per dimension: what ``kl_gaussian`` sums.

    ``q`` is the standard normal unless said otherwise. The four broadcast against each other.

    Raises:
        ShapeError: if they do not broadcast.
    """
    return kl_gaussian(
        mean_p.unsqueeze(-1),
        log_variance_p.unsqueeze(-1),
        _last_axis_added(mean_q),
        _last_axis_added(log_variance_q),
    )


@validated
def free_bits(
    dimension_kl: Float[Tensor, "batch dim"], floor_nats: float, *, per_example: bool = False
) -> Float[Tensor, ""]:
    """The KL per example in nats, with each dimension's share counted as at least ``floor_nats``.

        sum_d max(floor_nats, mean_b KL_bd)            or, per_example,    mean_b sum_d max(floor_nats, KL_bd)

    A floor that you name, and no divergence any more: below it a dimension costs the floor and has
    gradient 0, so that it is free to carry so much; strictly above, value and gradient are its KL's. The
    mean over the batch comes first, so that examples share a dimension's allowance, unless
    ``per_example`` gives one to each. NaN stays NaN.

    Args:
        dimension_kl: as ``kl_per_dimension`` gives it.
        floor_nats: what each dimension may carry for free, in nats (0.69 is one bit); at least 0.
        per_example: whether the floor applies to each example rather than to their mean.

    Raises:
        ShapeError: if ``dimension_kl`` is not [batch, dim].
        OptionError: if the floor is negative or not finite.

    References:
        Kingma et al., "Improving Variational Inference with Inverse Autoregressive Flow" (2016),
        https://arxiv.org/abs/1606.04934, appendix C.8
    """
    if dimension_kl.ndim != 2:
        raise ShapeError(f"dimension_kl is {tuple(dimension_kl.shape)}; give [batch, dim]")
    if not 0 <= floor_nats < math.inf:
        raise OptionError(f"floor_nats is {floor_nats}; give a finite number of nats, at least 0")
    kls = at_least_float32(dimension_kl)
    floored = kls if per_example else kls.mean(0, keepdim=True)
    # Not <=, which is false for NaN: that must come through rather than become the floor.
    return torch.where(floored <= floor_nats, floor_nats, floored).sum(-1).mean()


@validated
def linear_annealing(step: int, *, steps: int, begin: float = 0.0, end: float = 1.0) -> float:
    """The weight of the KL at ``step`` (from 0): from ``begin`` in a straight line to ``end``, then ``end``.

    Args:
        step: training steps done, at least 0.
        steps: how many the rise takes, at least 1.
        begin: the weight at step 0, at least 0.
        end: the weight from ``steps`` on, at least 0.

    Raises:
        OptionError: if one of them is outside its range.

    References:
        Bowman et al., "Generating Sentences from a Continuous Space" (2015), https://arxiv.org/abs/1511.06349
    """
    _require_schedule(step, steps, begin, end)
    return begin + (end - begin) * min(step / steps, 1.0)


@validated
def cyclical_annealing(
    step: int, *, steps: int, cycles: int = 4, rising: float = 0.5, begin: float = 0.0, end: float = 1.0
) -> float:
    """The weight of the KL at ``step``: the linear rise again and again, and at last ``end``.

    Each of ``cycles`` cycles, ``steps / cycles`` long, rises from ``begin`` to ``end`` over its first
    ``rising`` share and stays there for the rest; from ``steps`` on the weight is ``end``.

    Args:
        step: training steps done, at least 0.
        steps: how many all cycles take, at least 1.
        cycles: how many there are, at least 1 and at most ``steps``.
        rising: the share of a cycle that rises, above 0 and at most 1.
        begin: the weight at the beginning of each cycle.
        end: the weight at its end.

    Raises:
        OptionError: if one of them is outside its range.

    References:
        Fu et al., "Cyclical Annealing Schedule: A Simple Approach to Mitigating KL Vanishing" (2019),
        https://arxiv.org/abs/1903.10145
    """
    _require_schedule(step, steps, begin, end)
    if not 1 <= cycles <= steps:
        raise OptionError(
            f"there are {cycles} cycles in {steps} steps; give at least 1, and no more than steps"
        )
    if not 0 < rising <= 1:
        raise OptionError(f"rising is {rising}; give a share above 0, at most 1")
    if step >= steps:
        return end
    cycle_share = (step * cycles % steps) / steps  # of this cycle, as a share of it
    return begin + (end - begin) * min(cycle_share / rising, 1.0)


@validated
def active_units(
    posterior_mean: Float[Tensor, "examples dim"], threshold: float = ACTIVE_VARIANCE
) -> ActiveUnits:
    """The active units: latent dimensions whose posterior mean varies over the data.

        Var_x(E[z_d | x]) > threshold

    A collapsed dimension has the prior for its posterior whatever the example, so its mean stands
    still. The variance divides by examples - 1. Give all data, or many: not a mini-batch.

    Args:
        posterior_mean: the means that the encoder gives, one row per example.
        threshold: in the prior's variances.

    Raises:
        ShapeError: if it is not [examples, dim], or there are fewer than two examples.

    References:
        Burda et al., "Importance Weighted Autoencoders" (2015), https://arxiv.org/abs/1509.00519
    """
    if posterior_mean.ndim != 2 or len(posterior_mean) < 2:
        raise ShapeError(
            f"posterior_mean is {tuple(posterior_mean.shape)}; give [examples, dim] with at least two examples"
        )
    variance = at_least_float32(posterior_mean.detach()).var(0)
    active = variance > threshold
    return ActiveUnits(active.sum(), active, variance)


def _last_axis_added(parameter: Tensor | float) -> Tensor | float:
    return parameter.unsqueeze(-1) if isinstance(parameter, Tensor) else parameter


def _require_schedule(step: int, steps: int, begin: float, end: float) -> None:
    if step < 0 or steps < 1:
        raise OptionError(f"step is {step} of {steps}; count steps from 0, and give at least 1 in all")
    if not (0 <= begin < math.inf and 0 <= end < math.inf):
        raise OptionError(f"the weight goes from {begin} to {end}; give finite numbers, at least 0")
