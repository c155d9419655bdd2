"""Means per token with cluster-robust standard errors: ratios of sums over prompts, and differences of two."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64, Int64, Real, Shaped

from kleash.errors import ShapeError
from kleash.estimate import Estimate
from kleash.uncertainty.clusters import one_each, sums_by_cluster
from kleash.uncertainty.intervals import estimate_of
from kleash.uncertainty.linearisation import RatioTerm, linearise

Bound = float | Sequence[float] | None


def ratio_of_sums(
    sums: Real[np.ndarray, "clusters_s"] | Sequence[float],
    counts: Real[np.ndarray, "clusters_n"] | Sequence[float],
    *,
    unit: str = "nats",
    lower: float | None = None,
    upper: float | None = None,
    known_value: float | None = None,
) -> Estimate:
    """The mean per token, a ratio of sums, with a cluster-robust standard error.

        r = sum_c s_c / sum_c n_c
        standard error^2 = C / (C - 1) sum_c (s_c - r n_c)^2 / (sum_c n_c)^2

    A cluster (a prompt, a document) may contain any number of tokens with any correlation; clusters are assumed to be
    independent. ``ci95`` is Student's t with (sum n)^2 / sum n^2 - 1 degrees of freedom, C - 1 for clusters of one
    length, corrected for the skewness of the clusters. Its end away from a bound is at least that of Student's t of the
    logarithm of the distance to the bound.

    | input                           | result                                                             |
    | every cluster has the same mean | standard error 0; the interval allows for clusters missing from    |
    |                                 | the sample, up to ``lower`` and ``upper``; infinite on a side      |
    |                                 | without a bound, and a warning                                     |
    | ... and it is ``known_value``   | the exact value: standard error 0, interval (r, r), no warnings    |
    | a sum is infinite or NaN        | that value, standard error and interval NaN, a warning             |
    | one cluster                     | the value, standard error NaN, an infinite interval, a warning     |
    | a cluster with count 0          | left out                                                           |
    | no cluster                      | NaN                                                                |

    Args:
        sums: per cluster, the sum over its tokens.
        counts: per cluster, the number of its tokens.
        unit: of the mean: "nats", "probability" or "none".
        lower: the smallest possible mean (0 for a KL); the interval is clipped there.
        upper: the largest possible mean (1 for a probability).
        known_value: the mean that every cluster has by construction: 0 for the KL of a model against itself. Without
            it a constant sample does not count as exact.

    Raises:
        ShapeError: if sums and counts differ in length.
    """
    sums, counts = one_each("cluster", sums=sums, counts=counts)
    linearised = linearise([RatioTerm(1.0, sums, counts)])
    return estimate_of(linearised, unit, lower, upper, known_value=known_value)


def ratio_of_many(
    sums: Real[np.ndarray, "clusters_s columns"],
    counts: Real[np.ndarray, "clusters_n *columns"],
    *,
    unit: str | Sequence[str] = "nats",
    lower: Bound = None,
    upper: Bound = None,
    known_value: float | None = None,
) -> tuple[Estimate, ...]:
    """``ratio_of_sums`` for several quantities on the same clusters.

    Args:
        sums: [cluster, column].
        counts: [cluster] if they are the same for all columns, or [cluster, column].
        unit: one for all columns, or one for each.
        lower: the smallest possible value, one for all columns, or one for each.
        upper: the largest possible value, one for all columns, or one for each.
        known_value: one for all columns.

    Raises:
        ShapeError: if the shapes do not fit together.
    """
    if sums.ndim != 2 or counts.shape not in (sums.shape, sums.shape[:1]):
        raise ShapeError(
            f"sums are {sums.shape} and counts {counts.shape}; give [cluster, column], and counts likewise or [cluster]"
        )
    columns = sums.shape[1]
    counts = np.broadcast_to(counts if counts.ndim == 2 else counts[:, None], sums.shape)
    units, least, most = (
        np.broadcast_to(np.array(option, dtype=object), columns) for option in (unit, lower, upper)
    )
    return tuple(
        ratio_of_sums(
            sums[:, k], counts[:, k], unit=units[k], lower=least[k], upper=most[k], known_value=known_value
        )
        for k in range(columns)
    )


def clustered_mean(
    values: Real[np.ndarray, "observations_v"] | Sequence[float],
    clusters: Shaped[np.ndarray, "observations_c"] | Sequence[Any],
    *,
    unit: str = "nats",
    lower: float | None = None,
    upper: float | None = None,
) -> Estimate:
    """The mean of values with a standard error that is robust to correlation within clusters.

    ``ratio_of_sums`` of the clusters' sums and counts, which documents the error, the interval and the edge cases.

    Args:
        values: one per observation.
        clusters: a label per observation, numbers or strings; observations with one label form a cluster.
        unit: of the values.
        lower: the smallest possible mean.
        upper: the largest possible mean.

    Raises:
        ShapeError: if values and labels differ in length.

    >>> print(kleash.clustered_mean(np.arange(6.0), np.array([0, 0, 1, 1, 2, 2])))
    2.5 ± 1.2 nats over 3 clusters
      warning: only 3 clusters; below 30 the error itself is uncertain
    """
    values, clusters = one_each("value", values=values, clusters=clusters)
    sums, counts = sums_by_cluster(clusters, values)
    return ratio_of_sums(sums, counts, unit=unit, lower=lower, upper=upper)


def mean_per_token(
    sums: Real[np.ndarray, "responses_s"],
    tokens: Real[np.ndarray, "responses_n"],
    prompts: Shaped[np.ndarray, "responses_p"],
) -> Estimate:
    """The mean over tokens of a KL of at least 0, in nats, by ``ratio_of_sums`` with prompts as clusters.

    Args:
        sums: of each response, over its tokens.
        tokens: their number.
        prompts: a label of each response's prompt.
    """
    totals, counts, _ = sums_by_cluster(prompts, sums, tokens)
    return ratio_of_sums(totals, counts, lower=0.0)


def paired_difference(
    sums_a: Real[np.ndarray, "clusters_sa"] | Sequence[float],
    counts_a: Real[np.ndarray, "clusters_na"] | Sequence[float],
    sums_b: Real[np.ndarray, "clusters_sb"] | Sequence[float],
    counts_b: Real[np.ndarray, "clusters_nb"] | Sequence[float],
    *,
    unit: str = "nats",
    lower: float | None = None,
    upper: float | None = None,
    known_value: float | None = None,
) -> Estimate:
    """The mean of a minus the mean of b, paired by cluster: cluster c is the same prompt in both.

        r_a - r_b,   standard error^2 = C / (C - 1) sum_c ((s_a - r_a n_a) / N_a - (s_b - r_b n_b) / N_b)^2

    The effect of a prompt on both cancels, so the error is usually far below that of two separate measurements. A
    prompt without tokens in one measurement still counts in the other. The edge cases are those of ``ratio_of_sums``,
    with one addition: the difference is exactly 0 if both measurements are equal bit for bit and no two clusters have
    the same mean, since that does not happen by chance.

    Args:
        sums_a: per cluster, the sum over its tokens in the first measurement.
        counts_a: per cluster, the number of its tokens.
        sums_b: per cluster, the sum over its tokens in the second measurement.
        counts_b: per cluster, the number of its tokens in the second measurement.
        unit: of both means.
        lower: the smallest possible difference (-1 for two probabilities).
        upper: the largest possible difference.
        known_value: the difference that every cluster has by construction: 0 for the same models.

    Raises:
        ShapeError: if the four differ in shape.
    """
    sums_a, counts_a, sums_b, counts_b = one_each(
        "cluster of both measurements", sums_a=sums_a, counts_a=counts_a, sums_b=sums_b, counts_b=counts_b
    )
    terms = [RatioTerm(1.0, sums_a, counts_a), RatioTerm(-1.0, sums_b, counts_b)]
    if _are_identical(terms[0], terms[1]):
        known_value = 0.0
    return estimate_of(linearise(terms), unit, lower, upper, known_value=known_value)


def _are_identical(a: RatioTerm, b: RatioTerm) -> bool:
    """Whether b repeats the measurement a: equal bit for bit, over at least two clusters that all differ."""
    if not (np.array_equal(a.sums, b.sums) and np.array_equal(a.counts, b.counts)):
        return False
    means = np.divide(a.sums[a.counts > 0], a.counts[a.counts > 0], dtype=np.float64)
    return len(means) > 1 and len(np.unique(means)) == len(means)


class RunningMean(NamedTuple):
    """Running mean by number of tokens, for a convergence plot."""

    tokens: Int64[np.ndarray, "points"]
    mean: Float64[np.ndarray, "points"]
    ci95: Float64[np.ndarray, "points 2"]
    """The 95 % interval of each mean, by ``ratio_of_sums``."""


def running_mean(
    sums: Real[np.ndarray, "clusters_s"] | Sequence[float],
    counts: Real[np.ndarray, "clusters_n"] | Sequence[float],
    points: int = 100,
    *,
    lower: float | None = None,
    known_value: float | None = None,
) -> RunningMean:
    """The mean per token over the first clusters, at evenly spaced numbers of clusters up to all of them.

    Args:
        sums: per cluster, the sum over its tokens, in the order of measurement.
        counts: per cluster, the number of its tokens.
        points: number of points to return; fewer if there are fewer clusters.
        lower: the smallest possible mean (0 for a KL).
        known_value: the mean that every cluster has by construction: 0 for the KL of a model against itself.

    Raises:
        ShapeError: if sums and counts differ in length.
    """
    sums, counts = one_each("cluster", sums=sums, counts=counts)
    active = counts > 0
    sums, counts = sums[active], counts[active]
    ends = np.unique(np.rint(np.linspace(len(sums), 1, min(points, len(sums)))).astype(np.int64))
    estimates = [
        ratio_of_sums(sums[:end], counts[:end], lower=lower, known_value=known_value) for end in ends
    ]
    return RunningMean(
        np.cumsum(counts)[ends - 1].astype(np.int64),
        np.array([estimate.value for estimate in estimates]),
        np.array([estimate.ci95 for estimate in estimates]).reshape(-1, 2),
    )
