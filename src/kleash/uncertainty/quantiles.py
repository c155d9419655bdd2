"""Exact quantiles of any number of float32 values in flat memory, with intervals: two passes over the data."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
from jaxtyping import Float32, Float64, Int64, Integer, UInt32

from kleash.errors import OptionError, ShapeError
from kleash.uncertainty.estimate import Estimate
from kleash.uncertainty.intervals import cut, few_clusters, standard_error
from kleash.uncertainty.linearised import Part, linearise
from kleash.uncertainty.student import student_t_quantile

HALF = 1 << 16
SIGN = np.uint32(1 << 31)


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
        """The counts with these values, of any sign, infinite ones included."""
        keys = _keys(values[~np.isnan(values)])
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

    def refine(self, levels: Sequence[float], clusters: int) -> "FineCounts":
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
        reached = np.cumsum(self.counts)
        ranks = [_rank(level, self.total) for level in levels]
        halves = np.unique(np.searchsorted(reached, ranks)) if self.total else np.zeros(0, np.int64)
        return FineCounts(
            coarse=self,
            levels=tuple(levels),
            halves=halves.astype(np.int64),
            lower=np.zeros((len(halves), HALF), np.int64),
            by_cluster=np.zeros((clusters, 2 * len(halves) + 1), np.int64),
            sums=np.zeros(2 * len(halves) + 1),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class FineCounts:
    """Second pass: the lower 16 bits near the quantiles, and on which side of them each cluster's values lie.

    512 KiB per quantile and 16 bytes per quantile and cluster.
    """

    coarse: CoarseCounts
    levels: tuple[float, ...]
    halves: Int64[np.ndarray, "halves"]
    """The upper halves in which a quantile lies, rising."""
    lower: Int64[np.ndarray, "halves 65536"]
    """How many values in each of these have which lower half."""
    by_cluster: Int64[np.ndarray, "clusters parts"]
    """How many values of each cluster lie below, in, between and above these upper halves, in turn."""
    sums: Float64[np.ndarray, "parts"]
    """The sum of the values in each of these parts."""

    def after(
        self, values: Float32[np.ndarray, "values_v"], clusters: Integer[np.ndarray, "values_c"]
    ) -> "FineCounts":
        """The counts with these values; over all calls the same values as in the first pass.

        Args:
            values: a chunk of them.
            clusters: for each the number of its cluster, from 0.

        Raises:
            ShapeError: if there are not as many cluster numbers as values.
        """
        if values.ndim != 1 or values.shape != clusters.shape:
            raise ShapeError(
                f"values are {values.shape} and clusters {clusters.shape}; give one for each value"
            )
        numbers = ~np.isnan(values)
        values, clusters = values[numbers], clusters[numbers]
        keys = _keys(values)
        upper = (keys >> 16).astype(np.int64)
        at = np.searchsorted(self.halves, upper)
        inside = at < len(self.halves)
        inside[inside] = self.halves[at[inside]] == upper[inside]
        part = 2 * at + inside
        parts = self.by_cluster.shape[1]
        counted = np.bincount(clusters.astype(np.int64) * parts + part, minlength=self.by_cluster.size)
        found = np.bincount(at[inside] * HALF + (keys[inside] & (HALF - 1)), minlength=self.lower.size)
        return replace(
            self,
            lower=self.lower + found.reshape(self.lower.shape),
            by_cluster=self.by_cluster + counted.reshape(self.by_cluster.shape),
            sums=self.sums + np.bincount(part, weights=values, minlength=parts),
        )

    def estimates(
        self, *, unit: str = "nats", lower: float = -math.inf, upper: float = math.inf
    ) -> tuple[Estimate, ...]:
        """The quantile at each level: the smallest value that so large a share of the values does not exceed.

        The interval is Woodruff's: the interval of the share of values up to the quantile, by Student's t on
        the plain and on the logit scale, whichever reaches further, its error robust within clusters, turned
        back into values. Its ends are rounded outwards to 8 significant
        bits (0.8 %), and infinite (or ``lower``, ``upper``) where the clusters are too few to bound them.
        The standard error is half of the interval over Student's quantile. A maximum has no error, and an
        interval without end above.

        Args:
            unit: of the values.
            lower: the least that a value can be.
            upper: the most that it can be.

        References:
            Woodruff (1952), "Confidence Intervals for Medians and Other Position Measures".
        """
        return tuple(self._estimate(level, unit, (lower, upper)) for level in self.levels)

    def top_share(self, share: float) -> float:
        """The part of the sum of all values that the largest ``share`` of them makes up.

        NaN where the sum is 0 or not finite.

        Args:
            share: 0.01 for the largest hundredth (rounded up to a whole value). 1 - share must be a level
                of the second pass.

        Raises:
            OptionError: if it is not.
        """
        level = next((level for level in self.levels if math.isclose(level, 1 - share)), None)
        if level is None:
            raise OptionError(
                f"the largest {share} begin at level {1 - share}, and the levels are {self.levels}"
            )
        whole = float(self.sums.sum())
        if whole == 0 or not math.isfinite(whole):
            return math.nan
        total = self.coarse.total
        half = self._half(_rank(level, total))
        index = int(np.searchsorted(self.halves, half))
        wanted = math.ceil(Fraction(repr(share)) * total) - int(self.by_cluster[:, 2 * index + 2 :].sum())
        inside = self.lower[index]
        from_top = np.cumsum(inside[::-1])[::-1]
        chosen = np.clip(wanted - (from_top - inside), 0, inside)
        used = np.flatnonzero(chosen)
        top = _values(half * HALF + used).astype(np.float64) @ chosen[used]
        return (float(self.sums[2 * index + 2 :].sum()) + float(top)) / whole

    def _estimate(self, level: float, unit: str, bounds: tuple[float, float]) -> Estimate:
        total, clusters = self.coarse.total, int((self.by_cluster.sum(1) > 0).sum())
        doubts = self._doubts(clusters)
        if total == 0:
            return Estimate(
                value=math.nan,
                unit=unit,
                standard_error=math.nan,
                clusters=clusters,
                ci95=(math.nan, math.nan),
                doubts=doubts,
            )
        rank = _rank(level, total)
        value = self._order_statistic(rank)[0]
        if level == 1:
            error, interval = math.nan, (value, math.inf)
        else:
            error, interval = self._woodruff(level, rank, clusters)
        return Estimate(
            value=value,
            unit=unit,
            standard_error=error,
            clusters=clusters,
            ci95=cut(interval, value, bounds),
            doubts=doubts,
        )

    def _woodruff(self, level: float, rank: int, clusters: int) -> tuple[float, tuple[float, float]]:
        """The standard error of the quantile and its interval, before it is cut."""
        share_error = self._share_error(rank, clusters)
        if math.isnan(share_error):
            return math.nan, (-math.inf, math.inf)
        reach = student_t_quantile(0.975, clusters - 1) * share_error
        odds = math.exp(min(reach / (level * (1 - level)), 700.0))
        least = min(level - reach, level / (level + (1 - level) * odds))
        most = max(level + reach, level * odds / (level * odds + 1 - level))
        total = self.coarse.total
        first, last = math.ceil(least * total), math.floor(most * total) + 1
        if reach == 0:
            first = last = rank
        low = self._order_statistic(first)[0] if first >= 1 else -math.inf
        high = self._order_statistic(last)[1] if last <= total else math.inf
        error = 0.0 if low == high else (high - low) / 2 / student_t_quantile(0.975, clusters - 1)
        return error, (low, high)

    def _share_error(self, rank: int, clusters: int) -> float:
        """Cluster-robust standard error of the share of values up to the one of this rank.

        Within the upper half that holds it, each cluster is taken to have as many of its values up to it
        as the whole.
        """
        if clusters < 2:
            return math.nan
        index = int(np.searchsorted(self.halves, self._half(rank)))
        below, inside = self.by_cluster[:, : 2 * index + 1].sum(1), self.by_cluster[:, 2 * index + 1]
        wanted = rank - int(below.sum())
        reached = np.cumsum(self.lower[index])
        share = float(reached[np.searchsorted(reached, wanted)]) / float(inside.sum())
        counts = self.by_cluster.sum(1).astype(np.float64)
        one = linearise([Part(1.0, below + share * inside, counts)])
        return standard_error(one)

    def _half(self, rank: int) -> int:
        """The upper half of the value of this rank, counted from 1."""
        return int(np.searchsorted(np.cumsum(self.coarse.counts), rank))

    def _order_statistic(self, rank: int) -> tuple[float, float]:
        """The value of this rank: itself where its half was refined, else the ends of that half."""
        half = self._half(rank)
        index = int(np.searchsorted(self.halves, half))
        if index < len(self.halves) and self.halves[index] == half:
            before = int(self.coarse.counts[:half].sum())
            exact = half * HALF + np.searchsorted(np.cumsum(self.lower[index]), rank - before)
            value = float(_values(np.array([exact]))[0])
            return value, value
        low, high = _values(np.array([half * HALF, half * HALF + HALF - 1])).tolist()
        return low, high

    def _doubts(self, clusters: int) -> tuple[str, ...]:
        found: list[str] = []
        if self.coarse.not_numbers:
            found.append(f"{self.coarse.not_numbers} values are not a number and were left out")
        return (*found, *few_clusters(clusters))


def _rank(level: float, total: int) -> int:
    """Which value, counted from 1, is the quantile; the level is taken as the decimal number it is written as."""
    return math.ceil(Fraction(repr(level)) * total)


def _keys(values: Float32[np.ndarray, "values"]) -> UInt32[np.ndarray, "values"]:
    """The bits of the numbers, turned so that they rise as the numbers do; both zeros are one."""
    bits = (values + np.float32(0)).view(np.uint32)
    return np.where(bits & SIGN, ~bits, bits | SIGN)


def _values(keys: Int64[np.ndarray, "keys"]) -> Float32[np.ndarray, "keys"]:
    """The numbers of these keys; beyond the infinities stand the infinities."""
    infinities = _keys(np.array([-np.inf, np.inf], np.float32))
    clipped = np.clip(keys, *infinities.astype(np.int64)).astype(np.uint32)
    return np.where(clipped & SIGN, clipped ^ SIGN, ~clipped).astype(np.uint32).view(np.float32)
