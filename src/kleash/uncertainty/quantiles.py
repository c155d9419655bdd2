"""Exact quantiles of any number of float32 values in constant memory, by two counting passes over the data."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
from jaxtyping import Float32, Float64, Int64, Integer
from numpy.typing import NDArray

from kleash.errors import OptionError, ShapeError
from kleash.estimate import Estimate
from kleash.uncertainty.diagnostics import few_clusters, unseen_share
from kleash.uncertainty.intervals import clip_interval, standard_error
from kleash.uncertainty.linearisation import RatioTerm, linearise
from kleash.uncertainty.student_t import student_t_quantile

NUM_HALVES = 1 << 16
"""Number of values of the upper, or lower, 16 bits of a float32."""
SIGN_BIT = np.uint32(1 << 31)


@dataclass(frozen=True, kw_only=True, eq=False)
class CoarseCounts:
    """First pass: counts of values by their upper 16 bits (sign, exponent, 7 bits of mantissa).

        coarse = CoarseCounts.empty()
        for values, clusters in chunks:
            coarse = coarse.after(values)
        fine = coarse.refine((0.5, 0.99, 1.0), clusters=number_of_clusters)
        for values, clusters in chunks:
            fine = fine.after(values, clusters)
        median, percentile_99, maximum = fine.estimates(lower=0.0)

    Takes 512 KiB for any number of values. Chunks may have any order and sizes, and the counts of parts can be added.
    """

    counts: Int64[np.ndarray, "65536"]
    """Per upper half, in ascending order of the values."""
    not_numbers: int
    """Number of NaN values, which are not in ``counts``."""

    @classmethod
    def empty(cls) -> "CoarseCounts":
        """Counts of no values."""
        return cls(counts=np.zeros(NUM_HALVES, np.int64), not_numbers=0)

    def after(self, values: Float32[np.ndarray, "values"]) -> "CoarseCounts":
        """Return the counts with these values added; any sign, infinite values included.

        Raises:
            OptionError: if the values are not float32.
        """
        if values.dtype != np.float32:
            raise OptionError(f"the values are {values.dtype}; give float32, of which every bit is counted")
        keys = float_keys(values[~np.isnan(values)])
        new_counts = np.bincount(keys >> 16, minlength=NUM_HALVES)
        return CoarseCounts(
            counts=self.counts + new_counts, not_numbers=self.not_numbers + len(values) - len(keys)
        )

    def __add__(self, other: "CoarseCounts") -> "CoarseCounts":
        """The counts of both parts."""
        return CoarseCounts(
            counts=self.counts + other.counts, not_numbers=self.not_numbers + other.not_numbers
        )

    @property
    def total(self) -> int:
        """Number of values that are not NaN."""
        return int(self.counts.sum())

    def refine(self, levels: Sequence[float], clusters: int) -> "FineCounts":
        """Return the empty counts of the second pass.

        Args:
            levels: of the quantiles, above 0 and up to 1 (the maximum).
            clusters: number of clusters; the second pass numbers them from 0.

        Raises:
            OptionError: if a level is outside this range.
        """
        invalid = [level for level in levels if not 0 < level <= 1]
        if invalid:
            raise OptionError(f"there is no quantile at {invalid[0]}; give levels above 0 and up to 1")
        ranks = [rank_of_level(level, self.total) for level in levels if self.total]
        halves = np.unique(np.searchsorted(np.cumsum(self.counts), np.array(ranks, np.int64)))
        return FineCounts(
            coarse=self.counts,
            not_numbers=self.not_numbers,
            levels=tuple(levels),
            halves=halves.astype(np.int64),
            inside=np.zeros((len(halves), NUM_HALVES), np.int64),
            by_cluster=np.zeros((clusters, 2 * len(halves) + 1), np.int64),
            sums=np.zeros(2 * len(halves) + 1),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class FineCounts:
    """Second pass: counts of the lower 16 bits near the quantiles, and per cluster of the values between them.

    Takes 512 KiB per quantile, and 16 bytes per quantile and cluster. ``CoarseCounts.refine`` returns the empty counts.
    """

    coarse: Int64[np.ndarray, "65536"]
    """Number of values per upper half, from the first pass."""
    not_numbers: int
    """Number of NaN values in the first pass."""
    levels: tuple[float, ...]
    """Levels of the quantiles: above 0, up to 1."""
    halves: Int64[np.ndarray, "halves"]
    """The upper halves that contain a quantile, ascending."""
    inside: Int64[np.ndarray, "halves 65536"]
    """For each of these, the number of values per lower half."""
    by_cluster: Int64[np.ndarray, "clusters parts"]
    """Number of values of each cluster below, in, between and above these upper halves, alternating."""
    sums: Float64[np.ndarray, "parts"]
    """Sum of the values in each of these parts."""

    def after(
        self, values: Float32[np.ndarray, "values_v"], clusters: Integer[np.ndarray, "values_c"]
    ) -> "FineCounts":
        """Return the counts with these values added; all calls together must have the values of the first pass.

        Args:
            values: a chunk of the values.
            clusters: the cluster number of each value, from 0.

        Raises:
            ShapeError: if values and clusters differ in length, or a cluster number is too large.
        """
        if values.ndim != 1 or values.shape != clusters.shape:
            raise ShapeError(
                f"values are {values.shape} and clusters {clusters.shape}; give one for each value"
            )
        num_clusters, parts = self.by_cluster.shape
        if clusters.max(initial=0) >= max(num_clusters, 1):
            raise ShapeError(
                f"a value is of cluster {clusters.max()}, and there are {num_clusters}, numbered from 0"
            )
        is_number = ~np.isnan(values)
        values, clusters = values[is_number], clusters[is_number]
        keys = float_keys(values)
        upper = keys >> 16
        index = np.searchsorted(self.halves, upper)
        within = np.searchsorted(self.halves, upper, side="right") > index
        part = 2 * index + within
        cluster_counts = np.bincount(clusters.astype(np.int64) * parts + part, minlength=num_clusters * parts)
        lower_counts = np.bincount(
            index[within] * NUM_HALVES + (keys[within] & (NUM_HALVES - 1)), minlength=self.inside.size
        )
        return replace(
            self,
            inside=self.inside + np.reshape(lower_counts, self.inside.shape),
            by_cluster=self.by_cluster + np.reshape(cluster_counts, (num_clusters, parts)),
            sums=self.sums + np.bincount(part, weights=values, minlength=parts),
        )

    def estimates(
        self,
        *,
        unit: str = "nats",
        lower: float = -math.inf,
        upper: float = math.inf,
        known_value: float | None = None,
    ) -> tuple[Estimate, ...]:
        """The quantile at each level: the smallest value with at least that share of the values up to it.

        The interval is Woodruff's: the interval of the share of values up to the quantile, converted to values. The
        interval of the share is the wider of Student's t on the plain and on the logit scale, with a cluster-robust
        error that is at least the error of independent values. Its ends are rounded outwards to 8 significant bits
        (0.8 %), and infinite (or ``lower``, ``upper``) if there are too few values to bound them. The standard error
        is half the width of the interval divided by Student's quantile. If all values are equal, an end is finite only
        if the sample would contain, with 97.5 % probability, any kind of cluster frequent enough to move the quantile
        in that direction. A maximum has no standard error, and its interval no upper end.

        Args:
            unit: of the values.
            lower: the smallest possible value.
            upper: the largest possible value.
            known_value: the value of all observations by construction: 0 for the KL of a model against itself.

        References:
            Woodruff (1952), "Confidence Intervals for Medians and Other Position Measures".
        """
        if known_value is not None and self._is_constant(known_value):
            return tuple(self._exact_estimate(known_value, unit) for _ in self.levels)
        return tuple(self._estimate(level, unit, (lower, upper)) for level in self.levels)

    def top_share(self, share: float) -> float:
        """The part of the sum of all values that comes from the largest ``share`` of them.

        NaN if the sum is 0 or not finite.

        Args:
            share: 0.01 for the largest 1 % (rounded up to a whole number of values). 1 - share must be a level of the
                second pass.

        Raises:
            OptionError: if it is not.
        """
        level = next((level for level in self.levels if math.isclose(level, 1 - share)), None)
        if level is None:
            raise OptionError(
                f"the largest {share} begin at level {1 - share}, and the levels are {self.levels}"
            )
        total_sum, total = float(self.sums.sum()), int(self.coarse.sum())
        if total_sum == 0 or not math.isfinite(total_sum):
            return math.nan
        index, half = self._locate(rank_of_level(level, total))
        num_in_half = rank_of_level(share, total) - int(self.by_cluster[:, 2 * index + 2 :].sum())
        inside = self.inside[index]
        from_top = np.cumsum(inside[::-1])[::-1]
        top_counts = np.minimum(np.maximum(num_in_half - (from_top - inside), 0), inside)
        nonzero = np.flatnonzero(top_counts)
        top_sum = floats_of_keys(half * NUM_HALVES + nonzero).astype(np.float64) @ top_counts[nonzero]
        return (float(self.sums[2 * index + 2 :].sum()) + float(top_sum)) / total_sum

    def _estimate(self, level: float, unit: str, bounds: tuple[float, float]) -> Estimate:
        """The quantile at a level, with Woodruff's interval clipped to the bounds."""
        total, clusters = int(self.coarse.sum()), int((self.by_cluster.sum(1) > 0).sum())
        value = error = math.nan
        interval = math.nan, math.nan
        if total:
            value = self._order_statistic(rank_of_level(level, total))[0]
            error, interval = self._woodruff(level, clusters) if level < 1 else (error, (value, math.inf))
        left_out = f"{self.not_numbers} values are not a number and were left out"
        return Estimate(
            value=value,
            unit=unit,
            standard_error=error,
            clusters=clusters,
            ci95=clip_interval(interval, value, bounds),
            warnings=(*([left_out] if self.not_numbers else []), *few_clusters(clusters)),
        )

    def _woodruff(self, level: float, clusters: int) -> tuple[float, tuple[float, float]]:
        """The standard error of the quantile and its interval, before clipping."""
        if clusters < 2:
            return math.nan, (-math.inf, math.inf)
        total = int(self.coarse.sum())
        rank = rank_of_level(level, total)
        t = student_t_quantile(0.975, clusters - 1)
        if self._order_statistic(1) == self._order_statistic(total) == self._order_statistic(rank):
            low, high = self._constant_interval(self._order_statistic(rank)[0], level)
            return 0.0 if low == high else math.inf, (low, high)
        independent_error = math.sqrt(level * (1 - level) / total)
        margin = t * max(self._share_error(rank), independent_error)
        odds = math.exp(min(margin / (level * (1 - level)), 700.0))
        lowest_share = min(level - margin, level / (level + (1 - level) * odds))
        highest_share = max(level + margin, level * odds / (level * odds + 1 - level))
        first, last = math.ceil(lowest_share * total), math.floor(highest_share * total) + 1
        low = self._order_statistic(first)[0] if first >= 1 else -math.inf
        high = self._order_statistic(last)[1] if last <= total else math.inf
        return 0.0 if low == high else (high - low) / 2 / t, (low, high)

    def _is_constant(self, value: float) -> bool:
        """Whether there are values, and all are equal to ``value``."""
        total = int(self.coarse.sum())
        ends = {end for rank in (1, total) for end in self._order_statistic(rank)} if total else set[float]()
        return ends == {value}

    def _exact_estimate(self, value: float, unit: str) -> Estimate:
        """The quantile of values that are equal by construction."""
        clusters = int((self.by_cluster.sum(1) > 0).sum())
        return Estimate(value=value, unit=unit, standard_error=0.0, clusters=clusters, ci95=(value, value))

    def _constant_interval(self, value: float, level: float) -> tuple[float, float]:
        """The interval of a quantile if all values are equal, but not by construction.

        A share of all clusters that is missing from the sample may have other values. It moves the quantile up if it
        is larger than 1 - level, and down if it is at least level.
        """
        sizes = self.by_cluster.sum(1).astype(np.float64)
        unseen = unseen_share(float(sizes.sum() ** 2 / (sizes @ sizes)), 0.975)
        return (value if level > unseen else -math.inf), (value if level <= 1 - unseen else math.inf)

    def _share_error(self, rank: int) -> float:
        """Cluster-robust standard error of the share of values up to the value of this rank.

        Within the upper half that contains the value, every cluster is assumed to have the same share of values up to
        it.
        """
        index, _ = self._locate(rank)
        below, within = self.by_cluster[:, : 2 * index + 1].sum(1), self.by_cluster[:, 2 * index + 1]
        cumulative = np.cumsum(self.inside[index])
        up_to = cumulative[np.searchsorted(cumulative, rank - int(below.sum()))]
        sums = below + float(up_to) / float(within.sum()) * within
        return standard_error(linearise([RatioTerm(1.0, sums, self.by_cluster.sum(1).astype(np.float64))]))

    def _order_statistic(self, rank: int) -> tuple[float, float]:
        """Bounds of the value of this rank: both the value if its upper half was refined, else the ends of it."""
        index, half = self._locate(rank)
        if index < len(self.halves) and self.halves[index] == half:
            before = int(self.coarse[:half].sum())
            key = half * NUM_HALVES + int(np.searchsorted(np.cumsum(self.inside[index]), rank - before))
            value = float(floats_of_keys(np.array([key]))[0])
            return value, value
        low, high = floats_of_keys(np.array([half * NUM_HALVES, half * NUM_HALVES + NUM_HALVES - 1]))
        return float(low), float(high)

    def _locate(self, rank: int) -> tuple[int, int]:
        """The index among the refined halves, and the upper half, of the value of this rank (counted from 1)."""
        half = int(np.searchsorted(np.cumsum(self.coarse), rank))
        return int(np.searchsorted(self.halves, half)), half


def rank_of_level(level: float, total: int) -> int:
    """The rank, from 1, of the quantile at this level among ``total`` values; the level is read as a decimal."""
    return math.ceil(Fraction(repr(float(level))) * total)


def float_keys(values: NDArray[Any]) -> NDArray[np.int64]:
    """Map float32 values to integers with the same order, from 0; both zeros have one key."""
    bits = np.asarray(values + np.float32(0), np.float32).view(np.uint32)  # pyright: ignore[reportUnknownMemberType]
    return np.where(bits & SIGN_BIT, ~bits, bits | SIGN_BIT).astype(np.int64)


def floats_of_keys(keys: NDArray[Any]) -> NDArray[np.float32]:
    """Inverse of ``float_keys``; keys beyond those of the infinities give the infinities."""
    lowest, highest = float_keys(np.array([-np.inf, np.inf], np.float32))
    valid_keys = np.minimum(np.maximum(keys, lowest), highest).astype(np.uint32)
    bits: NDArray[np.uint32] = np.where(valid_keys & SIGN_BIT, valid_keys ^ SIGN_BIT, ~valid_keys).astype(
        np.uint32
    )
    return bits.view(np.float32)  # pyright: ignore[reportUnknownMemberType]
