"""Exact quantiles of any number of float32 values in flat memory: the first of two passes over the data."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Int64

from kleash.errors import OptionError
from kleash.uncertainty.bits import HALF, keys_of
from kleash.uncertainty.refining import FineCounts, rank_at


@dataclass(frozen=True, kw_only=True, eq=False)
class CoarseCounts:
    """First pass: how many values share their upper 16 bits (sign, exponent, 7 bits of mantissa).

        coarse = CoarseCounts.empty()
        for values, clusters in chunks:
            coarse = coarse.after(values)
        fine = coarse.refine((0.5, 0.99, 1.0), clusters=number_of_clusters)
        for values, clusters in chunks:
            fine = fine.after(values, clusters)
        median, percentile_99, maximum = fine.estimates(lower=0.0)

    512 KiB, whatever is counted. Chunks may come in any order and any sizes, and counts of parts add up.
    """

    counts: Int64[np.ndarray, "65536"]
    """Per upper half, in rising order of the values."""
    not_numbers: int
    """How many values were NaN. They are counted nowhere else."""

    @classmethod
    def empty(cls) -> "CoarseCounts":
        """Nothing counted yet."""
        return cls(counts=np.zeros(HALF, np.int64), not_numbers=0)

    def after(self, values: Float32[np.ndarray, "values"]) -> "CoarseCounts":
        """The counts with these values, of any sign, infinite ones included.

        Raises:
            OptionError: if they are not float32, whose bits are what is counted.
        """
        if values.dtype != np.float32:
            raise OptionError(f"the values are {values.dtype}; give float32, of which every bit is counted")
        keys = keys_of(values[~np.isnan(values)])
        found = np.bincount(keys >> 16, minlength=HALF)
        return CoarseCounts(
            counts=self.counts + found, not_numbers=self.not_numbers + len(values) - len(keys)
        )

    def __add__(self, other: "CoarseCounts") -> "CoarseCounts":
        """The counts of both parts."""
        return CoarseCounts(
            counts=self.counts + other.counts, not_numbers=self.not_numbers + other.not_numbers
        )

    @property
    def total(self) -> int:
        """How many numbers were counted."""
        return int(self.counts.sum())

    def refine(self, levels: Sequence[float], clusters: int) -> FineCounts:
        """What the second pass begins with.

        Args:
            levels: above 0 and up to 1, which is the maximum.
            clusters: how many there are; the second pass numbers them from 0.

        Raises:
            OptionError: if a level lies outside.
        """
        wrong = [level for level in levels if not 0 < level <= 1]
        if wrong:
            raise OptionError(f"there is no quantile at {wrong[0]}; give levels above 0 and up to 1")
        ranks = [rank_at(level, self.total) for level in levels if self.total]
        halves = np.unique(np.searchsorted(np.cumsum(self.counts), np.array(ranks, np.int64)))
        return FineCounts(
            coarse=self.counts,
            not_numbers=self.not_numbers,
            levels=tuple(levels),
            halves=halves.astype(np.int64),
            inside=np.zeros((len(halves), HALF), np.int64),
            by_cluster=np.zeros((clusters, 2 * len(halves) + 1), np.int64),
            sums=np.zeros(2 * len(halves) + 1),
        )
