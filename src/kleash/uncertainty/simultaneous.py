"""Differences of several means on the same clusters, of all pairs or from a control, with simultaneous intervals."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from string import ascii_letters

import numpy as np
from jaxtyping import Bool, Float64, Real

from kleash.errors import ShapeError
from kleash.estimate import Estimate
from kleash.uncertainty.ratios import paired_difference
from kleash.uncertainty.student_t import student_t_quantile

DRAWS = 40_000
"""Draws of the multivariate t distribution; the quantile then varies by about 0.5 %."""
MIN_CLUSTERS_WITH_CORRELATIONS = 10
"""With fewer clusters, of equal length with the same information, the correlations of their differences from those of
all others are too large: of two clusters all are 1."""
SHARE_OF_OTHER_END = 1 / 3
"""Share of the logarithm by which the end on the side of the longer tail is farther out, for the other end. Chosen by
simulation: benchmarks/ties.py."""
MAX_VALUES = 4_000_000
"""Differences that are held at once."""


@dataclass(frozen=True, kw_only=True)
class PairDifference:
    """The mean of one candidate minus that of another, on the same clusters."""

    first: int
    second: int
    estimate: Estimate
    """The difference with its own 95 % interval."""
    simultaneous_ci95: tuple[float, float]
    """An interval such that, with 95 % confidence, those of all pairs hold at once. NaN if the difference is not
    finite."""

    @property
    def is_tie(self) -> bool:
        """Whether the simultaneous interval does not exclude 0, so that neither candidate can be called better."""
        low, high = self.simultaneous_ci95
        return not (low > 0 or high < 0)


@dataclass(frozen=True, kw_only=True)
class SimultaneousPairs:
    """Differences of several pairs of candidates."""

    pairs: tuple[PairDifference, ...]
    """Each ``first`` minus ``second``."""
    critical_value: float
    """The 95 % quantile of the largest |t| of these pairs; NaN if no difference has a standard error."""
    letters: tuple[str, ...] = ()
    """Of all pairs, for each candidate the letters of its groups: two candidates are tied if they share a letter."""


def simultaneous_differences(
    sums: Real[np.ndarray, "clusters candidates"],
    counts: Real[np.ndarray, "clusters candidates"],
    *,
    unit: str = "nats",
    known_values: Sequence[float | None] | None = None,
    seed: int = 0,
) -> SimultaneousPairs:
    """Compare all pairs of means per token, (0, 1), (0, 2), ..., (1, 2), ..., with a simultaneous confidence of 95 %.

    With u_c the influence of cluster c on a mean, (s_c - r n_c) / sum n, the difference of candidates i and j has

        standard error^2 = C / (C - 1) sum_c (u_ci - u_cj)^2

    and the critical value c is the 95 % quantile of max |t_ij| of a multivariate t distribution with the degrees of
    freedom of a mean (``ratio_of_sums``) and the correlations of these differences (single-step max-t; Hothorn, Bretz
    and Westfall 2008). It lies between Student's t of one comparison and Bonferroni's, which it is if there are fewer
    than 10 clusters, or worth fewer, from which no correlations can be told. Each pair's interval, which is corrected
    for skewness, is widened by c / t. Its shorter side is also lengthened, to (shorter^2 longer)^(1/3): the difference
    of two quantities with long tails has one on either side, and the skewness of a sample tells only which of them it
    has met. All intervals hold at once with 95 %, so that the probability of calling any tied pair different is at most
    5 %.

    Args:
        sums: per cluster and candidate, the sum over its tokens.
        counts: per cluster and candidate, the number of its tokens.
        unit: of the means.
        known_values: of each candidate, the mean that every cluster has by construction, such as 0 for the KL of the
            reference itself; None if there is none. The difference of two such candidates is exact.
        seed: of the draws that give the critical value.

    Raises:
        ShapeError: if the two differ in shape, or there is only one candidate.

    References:
        Hothorn, Bretz & Westfall (2008), "Simultaneous Inference in General Parametric Models".
        Piepho (2004), "An Algorithm for a Letter-Based Representation of All-Pairwise Comparisons".
    """
    sums, counts = _checked_columns(sums, counts)
    indices = list(combinations(range(sums.shape[1]), 2))
    known = known_values or [None] * sums.shape[1]
    differences = _differences(sums, counts, indices, known, unit=unit, seed=seed)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = sums.sum(axis=0) / counts.sum(axis=0)
    different = [(pair.first, pair.second) for pair in differences.pairs if not pair.is_tie]
    return replace(differences, letters=compact_letters(means.tolist(), different))


def differences_from_control(
    sums: Real[np.ndarray, "clusters candidates"],
    counts: Real[np.ndarray, "clusters candidates"],
    *,
    unit: str = "nats",
    seed: int = 0,
) -> SimultaneousPairs:
    """Compare each mean per token with that of candidate 0 with a simultaneous confidence of 95 %.

    As ``simultaneous_differences``, with the pairs (1, 0), (2, 0), ... alone, of which there are fewer, so that the
    intervals are narrower (Dunnett 1955).

    Args:
        sums: per cluster and candidate, the sum over its tokens.
        counts: per cluster and candidate, the number of its tokens.
        unit: of the means.
        seed: of the draws that give the critical value.

    Raises:
        ShapeError: if the two differ in shape, or there is only one candidate.

    References:
        Dunnett (1955), "A Multiple Comparison Procedure for Comparing Several Treatments with a Control".
    """
    sums, counts = _checked_columns(sums, counts)
    indices = [(index, 0) for index in range(1, sums.shape[1])]
    return _differences(sums, counts, indices, [None] * sums.shape[1], unit=unit, seed=seed)


def _checked_columns(
    sums: np.ndarray, counts: np.ndarray
) -> tuple[Float64[np.ndarray, "clusters candidates"], Float64[np.ndarray, "clusters candidates"]]:
    """The sums and counts in float64, of which there is one per cluster and candidate, of two candidates or more.

    Raises:
        ShapeError: if not.
    """
    if sums.ndim != 2 or sums.shape != counts.shape or sums.shape[1] < 2:
        raise ShapeError(
            f"sums are {sums.shape} and counts {counts.shape}; give one of each per cluster and candidate, of two "
            "candidates or more"
        )
    return np.asarray(sums, np.float64), np.asarray(counts, np.float64)


def _differences(
    sums: Float64[np.ndarray, "clusters candidates"],
    counts: Float64[np.ndarray, "clusters candidates"],
    indices: Sequence[tuple[int, int]],
    known_values: Sequence[float | None],
    *,
    unit: str,
    seed: int,
) -> SimultaneousPairs:
    """The differences of these pairs of candidates, and the critical value of all of them together."""
    estimates: list[Estimate] = []
    for i, j in indices:
        first, second = known_values[i], known_values[j]
        known = None if first is None or second is None else first - second
        columns = (sums[:, i], counts[:, i], sums[:, j], counts[:, j])
        estimates.append(paired_difference(*columns, unit=unit, known_value=known))
    active = (counts > 0).any(axis=1)
    varying = [pair for pair, estimate in zip(indices, estimates, strict=True) if estimate.standard_error > 0]
    critical_value, widening = _critical_value(sums[active], counts[active], varying, seed)
    pairs = tuple(
        PairDifference(first=i, second=j, estimate=estimate, simultaneous_ci95=_widened(estimate, widening))
        for (i, j), estimate in zip(indices, estimates, strict=True)
    )
    return SimultaneousPairs(pairs=pairs, critical_value=critical_value)


def _widened(estimate: Estimate, widening: float) -> tuple[float, float]:
    """The simultaneous interval of an estimate; an exact constant keeps its own.

    Args:
        estimate: with its own interval.
        widening: the critical value divided by Student's t; NaN if there is none.
    """
    if estimate.is_exact or not math.isfinite(estimate.value):
        return estimate.ci95 if estimate.is_exact else (math.nan, math.nan)
    if math.isnan(widening):
        return -math.inf, math.inf
    low, high = estimate.value - estimate.ci95[0], estimate.ci95[1] - estimate.value
    longer = max(low, high)
    below, above = (side ** (1 - SHARE_OF_OTHER_END) * longer**SHARE_OF_OTHER_END for side in (low, high))
    return estimate.value - widening * below, estimate.value + widening * above


def _critical_value(
    sums: Float64[np.ndarray, "clusters candidates"],
    counts: Float64[np.ndarray, "clusters candidates"],
    indices: Sequence[tuple[int, int]],
    seed: int,
) -> tuple[float, float]:
    """The 95 % quantile of the largest |t| over these pairs, and the same over that of one pair; NaN without a pair.

    With influences U = Q R, the differences of normal variables with covariance U^T U are those of z R, z standard
    normal: R keeps also a difference that is many digits smaller than what the two candidates share. The quantile of
    the draws is at least that of a single pair, and at most Bonferroni's.

    Args:
        sums: per cluster and candidate, the sum over its tokens; each cluster has a token.
        counts: per cluster and candidate, the number of its tokens.
        indices: the pairs of candidates, of finite sums, whose difference has a standard error above 0.
        seed: of the draws.
    """
    if not indices:
        return math.nan, math.nan
    used = sorted({index for pair in indices for index in pair})
    first, second = (
        np.searchsorted(used, indices_of_pairs) for indices_of_pairs in zip(*indices, strict=True)
    )
    sums, counts = sums[:, used], counts[:, used]
    totals = counts.sum(axis=0)
    degrees_of_freedom = max(1, math.floor((totals**2 / (counts**2).sum(axis=0)).min()) - 1)
    single = student_t_quantile(0.975, degrees_of_freedom)
    bonferroni = student_t_quantile(1 - 0.025 / len(first), degrees_of_freedom)
    if degrees_of_freedom < MIN_CLUSTERS_WITH_CORRELATIONS - 1:
        return bonferroni, bonferroni / single
    influences = (sums - sums.sum(axis=0) / totals * counts) / totals
    influences /= np.abs(influences).max()
    deviations = np.linalg.norm(influences[:, first] - influences[:, second], axis=0)
    factor = np.linalg.qr(influences, mode="r")
    generator = np.random.default_rng(seed)
    largest_t = np.empty(DRAWS)
    step = max(1, MAX_VALUES // len(first))
    for start in range(0, DRAWS, step):
        drawn = generator.standard_normal((min(step, DRAWS - start), len(factor))) @ factor
        differences = np.abs(drawn[:, first] - drawn[:, second]) / deviations
        largest_t[start : start + step] = differences.max(axis=1)
    largest_t /= np.sqrt(generator.chisquare(degrees_of_freedom, DRAWS) / degrees_of_freedom)
    critical_value = min(max(float(np.quantile(largest_t, 0.95)), single), bonferroni)
    return critical_value, critical_value / single


def compact_letters(means: Sequence[float], different: Iterable[tuple[int, int]]) -> tuple[str, ...]:
    """A compact letter display: two candidates share a letter exactly if they are not called different.

    Letters are given in the order of the smallest mean that has them, so that "a" belongs to the best candidates. A
    candidate may have several, since ties are not transitive; none can be left out.

    Args:
        means: of each candidate; NaN comes last.
        different: the pairs of indices that are called different.
    """
    order = sorted(range(len(means)), key=lambda index: (math.isnan(means[index]), means[index], index))
    ranks = {index: rank for rank, index in enumerate(order)}
    are_tied = np.ones((len(means), len(means)), dtype=bool)
    for i, j in different:
        are_tied[ranks[i], ranks[j]] = are_tied[ranks[j], ranks[i]] = False
    groups = sorted(_groups_of_ties(are_tied))
    beyond_z = (f"({number})" for number in range(len(ascii_letters) + 1, len(groups) + 1))
    letters = [*ascii_letters[: len(groups)], *beyond_z]
    return tuple(
        "".join(letter for letter, group in zip(letters, groups, strict=True) if ranks[index] in group)
        for index in range(len(means))
    )


def _groups_of_ties(are_tied: Bool[np.ndarray, "candidates candidates"]) -> list[list[int]]:
    """Few groups of candidates that are all tied with each other, such that each tied pair is in one of them.

    Each pair that is in no group yet, the farthest of a candidate first, is extended to a group that no candidate can
    be added to; groups of which all pairs are in others are then left out. The least number of groups cannot be found
    in reasonable time.

    Args:
        are_tied: whether two candidates are, in the order of the ranking; true on the diagonal.
    """
    groups: list[list[int]] = []
    memberships = np.zeros(are_tied.shape, dtype=np.int64)  # groups that each pair is in
    for first in range(len(are_tied)):
        for second in range(len(are_tied) - 1, first - 1, -1):
            if not are_tied[first, second] or memberships[first, second]:
                continue
            group = _largest_group(first, second, are_tied, memberships == 0)
            groups.append(group)
            memberships[np.ix_(group, group)] += 1
    for group in reversed(list(groups)):
        block = np.ix_(group, group)
        if (memberships[block] > 1).all():
            memberships[block] -= 1
            groups.remove(group)
    return groups


def _largest_group(
    first: int,
    second: int,
    are_tied: Bool[np.ndarray, "candidates candidates"],
    is_open: Bool[np.ndarray, "candidates candidates"],
) -> list[int]:
    """A group of tied candidates with these two, to which none can be added.

    The next member is the one with the most open pairs with those before.

    Args:
        first: a candidate.
        second: one that is tied with it, or the same.
        are_tied: as in ``_groups_of_ties``.
        is_open: whether a pair is in no other group.
    """
    group = [first, second]
    while True:
        common = np.all(are_tied[group], axis=0)
        common[group] = False
        if not common.any():
            return sorted(set(group))
        gains = is_open[group].sum(axis=0)
        group.append(int(np.argmax(np.where(common, gains, -1))))
