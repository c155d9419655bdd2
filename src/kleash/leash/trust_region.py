"""The record of a trust region on a batch, intersections of regions, and functions shared by all regions."""

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

    Shares and sample size count units: tokens if the region decides on tokens, or whole sequences.
    """

    weights: Float[Tensor, "batch time"]
    """Factor on each token's loss: 0 if it is removed or masked; otherwise 1, or its ratio."""
    kept: Bool[Tensor, "batch time"]
    """Tokens that count and are not removed: the mask of a mean in which removed tokens do not count as 0."""
    removed_share: Float[Tensor, ""]
    """The share of unmasked units that are removed, those with NaN included. NaN if there are no units."""
    capped_share: Float[Tensor, ""]
    """The share of unmasked units whose weight was lowered to a cap. NaN if there are no units."""
    effective_sample_size: Float[Tensor, ""]
    """The number of equally weighted units with the same variance, (sum w)^2 / sum w^2; 0 if all are removed."""


@validated
def intersection(
    *regions: TrustRegion, mask: Bool[Tensor, "batch time"] | Integer[Tensor, "batch time"]
) -> TrustRegion:
    """The tokens that no region removes, with the product of their weights; the unit is the token.

    Each region decides on the whole batch, independently of the others. ``capped_share`` is 0, since a product does not
    show which weights were capped; read it from the single region.

    Args:
        regions: trust regions of this batch.
        mask: true (or 1) for the tokens that count, as for the regions.

    Raises:
        OptionError: if there are no regions.
        ShapeError: if a region has another shape than ``mask``.
    """
    if not regions:
        raise OptionError("no trust regions to intersect; give at least one")
    is_kept, weights = as_mask(mask), torch.ones_like(regions[0].weights)
    for region in regions:
        if region.kept.shape != is_kept.shape:
            raise ShapeError(f"a region is {tuple(region.kept.shape)} and mask {tuple(is_kept.shape)}")
        is_kept, weights = is_kept & region.kept, weights * region.weights
    is_counted = as_mask(mask)
    weights = torch.where(is_kept, weights, 0.0)
    return _uncapped_region(is_kept, weights, is_counted, is_kept, weights)


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
    is_counted = as_mask(mask)
    log_ratio = at_least_float32(token_logp.detach()) - at_least_float32(behaviour_logp.detach())
    return is_counted, torch.where(is_counted, log_ratio, 0.0)


def is_within(values: Tensor, bounds: tuple[float, float]) -> Tensor:
    """Whether each value lies within the bounds; false for NaN.

    Raises:
        OptionError: if the first bound is above the second, or one is NaN.
    """
    least, most = bounds
    if not least <= most:
        raise OptionError(f"bounds are {least} and {most}; give the least first, then the most")
    return (least <= values) & (values <= most)


def log_bounds(bounds: tuple[float, float]) -> tuple[float, float]:
    """Bounds on the logarithm of a ratio, from bounds on the ratio.

    Raises:
        OptionError: if the first bound is negative, or the second is not above 0.
    """
    least, most = bounds
    if not (least >= 0 and most > 0):
        raise OptionError(f"bounds are {least} and {most}; give ratios, such as 0.5 and 2")
    return -inf if least == 0 else log(least), log(most)


def region_of(is_counted: Tensor, inside: Tensor, log_weight: Tensor | None = None) -> TrustRegion:
    """The trust region of a decision (and log weight) per token [batch, time] or per sequence [batch]."""
    per_token = inside.ndim == 2
    units = is_counted if per_token else is_counted.any(-1)
    unit_kept = units & inside
    weights = unit_kept.to(torch.float32) if log_weight is None else log_weight.exp()
    unit_weights = torch.where(unit_kept, weights, 0.0)
    token_kept, weights = (
        (unit_kept, unit_weights) if per_token else (unit_kept.unsqueeze(-1), unit_weights.unsqueeze(-1))
    )
    return _uncapped_region(
        is_counted & token_kept,
        torch.where(is_counted & token_kept, weights, 0.0),
        units,
        unit_kept,
        unit_weights,
    )


def _uncapped_region(
    token_kept: Tensor, weights: Tensor, units: Tensor, unit_kept: Tensor, unit_weights: Tensor
) -> TrustRegion:
    """The trust region in which no weight was lowered to a cap, with statistics over units.

    Args:
        token_kept: bool [batch, time], tokens that count and are not removed.
        weights: of each token [batch, time]; 0 where not kept.
        units: bool, the units that count: tokens [batch, time] or sequences [batch].
        unit_kept: bool, the units that are not removed, of the shape of ``units``.
        unit_weights: the weight of each unit; 0 where not kept.
    """
    return TrustRegion(
        weights=weights,
        kept=token_kept,
        removed_share=(units & ~unit_kept).sum() / units.sum(),
        capped_share=torch.zeros_like(units).sum() / units.sum(),
        effective_sample_size=_effective_sample_size(unit_weights, units),
    )


def _effective_sample_size(weights: Tensor, units: Tensor) -> Tensor:
    """(sum w)^2 / sum w^2; 0 if all weights are 0, NaN if there are no units."""
    weights = weights.flatten()
    if weights.numel() == 0:
        return weights.new_tensor(torch.nan)
    largest = weights.max()
    weights = weights / torch.where(largest > 0, largest, 1.0)
    squares = weights.square().sum()
    return torch.where(
        largest > 0, weights.sum().square() / squares, torch.where(units.any(), largest, torch.nan)
    )
