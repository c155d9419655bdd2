"""Means over tokens whose errors know that tokens of one prompt belong together."""

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Real, Shaped

from kleash.errors import ShapeError
from kleash.uncertainty.estimate import Estimate
from kleash.uncertainty.intervals import estimates_of
from kleash.uncertainty.linearised import Array, Part, linearise

Bound = float | Sequence[float] | None


def ratio_of_sums(
    sums: Real[np.ndarray, "clusters_s"],
    counts: Real[np.ndarray, "clusters_n"],
    *,
    unit: str = "nats",
    lower: float | None = None,
    upper: float | None = None,
    known_value: float | None = None,
) -> Estimate:
    """The mean per token, sum over sum, with an error that is robust within clusters.

        r = sum_c s_c / sum_c n_c
        standard error^2 = C / (C - 1) sum_c (s_c - r n_c)^2 / (sum_c n_c)^2

    A cluster (a prompt, a document) may hold any number of tokens, correlated in any way; clusters are
    taken to be independent. ``ci95`` is Student's t with C - 1 degrees of freedom, corrected for the skewness
    of the clusters, and away from a bound not shorter than Student's t of the logarithm of the distance to it.

    | what comes in                   | what comes out                                                    |
    | every cluster has the same mean | standard error 0, and the interval that clusters which are missing |
    |                                 | allow between ``lower`` and ``upper``; with no bound no end, a warning |
    | ... and it is ``known_value``   | the exact value: standard error 0, interval (r, r), no warnings      |
    | a sum is infinite or NaN        | that value, standard error and interval NaN, a warning               |
    | one cluster                     | the value, standard error NaN, an interval without ends, a warning   |
    | a cluster with count 0          | left out                                                           |
    | nothing                         | NaN                                                                |

    Args:
        sums: a number per cluster, the sum over its tokens.
        counts: how many tokens went into each.
        unit: of the mean: "nats", "probability" or "none".
        lower: the least that the mean can be (0 for a KL): the interval is cut there.
        upper: the most that it can be (1 for an agreement).
        known_value: what every cluster's mean is by construction: 0 for the KL of a model against itself. A
            sample that is constant is not exact without it.

    Raises:
        ShapeError: if there are not as many counts as sums.
    """
    if sums.ndim != 1 or sums.shape != counts.shape:
        raise ShapeError(f"sums are {sums.shape} and counts {counts.shape}; give one of each per cluster")
    return ratio_of_many(sums[:, None], counts, unit=unit, lower=lower, upper=upper, known_value=known_value)[
        0
    ]


def ratio_of_many(
    sums: Real[np.ndarray, "clusters_s columns"],
    counts: Real[np.ndarray, "clusters_n *columns"],
    *,
    unit: str | Sequence[str] = "nats",
    lower: Bound = None,
    upper: Bound = None,
    known_value: float | None = None,
) -> tuple[Estimate, ...]:
    """``ratio_of_sums`` of many quantities on the same clusters at once: each comes out the same, sooner.

    Args:
        sums: [cluster, column].
        counts: [cluster] for all columns alike, or [cluster, column].
        unit: one for all columns, or one for each.
        lower: likewise.
        upper: likewise.
        known_value: of all columns alike.

    Raises:
        ShapeError: if the shapes do not fit together.
    """
    if sums.ndim != 2 or counts.shape not in (sums.shape, sums.shape[:1]):
        raise ShapeError(
            f"sums are {sums.shape} and counts {counts.shape}; give [cluster, column], and counts alike or [cluster]"
        )
    columns = sums.shape[1]
    own = counts.ndim == 2
    linearised = [
        linearise([Part(1.0, _float64(sums[:, k]), _float64(counts[:, k] if own else counts))])
        for k in range(columns)
    ]
    units = [unit] * columns if isinstance(unit, str) else list(unit)
    bounds = zip(_each(lower, -math.inf, columns), _each(upper, math.inf, columns), strict=True)
    return estimates_of(linearised, units, list(bounds), known_value=known_value)


