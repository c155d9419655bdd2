"""What a mean over tokens, or a difference of two, owes to each cluster."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

ROUNDING = 8 * float(np.finfo(np.float64).eps)
MOST_SORTED = 4096
"""Clusters up to which the order in which they come changes no digit of the result."""

Array = NDArray[np.float64]


class Part(NamedTuple):
    """A ratio of sums that goes into an estimate with a sign."""

    sign: float
    sums: Array
    counts: Array


class Linearised(NamedTuple):
    """An estimate, and how much each cluster moves it."""

    value: float
    influence: Array
    """Per cluster: what it adds to the error, to first order. Sums to 0; 0 everywhere if no cluster differs."""
    effective_clusters: float
    """How many clusters of equal size hold as much as these: (sum n)^2 / sum n^2, the least of all parts."""
    tied: int
    """How many clusters have the commonest mean, if at least half of them have it; else 0, and 0 of more clusters than
    ``MOST_SORTED``."""
    trouble: str
    """Why there can be no error: empty where there can."""

    @property
    def clusters(self) -> int:
        """How many of them hold a token."""
        return len(self.influence)


def linearise(parts: Sequence[Part]) -> Linearised:
    """Values and residuals of the clusters that hold a token.

    Up to ``MOST_SORTED`` clusters are sorted by what they hold, so that the sums depend neither on their
    order nor on their names.
    """
    active = np.any([part.counts > 0 for part in parts], axis=0)
    columns = [np.asarray(column, np.float64) for part in parts for column in part[1:]]
    if not active.all():
        columns = [column[active] for column in columns]
    trouble = _trouble(columns[::2])
    if trouble or not active.any():
        with np.errstate(invalid="ignore", divide="ignore"):
            value = float(sum(part.sign * (part.sums[active].sum() / part.counts.sum()) for part in parts))
        return Linearised(value, np.full(int(active.sum()), math.nan), math.nan, 0, trouble)
    if len(columns[0]) <= MOST_SORTED:
        order = np.lexsort(columns[::-1])
        columns = [column[order] for column in columns]
    value, influence = 0.0, np.zeros(len(columns[0]))
    effective = math.inf
    for part, sums, counts in zip(parts, columns[::2], columns[1::2], strict=True):
        total = counts.sum()
        mean = sums.sum() / total
        value += part.sign * float(mean)
        influence += (part.sign / total) * (sums - mean * counts)
        effective = min(effective, float(total**2 / (counts @ counts)))
    if _is_rounding(influence, columns):
        influence = np.zeros_like(influence)
    tied = _tied([part.sign for part in parts], columns) if len(influence) <= MOST_SORTED else 0
    return Linearised(value, influence, effective, tied, "")


def _is_rounding(influence: Array, columns: Sequence[Array]) -> bool:
    """Whether nothing that moves the estimate is above the rounding of the sums that it comes from."""
    rounding = np.zeros(len(influence))
    pairs = list(zip(columns[::2], columns[1::2], strict=True))
    most = sum(
        float(np.abs(sums).max() / counts.sum() + np.abs(sums.sum()) * counts.max() / counts.sum() ** 2)
        for sums, counts in pairs
    )
    if float(np.abs(influence).max()) > ROUNDING * most:
        return False
    for sums, counts in pairs:
        total = counts.sum()
        rounding += ROUNDING * (np.abs(sums) + np.abs(sums.sum() / total) * counts) / total
    return bool(np.all(np.abs(influence) <= rounding))


def _tied(signs: Sequence[float], columns: Sequence[Array]) -> int:
    """How many clusters have the median mean: the commonest one, if half of the clusters have it."""
    with np.errstate(invalid="ignore", divide="ignore"):
        means = np.sum(
            [
                sign * sums / counts
                for sign, sums, counts in zip(signs, columns[::2], columns[1::2], strict=True)
            ],
            axis=0,
        )
    middle = np.partition(means, len(means) // 2)[len(means) // 2]
    same = int(np.count_nonzero(means == middle))
    return same if 2 * same >= len(means) else 0


def _trouble(sums: Sequence[Array]) -> str:
    bad = ~np.all([np.isfinite(column) for column in sums], axis=0)
    if not bad.any():
        return ""
    return f"the sums of {int(bad.sum())} of {len(bad)} clusters are infinite or not a number"
