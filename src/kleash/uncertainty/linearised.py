"""What a mean over tokens, or a difference of two, owes to each cluster."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

ROUNDING = 8 * float(np.finfo(np.float64).eps)
MOST_DRAWN = 4096
"""Clusters beyond which there is no bootstrap: Student's t hardly differs by then, and is much sooner done."""

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
    """Per cluster: what it adds to the error, to first order. Sums to 0."""
    signs: tuple[float, ...]
    basis: Array
    """[cluster, 2 parts]: residual and count of each part."""
    trouble: str
    """Why there can be no error: empty where there can."""

    @property
    def clusters(self) -> int:
        """How many of them hold a token."""
        return len(self.influence)


def linearise(parts: Sequence[Part]) -> Linearised:
    """Values and residuals of the clusters that hold a token.

    Clusters that a bootstrap may draw are sorted by what they hold, so that its draws depend neither on
    their order nor on their names.
    """
    active = np.any([part.counts > 0 for part in parts], axis=0)
    columns = [np.asarray(column, np.float64)[active] for part in parts for column in part[1:]]
    trouble = _trouble(columns[::2])
    if trouble or not active.any():
        with np.errstate(invalid="ignore", divide="ignore"):
            value = float(sum(part.sign * (part.sums[active].sum() / part.counts.sum()) for part in parts))
        return Linearised(value, np.full(int(active.sum()), math.nan), (), np.empty((0, 0)), trouble)
    if len(columns[0]) <= MOST_DRAWN:
        order = np.lexsort(columns[::-1])
        columns = [column[order] for column in columns]
    value, influence, rounding = 0.0, np.zeros(len(columns[0])), np.zeros(len(columns[0]))
    basis: list[Array] = []
    for part, sums, counts in zip(parts, columns[::2], columns[1::2], strict=True):
        total = counts.sum()
        mean = sums.sum() / total
        residual = sums - mean * counts
        value += part.sign * float(mean)
        influence += part.sign * residual / total
        rounding += ROUNDING * (np.abs(sums) + np.abs(mean) * counts) / total
        basis += [residual, counts]
    if np.all(np.abs(influence) <= rounding):
        influence = np.zeros_like(influence)
    return Linearised(value, influence, tuple(part.sign for part in parts), np.stack(basis, axis=1), "")


def _trouble(sums: Sequence[Array]) -> str:
    bad = ~np.all([np.isfinite(column) for column in sums], axis=0)
    if not bad.any():
        return ""
    return f"the sums of {int(bad.sum())} of {len(bad)} clusters are infinite or not a number"
