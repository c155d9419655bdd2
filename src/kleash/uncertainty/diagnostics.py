"""Warnings about an interval, from the sample of clusters."""

import math

import numpy as np

from kleash.uncertainty.linearised import Linearised
from kleash.uncertainty.skewness import FEW_CLUSTERS, skewness_of_mean

LARGE_SHARE = 0.2
"""Share of the variance above which one cluster carries too much of it."""
FEW_DIFFERENT = 10
"""Where most clusters have one and the same mean, the others should be so many."""
VERY_FEW_CLUSTERS = 20
"""Below so many clusters the interval of a quantity with one bound always carries a warning."""
ENOUGH_CLUSTERS = 150
"""So many clusters hold one of a kind that makes up 2 % of all, with 95 % confidence (the rule of three: 3 / C)."""
SKEWED = 0.1
"""Skewness of the mean beyond which a sample is called skewed; in normal samples of 64 it is 0.04 or so."""


def warnings_about(one: Linearised, bounds: tuple[float, float]) -> tuple[str, ...]:
    """Warnings that the clusters give reason for.

    Args:
        one: the estimate, and what each cluster adds to its error.
        bounds: the least and the most that the quantity can be. With two finite bounds the interval holds
            without what the sample does not show; with one, as of a KL, there is a long tail to expect.
    """
    few = few_clusters(one.clusters)
    ends = sum(map(math.isfinite, bounds))
    if one.trouble:
        return (one.trouble, *few)
    if one.clusters < 2:
        return few
    variance = float(one.influence @ one.influence)
    if variance == 0:
        return few if ends == 2 else (*few, _constant(one.clusters))
    share = float(np.abs(one.influence).max()) ** 2 / variance
    decides = (f"one cluster carries {share:.0%} of the variance",) if share > LARGE_SHARE else ()
    if ends == 2:
        return (*few, *decides)
    different = one.clusters - one.tied
    if one.tied and different < FEW_DIFFERENT:
        rest = (
            f"{one.tied} of {one.clusters} clusters have the same mean: the estimate rests on the other {different}, "
            "and its interval cannot be trusted"
        )
        return (*few, *decides, rest)
    if one.clusters >= ENOUGH_CLUSTERS:
        return decides
    skewness = skewness_of_mean(one.influence)
    skewed = abs(skewness) > SKEWED
    if one.clusters < VERY_FEW_CLUSTERS and (skewed or ends == 1):
        return (*few, *decides, _unseen(one.clusters, f"{one.clusters} clusters"))
    if skewed and not decides:
        number = skewness * math.sqrt(one.clusters)
        which = f"the clusters are skewed (skewness {number:.1f}), and {one.clusters} of them"
        return (*few, _unseen(one.clusters, which))
    return (*few, *decides)


def few_clusters(clusters: int) -> tuple[str, ...]:
    """The warning that there are too few clusters to know the error well, if there are."""
    if clusters >= FEW_CLUSTERS:
        return ()
    noun = "cluster" if clusters == 1 else "clusters"
    return (f"only {clusters} {noun}; below {FEW_CLUSTERS} the error itself is uncertain",)


def unseen_share(clusters: float | int, confidence: float = 0.95) -> float:
    """The largest share of all clusters of which ``clusters`` drawn at random may hold none: 1 - 0.05^(1/C).

    The exact (Clopper-Pearson) bound of a share that was not met; about 3 / C, the "rule of three".

    References:
        Hanley & Lippman-Hand (1983), "If Nothing Goes Wrong, Is Everything All Right?".
    """
    return -math.expm1(math.log1p(-confidence) / clusters)


def _constant(clusters: int) -> str:
    """The warning that a sample without any variation shows none."""
    return (
        f"all {clusters} clusters have the same mean: they cannot show how far others are from it, and up to "
        f"{unseen_share(clusters):.0%} of all may be"
    )


def _unseen(clusters: int, which: str) -> str:
    """The warning that a rare kind of cluster that lies far out may be missing from the sample."""
    return (
        f"{which} may hold none of a kind that makes up as much as {unseen_share(clusters):.0%} of all: if that kind "
        "lies much further out, the interval cannot be trusted"
    )
