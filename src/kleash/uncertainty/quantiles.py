"""Quantiles of the values of all tokens, with Woodruff's intervals, and the share of a sum in its largest values."""

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from jaxtyping import Float, Integer

from kleash.errors import OptionError
from kleash.estimate import Estimate
from kleash.registry import require_positive_share
from kleash.uncertainty.clusters import one_each
from kleash.uncertainty.diagnostics import few_clusters, unseen_share
from kleash.uncertainty.intervals import Interval, clip_interval, standard_error
from kleash.uncertainty.linearisation import FloatArray, RatioTerm, linearise
from kleash.uncertainty.student_t import student_t_quantile


def quantiles(
    values: Float[np.ndarray, "values_v"] | Sequence[float],
    clusters: Integer[np.ndarray, "values_c"] | Sequence[int],
    levels: Sequence[float],
    *,
    unit: str = "nats",
    lower: float = -math.inf,
    upper: float = math.inf,
    known_value: float | None = None,
) -> tuple[Estimate, ...]:
    """The quantile at each level: the smallest value with at least that share of the values up to it.

    The interval is Woodruff's: the interval of the share of values up to the quantile, converted to values. The
    interval of the share is the wider of Student's t on the plain and on the logit scale, with a cluster-robust
    error that is at least the error of independent values. Its ends are infinite (or ``lower``, ``upper``) if there are
    too few values to bound them. The standard error is half the width of the interval divided by Student's quantile. If
    all values are equal, an end is finite only if the sample would contain, with 97.5 % probability, any kind of
    cluster frequent enough to move the quantile in that direction. A maximum has no standard error, and its interval no
    upper end.

    Args:
        values: any numbers; NaN is left out, with a warning.
        clusters: the cluster number of each value, from 0.
        levels: above 0 and up to 1 (the maximum).
        unit: of the values.
        lower: the smallest possible value.
        upper: the largest possible value.
        known_value: the value of all observations by construction: 0 for the KL of a model against itself.

    Raises:
        ShapeError: if values and clusters differ in length.
        OptionError: if a level is outside its range.

    References:
        Woodruff (1952), "Confidence Intervals for Medians and Other Position Measures".
    """
    values, clusters = one_each("value", values=values, clusters=clusters)
    invalid = [level for level in levels if not 0 < level <= 1]
    if invalid:
        raise OptionError(f"there is no quantile at {invalid[0]}; give levels above 0 and up to 1")
    is_number = ~np.isnan(values)
    numbers, labels = values[is_number] + 0, clusters[is_number]  # -0 becomes 0
    ordered = np.sort(numbers)
    cluster_count = int(np.count_nonzero(np.bincount(labels)))
    if len(ordered) and ordered[0] == ordered[-1] == known_value:
        exact = Estimate(
            value=float(ordered[0]),
            unit=unit,
            standard_error=0.0,
            clusters=cluster_count,
            ci95=(float(ordered[0]), float(ordered[0])),
        )
        return (exact,) * len(levels)
    left_out = len(values) - len(ordered)
    warnings = (
        *([f"{left_out} values are not a number and were left out"] if left_out else []),
        *few_clusters(cluster_count),
    )
    return tuple(
        Estimate(
            value=value,
            unit=unit,
            standard_error=error,
            clusters=cluster_count,
            ci95=clip_interval(interval, value, (lower, upper)),
            warnings=warnings,
        )
        for value, error, interval in (_quantile(ordered, numbers, labels, level) for level in levels)
    )


def top_share(values: Float[np.ndarray, "values"] | Sequence[float], share: float) -> float:
    """The part of the sum of all values that comes from the largest ``share`` of them.

    NaN if the sum is 0 or not finite.

    Args:
        values: NaN is left out.
        share: 0.01 for the largest 1 % (rounded up to a whole number of values); above 0, at most 1.

    Raises:
        OptionError: if the share is outside its range.
    """
    require_positive_share(share=share)
    numbers = np.compress(~np.isnan(values), values)
    total = numbers.sum(dtype=np.float64)
    if total == 0 or not math.isfinite(total):
        return math.nan
    first = len(numbers) - rank_of_level(share, len(numbers))
    return float(np.partition(numbers, first)[first:].sum(dtype=np.float64) / total)


def rank_of_level(level: float, total: int) -> int:
    """The rank, from 1, of the quantile at this level among ``total`` values; the level is read as a decimal."""
    return math.ceil(Fraction(repr(float(level))) * total)


def _quantile(
    ordered: np.ndarray, numbers: np.ndarray, labels: np.ndarray, level: float
) -> tuple[float, float, Interval]:
    """The quantile of some values, its standard error, and its interval before clipping.

    Args:
        ordered: the values, ascending.
        numbers: the values.
        labels: the cluster of each.
        level: of the quantile.
    """
    if not len(ordered):
        return math.nan, math.nan, (math.nan, math.nan)
    total = len(ordered)
    value = float(ordered[rank_of_level(level, total) - 1])
    if level == 1:
        return value, math.nan, (value, math.inf)
    sizes: FloatArray = np.bincount(labels).astype(np.float64)
    if np.count_nonzero(sizes) < 2:
        return value, math.nan, (-math.inf, math.inf)
    if ordered[0] == ordered[-1]:
        low, high = _constant_interval(value, level, sizes)
        return value, 0.0 if low == high else math.inf, (low, high)
    up_to = np.bincount(labels, weights=numbers <= value).astype(np.float64)
    share = linearise([RatioTerm(1.0, up_to, sizes)])
    t = student_t_quantile(0.975, max(1.0, share.effective_clusters - 1))
    margin = t * max(standard_error(share), math.sqrt(level * (1 - level) / total))
    odds = math.exp(min(margin / (level * (1 - level)), 700.0))
    lowest_share = min(level - margin, level / (level + (1 - level) * odds))
    highest_share = max(level + margin, level * odds / (level * odds + 1 - level))
    first, last = math.ceil(lowest_share * total), math.floor(highest_share * total) + 1
    low = float(ordered[first - 1]) if first >= 1 else -math.inf
    high = float(ordered[last - 1]) if last <= total else math.inf
    return value, 0.0 if low == high else (high - low) / 2 / t, (low, high)


def _constant_interval(value: float, level: float, sizes: FloatArray) -> Interval:
    """The interval of a quantile if all values are equal, but not by construction.

    A share of all clusters that is missing from the sample may have other values. It moves the quantile up if it
    is larger than 1 - level, and down if it is at least level.
    """
    unseen = unseen_share(float(sizes.sum() ** 2 / (sizes @ sizes)), 0.975)
    return (value if level > unseen else -math.inf), (value if level <= 1 - unseen else math.inf)
