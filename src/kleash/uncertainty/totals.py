"""KL between whole responses, from two estimates of it that err differently."""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Real, Shaped

from kleash.errors import ShapeError
from kleash.uncertainty.estimate import Estimate
from kleash.uncertainty.intervals import estimates_of
from kleash.uncertainty.linearised import Array, Part, linearise

FEWEST = 8
"""Clusters that a weight is fitted on, at least: on three it varies without bound, and the KL with it."""


@dataclass(frozen=True, kw_only=True)
class ControlledTotal:
    """``U - a (U - C)``, and what it is made of."""

    estimate: Estimate
    """The combination, whose error is asymptotically no larger than that of either."""
    weight: float
    """The a that was fitted: 0 is the Monte Carlo sum alone, 1 the sum of the exact terms alone."""
    monte_carlo: Estimate
    """U: the mean of the summed log ratios."""
    exact_sum: Estimate
    """C: the mean of the summed exact per-token KLs."""


def controlled_total(
    monte_carlo: Real[np.ndarray, "sequences_u"],
    exact: Real[np.ndarray, "sequences_c"],
    clusters: Shaped[np.ndarray, "sequences_l"],
    *,
    unit: str = "nats",
    lower: float | None = 0.0,
    known_value: float | None = None,
) -> ControlledTotal:
    """KL(p || q) of whole sequences drawn from p: the mean of ``U - a (U - C)``.

        U = sum_t log p(y_t) - log q(y_t),    C = sum_t KL(p || q at the prefix y_<t)
        a = Cov(U, U - C) / Var(U - C), over clusters

    Both are unbiased, so U - C is a control variate of mean 0. ``a`` costs a degree of freedom, and on n clusters
    adds 1 / (n - 3) to the variance: it is 1, not fitted, on fewer than eight. Nor is it where U - C does not
    vary, and where a sum is infinite.

    Args:
        monte_carlo: U of each sequence.
        exact: C of each sequence.
        clusters: a label per sequence: sequences of one prompt belong together.
        unit: of both.
        lower: the least that the total can be; 0 for a KL.
        known_value: what both sums are in every sequence by construction: 0 for a model against itself.

    Raises:
        ShapeError: if the three differ in length.
    """
    shapes = [array.shape for array in (monte_carlo, exact, clusters)]
    if len(set(shapes)) > 1 or len(shapes[0]) != 1:
        raise ShapeError(f"monte_carlo, exact and clusters are {shapes}; give one of each per sequence")
    names, index = np.unique(clusters, return_inverse=True)
    counts = np.bincount(index, minlength=len(names)).astype(np.float64)
    sampled = np.bincount(index, weights=monte_carlo, minlength=len(names)).astype(np.float64)
    summed = np.bincount(index, weights=exact, minlength=len(names)).astype(np.float64)
    weight, fitted = _weight(sampled, summed, counts)
    combined = summed if weight == 1 else sampled - weight * (sampled - summed)
    bounds = (-math.inf if lower is None else lower, math.inf)
    one, other, both = (linearise([Part(1.0, total, counts)]) for total in (sampled, summed, combined))
    alone = estimates_of([one, other], [unit] * 2, [(-math.inf, math.inf), bounds], known_value=known_value)
    (together,) = estimates_of([both], [unit], [bounds], fitted=fitted, known_value=known_value)
    return ControlledTotal(estimate=together, weight=weight, monte_carlo=alone[0], exact_sum=alone[1])


def _weight(sampled: Array, summed: Array, counts: Array) -> tuple[float, int]:
    """The weight a, and how many parameters were fitted for it."""
    if len(counts) < FEWEST or not np.all(np.isfinite(sampled) & np.isfinite(summed)):
        return 1.0, 0
    total = linearise([Part(1.0, sampled, counts)])
    difference = linearise([Part(1.0, sampled, counts), Part(-1.0, summed, counts)])
    variance = float(difference.influence @ difference.influence)
    if variance == 0:
        return 1.0, 0
    return float(total.influence @ difference.influence) / variance, 1
