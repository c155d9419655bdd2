"""The record of a trust region on a batch, its intersection, and the functions that all regions share."""

from math import inf, log
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from kleash.arguments import validated
from kleash.errors import OptionError, ShapeError
from kleash.masking import as_mask
from kleash.precision import at_least_float32


class TrustRegion(NamedTuple):
    """Mask, weights and statistics of a trust region on a batch; all detached.

    The unit of the shares and of the sample size is what is decided on: a token, or a whole sequence.
    """

    weights: Float[Tensor, "batch time"]
    """What to multiply each token's loss by: 0 where removed or masked; 1 elsewhere, unless it is a ratio."""
    kept: Bool[Tensor, "batch time"]
    """Where a token counts and stays. The mask to average over, if what is removed is not to count as 0."""
    removed_share: Float[Tensor, ""]
    """The share of the units that count which was removed, NaN log-probabilities included. NaN over nothing."""
    capped_share: Float[Tensor, ""]
    """The share of the units that count whose weight was lowered to a cap. NaN over nothing."""
    effective_sample_size: Float[Tensor, ""]
    """How many units of equal weight would tell as much, (sum w)^2 / sum w^2; 0 where all were removed."""


@validated
def intersection(
    *regions: TrustRegion, mask: Bool[Tensor, "batch time"] | Integer[Tensor, "batch time"]
) -> TrustRegion:
    """The tokens that every region keeps, with the product of their weights; the unit is the token.

    Each region decides about the whole batch, not about what the others left of it. ``capped_share`` is 0
    here: what was capped cannot be seen in a product, so read it from the region itself.

    Args:
        regions: any of this batch.
        mask: true (or 1) for the tokens that count: the same that the regions were made with.

    Raises:
        OptionError: if there are none.
        ShapeError: if one is of another batch.
    """
    if not regions:
        raise OptionError("no trust regions to intersect; give at least one")
    stays, weights = as_mask(mask), torch.ones_like(regions[0].weights)
    for region in regions:
        if region.kept.shape != stays.shape:
            raise ShapeError(f"a region is {tuple(region.kept.shape)} and mask {tuple(stays.shape)}")
        stays, weights = stays & region.kept, weights * region.weights
    counts = as_mask(mask)
    weights = torch.where(stays, weights, 0.0)
    return _region(stays, weights, counts, stays, weights)


def counted_log_ratio(token_logp: Tensor, behaviour_logp: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The boolean mask, and log policy - log behaviour where it is true, 0 elsewhere; detached.

    Raises:
        ShapeError: if the three differ in shape, or are not [batch, time].
    """
    shapes = [tuple(x.shape) for x in (token_logp, behaviour_logp, mask)]
    if len(set(shapes)) > 1 or len(shapes[0]) != 2:
        raise ShapeError(
            f"token_logp is {shapes[0]}, behaviour_logp {shapes[1]} and mask {shapes[2]}; "
            "give all three as [batch, time]"
        )
    counts = as_mask(mask)
    log_ratio = at_least_float32(token_logp.detach()) - at_least_float32(behaviour_logp.detach())
    return counts, torch.where(counts, log_ratio, 0.0)


def is_within(values: Tensor, bounds: tuple[float, float]) -> Tensor:
    """Where a value lies within the bounds; false for NaN.

    Raises:
        OptionError: if no number lies within them.
    """
    least, most = bounds
    if not least <= most:
        raise OptionError(f"bounds are {least} and {most}; give the least first, then the most")
    return (least <= values) & (values <= most)


def log_bounds(bounds: tuple[float, float]) -> tuple[float, float]:
    """Bounds on a ratio as bounds on its logarithm.

    Raises:
        OptionError: if a ratio would have to be negative, or at most 0.
    """
    least, most = bounds
    if not (least >= 0 and most > 0):
        raise OptionError(f"bounds are {least} and {most}; give ratios, such as 0.5 and 2")
    return -inf if least == 0 else log(least), log(most)


def region_of(counts: Tensor, inside: Tensor, log_weight: Tensor | None = None) -> TrustRegion:
    """The trust region of a decision (and log weight) per token [batch, time] or per sequence [batch]."""
    per_token = inside.ndim == 2
    units = counts if per_token else counts.any(-1)
    unit_stays = units & inside
    weights = unit_stays.to(torch.float32) if log_weight is None else log_weight.exp()
    unit_weights = torch.where(unit_stays, weights, 0.0)
    token_stays, weights = (
        (unit_stays, unit_weights) if per_token else (unit_stays.unsqueeze(-1), unit_weights.unsqueeze(-1))
    )
    return _region(
        counts & token_stays, torch.where(counts & token_stays, weights, 0.0), units, unit_stays, unit_weights
    )


def _region(
    token_stays: Tensor, weights: Tensor, units: Tensor, unit_stays: Tensor, unit_weights: Tensor
) -> TrustRegion:
    return TrustRegion(
        weights=weights,
        kept=token_stays,
        removed_share=(units & ~unit_stays).sum() / units.sum(),
        capped_share=torch.zeros_like(units).sum() / units.sum(),
        effective_sample_size=_effective_sample_size(unit_weights, units),
    )


def _effective_sample_size(weights: Tensor, units: Tensor) -> Tensor:
    """(sum w)^2 / sum w^2; 0 where all are 0, NaN over nothing."""
    weights = weights.flatten()
    if weights.numel() == 0:
        return weights.new_tensor(torch.nan)
    largest = weights.max()
    weights = weights / torch.where(largest > 0, largest, 1.0)
    squares = weights.square().sum()
    return torch.where(
        largest > 0, weights.sum().square() / squares, torch.where(units.any(), largest, torch.nan)
    )
