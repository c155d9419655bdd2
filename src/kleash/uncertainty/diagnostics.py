"""Warnings about an estimate, where simulations show that its interval is wrong in more than one case in ten."""

import math
from collections.abc import Iterator

from kleash.uncertainty.linearisation import LinearisedEstimate

FEW_CLUSTERS = 30
"""Below this number of clusters the skewness of a sample is mostly noise, and the standard error is uncertain."""
MIN_UNTIED_CLUSTERS = 10
"""If most clusters have the same mean, at least this many should differ from it."""
VERY_FEW_CLUSTERS = 20
"""Below this number of clusters the interval of a quantity with one bound always has a warning."""


def warnings_about(estimate: LinearisedEstimate, bounds: tuple[float, float]) -> Iterator[str]:
    """Yield the warnings that the sample of clusters justifies.

    A cluster that carries much of the variance, and skewness, are no reason: the interval is wider then, and covers
    more (benchmarks/coverage.py). Samples of a long tail that miss it are those that look harmless.

    Args:
        estimate: the estimate and the influence of each cluster.
        bounds: the smallest and the largest possible value of the quantity. With two finite bounds the interval is
            valid without rare clusters; with one, as for a KL, a long tail is to be expected.
    """
    clusters = estimate.clusters
    finite_bounds = sum(map(math.isfinite, bounds))
    if estimate.why_no_standard_error:
        yield estimate.why_no_standard_error
    yield from few_clusters(clusters)
    if estimate.why_no_standard_error or clusters < 2 or finite_bounds == 2:
        return
    untied = clusters - estimate.tied
    if not estimate.influence.any():
        yield (
            f"all {clusters} clusters have the same mean, which says nothing about the spread of other clusters: up to "
            f"{100 * unseen_share(clusters):.0f} % of all may differ"
        )
    elif estimate.tied and untied < MIN_UNTIED_CLUSTERS:
        yield (
            f"{estimate.tied} of {clusters} clusters have the same mean: the estimate rests on the other {untied}, and "
            "its interval cannot be trusted"
        )
    elif clusters < VERY_FEW_CLUSTERS and finite_bounds == 1:
        yield (
            f"{clusters} clusters may miss a kind of cluster that makes up as much as "
            f"{100 * unseen_share(clusters):.0f} % of all: if its values are extreme, the interval cannot be trusted"
        )


def few_clusters(clusters: int) -> tuple[str, ...]:
    """Return the warning about fewer than 30 clusters, or no warning."""
    if clusters >= FEW_CLUSTERS:
        return ()
    noun = "cluster" if clusters == 1 else "clusters"
    return (f"only {clusters} {noun}; below {FEW_CLUSTERS} the error itself is uncertain",)


def unseen_share(clusters: float | int, confidence: float = 0.95) -> float:
    """Upper confidence bound of the share of a kind of cluster that the sample does not contain: 1 - 0.05^(1/C).

    The exact (Clopper-Pearson) bound for a count of 0; about 3 / C, the "rule of three".

    References:
        Hanley & Lippman-Hand (1983), "If Nothing Goes Wrong, Is Everything All Right?".
    """
    return -math.expm1(math.log1p(-confidence) / clusters)
