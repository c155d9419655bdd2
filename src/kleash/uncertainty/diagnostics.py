"""Warnings about an estimate: few clusters, dominant clusters, ties, skewness."""

import math

import numpy as np

from kleash.uncertainty.linearisation import LinearisedEstimate

FEW_CLUSTERS = 30
"""Below this number of clusters the skewness of a sample is mostly noise, and the standard error is uncertain."""
DOMINANT_VARIANCE_SHARE = 0.2
"""Share of the variance above which a single cluster dominates."""
MIN_UNTIED_CLUSTERS = 10
"""If most clusters have the same mean, at least this many should differ from it."""
VERY_FEW_CLUSTERS = 20
"""Below this number of clusters the interval of a quantity with one bound always has a warning."""
ENOUGH_CLUSTERS = 150
"""With so many clusters, a kind that makes up 2 % of all is in the sample with 95 % confidence (rule of three, 3/C)."""
SKEWED = 0.1
"""Skewness of the mean above which a sample counts as skewed; normal samples of 64 clusters have about 0.04."""


def warnings_about(estimate: LinearisedEstimate, bounds: tuple[float, float]) -> tuple[str, ...]:
    """Return the warnings that the sample of clusters justifies.

    Args:
        estimate: the estimate and the influence of each cluster.
        bounds: the smallest and the largest possible value of the quantity. With two finite bounds the interval is
            valid without rare clusters; with one, as for a KL, a long tail is to be expected.
    """
    few = few_clusters(estimate.clusters)
    finite_bounds = sum(map(math.isfinite, bounds))
    if estimate.why_no_standard_error:
        return (estimate.why_no_standard_error, *few)
    if estimate.clusters < 2:
        return few
    variance = float(estimate.influence @ estimate.influence)
    if variance == 0:
        return few if finite_bounds == 2 else (*few, _constant_warning(estimate.clusters))
    share = float(np.abs(estimate.influence).max()) ** 2 / variance
    is_dominant = estimate.clusters > 2 and share > DOMINANT_VARIANCE_SHARE  # of two, each has half
    dominant = (f"one cluster carries {share:.0%} of the variance",) if is_dominant else ()
    if finite_bounds == 2:
        return (*few, *dominant)
    untied = estimate.clusters - estimate.tied
    if estimate.tied and untied < MIN_UNTIED_CLUSTERS:
        ties = (
            f"{estimate.tied} of {estimate.clusters} clusters have the same mean: the estimate rests on the other "
            f"{untied}, and its interval cannot be trusted"
        )
        return (*few, *dominant, ties)
    if estimate.clusters >= ENOUGH_CLUSTERS:
        return dominant
    skewness = estimate.skewness
    is_skewed = abs(skewness) > SKEWED
    if estimate.clusters < VERY_FEW_CLUSTERS and (is_skewed or finite_bounds == 1):
        return (*few, *dominant, _unseen_warning(estimate.clusters, f"{estimate.clusters} clusters"))
    if is_skewed and not dominant:
        cluster_skewness = skewness * math.sqrt(estimate.clusters)
        subject = (
            f"the clusters are skewed (skewness {cluster_skewness:.1f}), and {estimate.clusters} of them"
        )
        return (*few, _unseen_warning(estimate.clusters, subject))
    return (*few, *dominant)


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


def _constant_warning(clusters: int) -> str:
    """The warning about clusters that all have the same mean."""
    return (
        f"all {clusters} clusters have the same mean, which says nothing about the spread of other clusters: up to "
        f"{unseen_share(clusters):.0%} of all may differ"
    )


def _unseen_warning(clusters: int, subject: str) -> str:
    """The warning that a rare kind of cluster with an extreme mean may be missing from the sample."""
    return (
        f"{subject} may miss a kind of cluster that makes up as much as {unseen_share(clusters):.0%} of all: if its "
        "values are extreme, the interval cannot be trusted"
    )
