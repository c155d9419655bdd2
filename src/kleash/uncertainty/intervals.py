"""From linearised estimates to estimates with an interval and warnings."""

import math
from collections.abc import Sequence

from kleash.uncertainty.diagnostics import unseen_share, warnings_about
from kleash.uncertainty.estimate import Estimate
from kleash.uncertainty.linearised import Linearised
from kleash.uncertainty.skewness import logarithmic_reach, skewed_reach, skewness_of_mean

Interval = tuple[float, float]


def estimates_of(
    linearised: Sequence[Linearised],
    units: Sequence[str],
    bounds: Sequence[Interval],
    *,
    fitted: int = 0,
    known_value: float | None = None,
) -> tuple[Estimate, ...]:
    """Each with its error, interval and warnings.

    Args:
        linearised: the estimates.
        units: of each.
        bounds: the least and the most that each can be.
        fitted: parameters that were fitted to the same clusters; each costs a degree of freedom.
        known_value: what the mean of every cluster is by construction, if that is known; an estimate whose clusters
            all have it is exact.
    """
    return tuple(
        _exact(one, unit)
        if known_value is not None and is_constant(one, known_value)
        else _estimate(one, unit, ends, fitted)
        for one, unit, ends in zip(linearised, units, bounds, strict=True)
    )


def is_constant(one: Linearised, value: float) -> bool:
    """Whether all clusters, and there is one at least, have this mean."""
    return one.clusters > 0 and one.value == value and not one.influence.any()


def _exact(one: Linearised, unit: str) -> Estimate:
    return Estimate(
        value=one.value,
        unit=unit,
        standard_error=0.0,
        clusters=one.clusters,
        ci95=(one.value, one.value),
    )


def _estimate(one: Linearised, unit: str, bounds: Interval, fitted: int) -> Estimate:
    error = standard_error(one, fitted)
    interval = constant_interval(one, bounds) if error == 0 else _interval(one, error, bounds, fitted)
    return Estimate(
        value=one.value,
        unit=unit,
        standard_error=error,
        clusters=one.clusters,
        ci95=cut(interval, one.value, bounds),
        warnings=warnings_about(one, bounds),
    )


def standard_error(one: Linearised, fitted: int = 0) -> float:
    """sqrt(C / (C - 1) sum of squared influences); NaN where that says nothing."""
    freedom = one.clusters - 1 - fitted
    if one.trouble or freedom < 1:
        return math.nan
    return math.sqrt(one.clusters / freedom * float(one.influence @ one.influence))


def _interval(one: Linearised, error: float, bounds: Interval, fitted: int) -> Interval:
    """Student's t corrected for skewness; on the side away from a bound also on the logarithmic scale."""
    if one.trouble or one.clusters == 0:
        return math.nan, math.nan
    if math.isnan(error):
        return -math.inf, math.inf
    freedom = one.clusters - 1 - fitted
    down, up = skewed_reach(skewness_of_mean(one.influence), one.clusters, freedom)
    down = max(down, logarithmic_reach(bounds[1] - one.value, error, freedom))
    up = max(up, logarithmic_reach(one.value - bounds[0], error, freedom))
    return one.value - down * error, one.value + up * error


def constant_interval(one: Linearised, bounds: Interval) -> Interval:
    """The interval of a mean whose clusters are all alike, though it is not known that they must be.

    A share of all clusters that none of these shows, up to 1 - 0.025^(1/C), may have any mean up to the
    bounds: Clopper and Pearson's interval for a share of 0, with the effective number of clusters as Korn and
    Graubard have it. Infinite on the side where there is no bound.

    References:
        Clopper & Pearson (1934), "The Use of Confidence or Fiducial Limits Illustrated in the Case of the Binomial".
        Korn & Graubard (1998), "Confidence Intervals for Proportions With Small Expected Number of Positive Counts
        Estimated From Survey Data".
    """
    unseen = unseen_share(one.effective_clusters, 0.975)
    low, high = bounds
    return one.value - unseen * (one.value - low), one.value + unseen * (high - one.value)


def cut(interval: Interval, value: float, bounds: Interval) -> Interval:
    """The part of the interval that the quantity can be in; the value itself is never cut off."""
    low, high = interval
    return min(max(low, bounds[0]), max(value, low)), max(min(high, bounds[1]), min(value, high))
