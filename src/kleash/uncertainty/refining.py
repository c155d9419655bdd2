"""Exact quantiles of any number of float32 values in flat memory: the second of two passes over the data."""

import math
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
from jaxtyping import Float32, Float64, Int64, Integer

from kleash.errors import OptionError, ShapeError
from kleash.uncertainty.bits import HALF, keys_of, values_of
from kleash.uncertainty.diagnostics import few_clusters, unseen_share
from kleash.uncertainty.estimate import Estimate
from kleash.uncertainty.intervals import cut, standard_error
from kleash.uncertainty.linearised import Part, linearise
from kleash.uncertainty.student import student_t_quantile


@dataclass(frozen=True, kw_only=True, eq=False)
class FineCounts:
    """Second pass: the lower 16 bits near the quantiles, and on which side of them each cluster's values lie.

    512 KiB per quantile, and 16 bytes per quantile and cluster. ``CoarseCounts.refine`` makes the first.
    """

    coarse: Int64[np.ndarray, "65536"]
    """How many values have which upper half, from the first pass."""
    not_numbers: int
    """How many values were NaN there."""
    levels: tuple[float, ...]
    """Of the quantiles: above 0, up to 1."""
    halves: Int64[np.ndarray, "halves"]
    """The upper halves in which a quantile lies, rising."""
    inside: Int64[np.ndarray, "halves 65536"]
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
            ShapeError: if there are not as many cluster numbers as values, or one is too large.
        """
        if values.ndim != 1 or values.shape != clusters.shape:
            raise ShapeError(
                f"values are {values.shape} and clusters {clusters.shape}; give one for each value"
            )
        rows, parts = self.by_cluster.shape
        if clusters.max(initial=0) >= max(rows, 1):
            raise ShapeError(f"a value is of cluster {clusters.max()}, and there are {rows}, numbered from 0")
        numbers = ~np.isnan(values)
        values, clusters = values[numbers], clusters[numbers]
        keys = keys_of(values)
        upper = keys >> 16
        at = np.searchsorted(self.halves, upper)
        within = np.searchsorted(self.halves, upper, side="right") > at
        part = 2 * at + within
        counted = np.bincount(clusters.astype(np.int64) * parts + part, minlength=rows * parts)
        found = np.bincount(at[within] * HALF + (keys[within] & (HALF - 1)), minlength=self.inside.size)
        return replace(
            self,
            inside=self.inside + np.reshape(found, self.inside.shape),
            by_cluster=self.by_cluster + np.reshape(counted, (rows, parts)),
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
        """The quantile at each level: the smallest value that so large a share of the values does not exceed.

        The interval is Woodruff's: the interval of the share of values up to the quantile, by Student's t on
        the plain and on the logit scale, whichever reaches further, its error robust within clusters and not
        below that of independent values, turned back into values. Its ends are rounded outwards to
        8 significant bits (0.8 %), and infinite (or ``lower``, ``upper``) where there are too few values to
        bound them. The standard error is half of the interval over Student's quantile. Where all values are
        the same, the interval has an end on either side only if so many clusters would have met, with 97.5 %, one of
        a kind large enough to move the quantile there. A maximum has no error, and its interval no end above.

        Args:
            unit: of the values.
            lower: the least that a value can be.
            upper: the most that it can be.
            known_value: what every value is by construction: 0 for the KL of a model against itself.

        References:
            Woodruff (1952), "Confidence Intervals for Medians and Other Position Measures".
        """
        if known_value is not None and self._is_constant(known_value):
            return tuple(self._exact(known_value, unit) for _ in self.levels)
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
        whole, total = float(self.sums.sum()), int(self.coarse.sum())
        if whole == 0 or not math.isfinite(whole):
            return math.nan
        index, half = self._place(rank_at(level, total))
        wanted = rank_at(share, total) - int(self.by_cluster[:, 2 * index + 2 :].sum())
        inside = self.inside[index]
        from_top = np.cumsum(inside[::-1])[::-1]
        chosen = np.minimum(np.maximum(wanted - (from_top - inside), 0), inside)
        used = np.flatnonzero(chosen)
        top = values_of(half * HALF + used).astype(np.float64) @ chosen[used]
        return (float(self.sums[2 * index + 2 :].sum()) + float(top)) / whole

    def _estimate(self, level: float, unit: str, bounds: tuple[float, float]) -> Estimate:
        total, clusters = int(self.coarse.sum()), int((self.by_cluster.sum(1) > 0).sum())
        value = error = math.nan
        interval = math.nan, math.nan
        if total:
            value = self._order_statistic(rank_at(level, total))[0]
            error, interval = self._woodruff(level, clusters) if level < 1 else (error, (value, math.inf))
        left_out = f"{self.not_numbers} values are not a number and were left out"
        return Estimate(
            value=value,
            unit=unit,
            standard_error=error,
            clusters=clusters,
            ci95=cut(interval, value, bounds),
            warnings=(*([left_out] if self.not_numbers else []), *few_clusters(clusters)),
        )

    def _woodruff(self, level: float, clusters: int) -> tuple[float, tuple[float, float]]:
        """The standard error of the quantile and its interval, before it is cut."""
        if clusters < 2:
            return math.nan, (-math.inf, math.inf)
        total = int(self.coarse.sum())
        rank = rank_at(level, total)
        quantile = student_t_quantile(0.975, clusters - 1)
        if self._order_statistic(1) == self._order_statistic(total) == self._order_statistic(rank):
            low, high = self._constant_interval(self._order_statistic(rank)[0], level)
            return 0.0 if low == high else math.inf, (low, high)
        independent = math.sqrt(level * (1 - level) / total)
        reach = quantile * max(self._share_error(rank), independent)
        odds = math.exp(min(reach / (level * (1 - level)), 700.0))
        least = min(level - reach, level / (level + (1 - level) * odds))
        most = max(level + reach, level * odds / (level * odds + 1 - level))
        first, last = math.ceil(least * total), math.floor(most * total) + 1
        low = self._order_statistic(first)[0] if first >= 1 else -math.inf
        high = self._order_statistic(last)[1] if last <= total else math.inf
        return 0.0 if low == high else (high - low) / 2 / quantile, (low, high)

    def _is_constant(self, value: float) -> bool:
        """Whether there are values, and all of them are this one."""
        total = int(self.coarse.sum())
        ends = {end for rank in (1, total) for end in self._order_statistic(rank)} if total else set[float]()
        return ends == {value}

    def _exact(self, value: float, unit: str) -> Estimate:
        clusters = int((self.by_cluster.sum(1) > 0).sum())
        return Estimate(value=value, unit=unit, standard_error=0.0, clusters=clusters, ci95=(value, value))

    def _constant_interval(self, value: float, level: float) -> tuple[float, float]:
        """The interval of a quantile where all values are the same, though they need not be.

        A share of all clusters that none of these shows may hold other values; it moves the quantile upwards if it is
        more than 1 - level, and downwards if it is level or more.
        """
        sizes = self.by_cluster.sum(1).astype(np.float64)
        unseen = unseen_share(float(sizes.sum() ** 2 / (sizes @ sizes)), 0.975)
        return (value if level > unseen else -math.inf), (value if level <= 1 - unseen else math.inf)

    def _share_error(self, rank: int) -> float:
        """Cluster-robust standard error of the share of values up to the one of this rank.

        Within the upper half that holds it, each cluster is taken to have as many of its values up to it
        as the whole.
        """
        index, _ = self._place(rank)
        below, within = self.by_cluster[:, : 2 * index + 1].sum(1), self.by_cluster[:, 2 * index + 1]
        reached = np.cumsum(self.inside[index])
        up_to = reached[np.searchsorted(reached, rank - int(below.sum()))]
        sums = below + float(up_to) / float(within.sum()) * within
        return standard_error(linearise([Part(1.0, sums, self.by_cluster.sum(1).astype(np.float64))]))

    def _order_statistic(self, rank: int) -> tuple[float, float]:
        """The value of this rank: itself where its upper half was refined, else the ends of that half."""
        index, half = self._place(rank)
        if index < len(self.halves) and self.halves[index] == half:
            before = int(self.coarse[:half].sum())
            exact = half * HALF + int(np.searchsorted(np.cumsum(self.inside[index]), rank - before))
            value = float(values_of(np.array([exact]))[0])
            return value, value
        low, high = values_of(np.array([half * HALF, half * HALF + HALF - 1]))
        return float(low), float(high)

    def _place(self, rank: int) -> tuple[int, int]:
        """Which refined half, and which upper half, the value of this rank (counted from 1) lies in."""
        half = int(np.searchsorted(np.cumsum(self.coarse), rank))
        return int(np.searchsorted(self.halves, half)), half


def rank_at(level: float, total: int) -> int:
    """Which of ``total`` values, counted from 1, is the quantile at this level, a decimal as it is written."""
    return math.ceil(Fraction(repr(float(level))) * total)