def clustered_mean(
    values: Real[np.ndarray, "observations_v"],
    clusters: Shaped[np.ndarray, "observations_c"],
    *,
    unit: str = "nats",
    lower: float | None = None,
    upper: float | None = None,
) -> Estimate:
    """The mean of values of which those with the same label belong together.

    ``ratio_of_sums`` of the labels' sums and counts: see there for the error, the interval and the edges.

    Args:
        values: one per observation.
        clusters: a label per observation: numbers or strings.
        unit: of the values.
        lower: the least that the mean can be.
        upper: the most that it can be.

    Raises:
        ShapeError: if there are not as many labels as values.
    """
    if values.ndim != 1 or values.shape != clusters.shape:
        raise ShapeError(
            f"values are {values.shape} and clusters {clusters.shape}; give a label for each value"
        )
    names, index = np.unique(clusters, return_inverse=True)
    sums = np.bincount(index, weights=values, minlength=len(names))
    counts = np.bincount(index, minlength=len(names))
    return ratio_of_sums(sums, counts, unit=unit, lower=lower, upper=upper)


def paired_difference(
    sums_a: Real[np.ndarray, "clusters_sa"],
    counts_a: Real[np.ndarray, "clusters_na"],
    sums_b: Real[np.ndarray, "clusters_sb"],
    counts_b: Real[np.ndarray, "clusters_nb"],
    *,
    unit: str = "nats",
    lower: float | None = None,
    upper: float | None = None,
    known_value: float | None = None,
) -> Estimate:
    """Mean of a minus mean of b, where cluster c is the same prompt in both.

        r_a - r_b,   standard error^2 = C / (C - 1) sum_c ((s_a - r_a n_a) / N_a - (s_b - r_b n_b) / N_b)^2

    What a prompt does to both cancels, so that the error is usually far below that of two separate
    measurements. A prompt without tokens in one of them still counts in the other. The edges are those
    of ``ratio_of_sums``; but a difference is exactly 0 where both measurements are the same bit for bit, in clusters
    of which no two have the same mean: that does not happen by chance.

    Args:
        sums_a: a number per cluster, the sum over its tokens in the first measurement.
        counts_a: how many tokens went into each.
        sums_b: the same clusters in the second measurement.
        counts_b: likewise.
        unit: of both means.
        lower: the least that the difference can be (-1 for two probabilities).
        upper: the most that it can be.
        known_value: what the difference is in every cluster by construction: 0 for the same models.

    Raises:
        ShapeError: if the four differ in shape.
    """
    shapes = [array.shape for array in (sums_a, counts_a, sums_b, counts_b)]
    if len(set(shapes)) > 1 or len(shapes[0]) != 1:
        raise ShapeError(f"sums and counts are {shapes}; give one of each per cluster of both measurements")
    parts = [
        Part(1.0, _float64(sums_a), _float64(counts_a)),
        Part(-1.0, _float64(sums_b), _float64(counts_b)),
    ]
    bounds = (-math.inf if lower is None else lower, math.inf if upper is None else upper)
    known = 0.0 if _is_repeated(parts[0], parts[1]) else known_value
    return estimates_of([linearise(parts)], [unit], [bounds], known_value=known)[0]


def _is_repeated(a: Part, b: Part) -> bool:
    """Whether b is the measurement a once more: equal bit for bit, in several clusters that all differ."""
    if not (np.array_equal(a.sums, b.sums) and np.array_equal(a.counts, b.counts)):
        return False
    means = a.sums[a.counts > 0] / a.counts[a.counts > 0]
    return len(means) > 1 and len(np.unique(means)) == len(means)


def _float64(values: np.ndarray) -> Array:
    return np.asarray(values, np.float64)


def _each(bound: Bound, otherwise: float, columns: int) -> list[float]:
    if bound is None:
        return [otherwise] * columns
    if isinstance(bound, (int, float)):
        return [float(bound)] * columns
    return [float(one) for one in bound]
