"""Linearisation of ratio estimates: the influence of each cluster on a mean per token, or on a difference of two."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Real
from numpy.typing import NDArray

ROUNDING_TOLERANCE = 8 * float(np.finfo(np.float64).eps)
MAX_SORTED_CLUSTERS = 4096
"""Up to this many clusters are sorted first, so that their order changes no digit of the result."""

FloatArray = NDArray[np.float64]


class RatioTerm(NamedTuple):
    """One ratio of sums in an estimate, with its sign."""

    sign: float
    sums: Real[np.ndarray, " clusters"]
    counts: Real[np.ndarray, " clusters"]


class LinearisedEstimate(NamedTuple):
    """An estimate and the first-order influence of each cluster on it."""

    value: float
    influence: FloatArray
    """Per cluster: its contribution to the error, to first order. They sum to 0, and all are 0 if all clusters have the
    same mean."""
    effective_clusters: float
    """Number of clusters of equal size with the same information: (sum n)^2 / sum n^2, the minimum over the terms."""
    tied: int
    """Number of clusters that have the most frequent mean, if that is at least half of them; otherwise 0. Also 0 for
    more than ``MAX_SORTED_CLUSTERS`` clusters."""
    why_no_standard_error: str
    """Why no standard error can be computed; empty if one can."""

    @property
    def clusters(self) -> int:
        """Number of clusters with at least one token."""
        return len(self.influence)

    @property
    def skewness(self) -> float:
        """Skewness of the estimate's error: sum u^3 / (sum u^2)^(3/2) over the influences u, between -1 and 1.

        This is the skewness of the clusters, which are not all equal, divided by the square root of their number.
        """
        u = self.influence / np.abs(self.influence).max()
        squares = u * u
        return float(squares @ u) / float(squares.sum()) ** 1.5


def linearise(terms: Sequence[RatioTerm]) -> LinearisedEstimate:
    """Compute the signed sum of ratios and the influence of each cluster that has a token; NaN if a ratio has none.

    Up to ``MAX_SORTED_CLUSTERS`` clusters are sorted by their sums and counts, so that the result depends neither on
    their order nor on their labels.
    """
    active = ~np.all([term.counts <= 0 for term in terms], axis=0)
    # sums and counts of each term in turn: columns[::2] are all sums, columns[1::2] all counts
    columns = [np.asarray(x, np.float64)[active] for term in terms for x in (term.sums, term.counts)]
    why_no_standard_error = _why_no_standard_error(columns)
    if why_no_standard_error or not all(counts.any() for counts in columns[1::2]):
        with np.errstate(invalid="ignore", divide="ignore"):
            ratios = zip(terms, columns[::2], columns[1::2], strict=True)
            value = float(sum(term.sign * (sums.sum() / counts.sum()) for term, sums, counts in ratios))
        influence = np.full(int(active.sum()), math.nan)
        return LinearisedEstimate(
            value=value,
            influence=influence,
            effective_clusters=math.nan,
            tied=0,
            why_no_standard_error=why_no_standard_error,
        )
    if len(columns[0]) <= MAX_SORTED_CLUSTERS:
        order = np.lexsort(columns[::-1])
        columns = [column[order] for column in columns]
    value, influence = 0.0, np.zeros(len(columns[0]))
    effective_clusters = math.inf
    for term, sums, counts in zip(terms, columns[::2], columns[1::2], strict=True):
        total = counts.sum()
        mean = sums.sum() / total
        value += term.sign * float(mean)
        influence += (term.sign / total) * (sums - mean * counts)
        effective_clusters = min(effective_clusters, float(total**2 / (counts @ counts)))
    if _is_rounding(influence, columns):
        influence = np.zeros_like(influence)
    can_count_ties = len(influence) <= MAX_SORTED_CLUSTERS
    tied = _count_tied([term.sign for term in terms], columns) if can_count_ties else 0
    return LinearisedEstimate(
        value=value,
        influence=influence,
        effective_clusters=effective_clusters,
        tied=tied,
        why_no_standard_error="",
    )


def _is_rounding(influence: FloatArray, columns: Sequence[FloatArray]) -> bool:
    """Whether every influence is within the rounding error of the columns (sums and counts in turn) it comes from."""
    rounding = np.zeros(len(influence))
    for sums, counts in zip(columns[::2], columns[1::2], strict=True):
        total = counts.sum()
        rounding += ROUNDING_TOLERANCE * (np.abs(sums) + np.abs(sums.sum() / total) * counts) / total
    return bool(np.all(np.abs(influence) <= rounding))


def _count_tied(signs: Sequence[float], columns: Sequence[FloatArray]) -> int:
    """Number of clusters that share one mean, if it is at least half of them (then it is the median); 0 otherwise.

    ``columns`` has sums and counts in turn.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        means = np.sum(
            [
                sign * sums / counts
                for sign, sums, counts in zip(signs, columns[::2], columns[1::2], strict=True)
            ],
            axis=0,
        )
    median = np.partition(means, len(means) // 2)[len(means) // 2]
    tied = int(np.count_nonzero(means == median))
    return tied if tied > 1 and 2 * tied >= len(means) else 0


def _why_no_standard_error(columns: Sequence[FloatArray]) -> str:
    """Why no standard error can be computed: columns with infinite or NaN numbers; empty if there are none."""
    non_finite = ~np.all([np.isfinite(column) for column in columns], axis=0)
    if not non_finite.any():
        return ""
    return f"the sums of {int(non_finite.sum())} of {len(non_finite)} clusters are infinite or not a number"
