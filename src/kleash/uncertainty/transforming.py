"""A function of an estimate, and an estimate as it came to be."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int64, Real

from kleash.errors import ShapeError
from kleash.uncertainty.estimate import Estimate
from kleash.uncertainty.linearised import ROUNDING
from kleash.uncertainty.student import student_t_quantile


def transformed(
    estimate: Estimate,
    function: Callable[[float], float],
    derivative: Callable[[float], float],
    *,
    unit: str = "none",
) -> Estimate:
    """A monotone function of an estimate: perplexity, the exponential of a mean; RMS, the root of one.

    The ends of the interval are mapped, so that it covers exactly as often as before; the standard error
    is |derivative| times the old one. An exact constant stays one, and its derivative is not asked for.

        transformed(cross_entropy, math.exp, math.exp)
        transformed(mean_square, math.sqrt, lambda x: 0.5 / math.sqrt(x))

    Args:
        estimate: the number to transform, with its error.
        function: rising or falling over the whole interval. Where it overflows (``math.exp``) it is taken
            to be infinite.
        derivative: its derivative; infinite where it overflows or divides by zero (of a root at 0).
        unit: of the result.
    """
    error = estimate.standard_error
    if error != 0:
        error *= abs(_or_infinite(derivative, estimate.value))
    ends = sorted(_or_infinite(function, end) for end in estimate.ci95)
    value = _or_infinite(function, estimate.value)
    return replace(estimate, value=value, unit=unit, standard_error=error, ci95=(ends[0], ends[1]))


def _or_infinite(function: Callable[[float], float], at: float) -> float:
    try:
        return function(at)
    except (OverflowError, ZeroDivisionError):
        return math.inf


class RunningMean(NamedTuple):
    """A mean as it stood after so many tokens: what a convergence plot shows."""

    tokens: Int64[np.ndarray, "points"]
    mean: Float64[np.ndarray, "points"]
    half_width: Float64[np.ndarray, "points"]
    """Half of the 95 % interval by Student's t; NaN over fewer than two clusters, and where all are alike."""


def running_mean(
    sums: Real[np.ndarray, "clusters_s"],
    counts: Real[np.ndarray, "clusters_n"],
    points: int = 100,
    *,
    known_value: float | None = None,
) -> RunningMean:
    """The mean per token after the first clusters, at evenly spaced numbers of clusters up to all of them.

    Args:
        sums: a number per cluster, in the order in which they were measured.
        counts: how many tokens went into each.
        points: how many to return; fewer where there are fewer clusters.
        known_value: what every cluster's mean is by construction: 0 for the KL of a model against itself. Then
            the half width is 0 as long as that is so.

    Raises:
        ShapeError: if there are not as many counts as sums.
    """
    if sums.ndim != 1 or sums.shape != counts.shape:
        raise ShapeError(f"sums are {sums.shape} and counts {counts.shape}; give one of each per cluster")
    kept = counts > 0
    sums, counts = np.asarray(sums, np.float64)[kept], np.asarray(counts, np.float64)[kept]
    ends = np.unique(np.rint(np.linspace(len(sums), 1, min(points, len(sums)))).astype(np.int64))
    finite = np.isfinite(sums)
    centre = sums[finite].sum() / max(counts[finite].sum(), 1.0)
    residual = sums - centre * counts
    with np.errstate(invalid="ignore", divide="ignore"):
        tokens, moved, squares, mixed, sizes = (
            np.cumsum(column)[ends - 1]
            for column in (counts, residual, residual**2, residual * counts, counts**2)
        )
        shift = moved / tokens
        variance = np.maximum(squares - 2 * shift * mixed + shift**2 * sizes, 0.0) * ends / (ends - 1)
        quantiles = [student_t_quantile(0.975, end - 1) if end > 1 else math.nan for end in ends.tolist()]
        half_width = np.array(quantiles) * np.sqrt(variance) / tokens
    mean = centre + shift
    constant = ~(half_width > ROUNDING * np.abs(mean))
    half_width[constant] = np.where(mean[constant] == known_value, 0.0, math.nan)
    return RunningMean(tokens.astype(np.int64), mean, half_width)
