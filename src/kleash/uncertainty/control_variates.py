"""KL between whole responses, combined from two unbiased estimates by a control variate."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Real, Shaped

from kleash.estimate import Estimate
from kleash.uncertainty.clusters import one_each, sums_by_cluster
from kleash.uncertainty.intervals import estimate_of
from kleash.uncertainty.linearisation import FloatArray, RatioTerm, linearise

MIN_CLUSTERS = 128
"""Smallest number of clusters to fit a weight to. With fewer, the weight follows the few largest clusters: the KL of
skewed clusters is then too small, that of eight lognormal ones by an eighth."""


@dataclass(frozen=True, kw_only=True)
class ControlledTotal:
    """The control-variate estimate ``U - a (U - C)`` and its two components."""

    estimate: Estimate
    """The combination; its error is asymptotically no larger than that of either component."""
    weight: float
    """The fitted a: 0 is the Monte Carlo sum alone, 1 the sum of the exact terms alone."""
    monte_carlo: Estimate
    """U: the mean of the summed log ratios."""
    exact_sum: Estimate
    """C: the mean of the summed exact per-token KLs."""


def controlled_total(
    monte_carlo: Real[np.ndarray, "sequences_u"] | Sequence[float],
    exact: Real[np.ndarray, "sequences_c"] | Sequence[float],
    clusters: Shaped[np.ndarray, "sequences_l"] | Sequence[Any],
    *,
    unit: str = "nats",
    lower: float | None = 0.0,
    known_value: float | None = None,
) -> ControlledTotal:
    """Estimate KL(p || q) of whole sequences drawn from p: the mean of ``U - a (U - C)``.

        U = sum_t log p(y_t) - log q(y_t),    C = sum_t KL(p || q at the prefix y_<t)
        a = Cov(U, U - C) / Var(U - C), over clusters

    Both are unbiased, so U - C is a control variate of mean 0. Fitting ``a`` costs a degree of freedom and, on n
    clusters, adds 1 / (n - 3) to the variance. With fewer than 128 clusters, if U - C does not vary, or if a sum is
    infinite, ``a`` is 1 and is not fitted.

    Args:
        monte_carlo: U of each sequence.
        exact: C of each sequence.
        clusters: a label per sequence; sequences of one prompt have the same label.
        unit: of both.
        lower: the smallest possible total; 0 for a KL.
        known_value: the sum that every sequence has by construction: 0 for a model against itself.

    Raises:
        ShapeError: if the three differ in length.
    """
    monte_carlo, exact, clusters = one_each(
        "sequence", monte_carlo=monte_carlo, exact=exact, clusters=clusters
    )
    u, c, num_sequences = sums_by_cluster(clusters, monte_carlo, exact)
    weight, num_fitted = _fit_weight(u, c, num_sequences)
    combination = c if weight == 1 else u - weight * (u - c)
    linear_u, linear_c, linear_total = (
        linearise([RatioTerm(1.0, total, num_sequences)]) for total in (u, c, combination)
    )
    return ControlledTotal(
        estimate=estimate_of(linear_total, unit, lower, None, fitted=num_fitted, known_value=known_value),
        weight=weight,
        monte_carlo=estimate_of(linear_u, unit, None, None, known_value=known_value),
        exact_sum=estimate_of(linear_c, unit, lower, None, known_value=known_value),
    )


def _fit_weight(u: FloatArray, c: FloatArray, num_sequences: FloatArray) -> tuple[float, int]:
    """The weight a of ``U - a (U - C)`` with the least variance over clusters, and the number of fitted parameters.

    The number is 0 or 1.

    Args:
        u: per cluster, the sum of U over its sequences.
        c: per cluster, the sum of C over its sequences.
        num_sequences: per cluster, the number of sequences.
    """
    if len(num_sequences) < MIN_CLUSTERS or not np.all(np.isfinite(u) & np.isfinite(c)):
        return 1.0, 0
    total = linearise([RatioTerm(1.0, u, num_sequences)])
    difference = linearise([RatioTerm(1.0, u, num_sequences), RatioTerm(-1.0, c, num_sequences)])
    variance = float(difference.influence @ difference.influence)
    if variance == 0:
        return 1.0, 0
    return float(total.influence @ difference.influence) / variance, 1
