"""Differences of several means on the same clusters, of all pairs or from a control, with simultaneous intervals."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from string import ascii_lowercase, ascii_uppercase

import numpy as np
from jaxtyping import Float64, Real

from kleash.errors import ShapeError
from kleash.uncertainty.estimate import Estimate
from kleash.uncertainty.ratios import paired_difference
from kleash.uncertainty.student_t import student_t_quantile

DRAWS = 40_000
"""Draws of the multivariate t distribution; the quantile then varies by about 0.5 %."""
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


@dataclass(frozen=True, kw_only=True)
class SimultaneousDifferences(SimultaneousPairs):
    """The differences of all pairs of candidates, in the order (0, 1), (0, 2), ..., (1, 2), ...."""

    letters: tuple[str, ...]
    """For each candidate, the letters of its groups: two candidates are tied if they share a letter."""


def simultaneous_differences(
    sums: Real[np.ndarray, "clusters candidates"],
    counts: Real[np.ndarray, "clusters candidates"],
    *,
    unit: str = "nats",
    seed: int = 0,
) -> SimultaneousDifferences:
    """Compare all pairs of means per token with a simultaneous confidence of 95 %.

    With u_c the influence of cluster c on a mean, (s_c - r n_c) / sum n, the difference of candidates i and j has

        standard error^2 = C / (C - 1) sum_c (u_ci - u_cj)^2

    and the critical value c is the 95 % quantile of max |t_ij| of a multivariate t distribution with C - 1 degrees of
    freedom and the correlations of these differences (single-step max-t; Hothorn, Bretz and Westfall 2008). It lies
    between Student's t of one comparison and Bonferroni's. Each pair's interval, which is corrected for skewness, is
    widened by c / t. All intervals hold at once with 95 %, so that the probability of calling any tied pair different
    is at most 5 %.

    Args:
        sums: per cluster and candidate, the sum over its tokens.
        counts: likewise, the number of its tokens.
        unit: of the means.
        seed: of the draws that give the critical value.

    Raises:
        ShapeError: if the two differ in shape, or there is only one candidate.

    References:
        Hothorn, Bretz & Westfall (2008), "Simultaneous Inference in General Parametric Models".
        Piepho (2004), "An Algorithm for a Letter-Based Representation of All-Pairwise Comparisons".
    """
    sums, counts = _checked_columns(sums, counts)
    indices = list(combinations(range(sums.shape[1]), 2))
    pairs, critical_value = _differences(sums, counts, indices, unit=unit, seed=seed)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = sums.sum(axis=0) / counts.sum(axis=0)
    letters = compact_letters(
        means.tolist(), [(pair.first, pair.second) for pair in pairs if not pair.is_tie]
    )
    return SimultaneousDifferences(pairs=pairs, critical_value=critical_value, letters=letters)


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
        counts: likewise, the number of its tokens.
        unit: of the means.
        seed: of the draws that give the critical value.

    Raises:
        ShapeError: if the two differ in shape, or there is only one candidate.

    References:
        Dunnett (1955), "A Multiple Comparison Procedure for Comparing Several Treatments with a Control".
    """
    sums, counts = _checked_columns(sums, counts)
    indices = [(index, 0) for index in range(1, sums.shape[1])]
    pairs, critical_value = _differences(sums, counts, indices, unit=unit, seed=seed)
    return SimultaneousPairs(pairs=pairs, critical_value=critical_value)


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
    *,
    unit: str,
    seed: int,
) -> tuple[tuple[PairDifference, ...], float]:
    """The differences of these pairs of candidates, and the critical value of all of them together."""
    estimates = [
        paired_difference(sums[:, i], counts[:, i], sums[:, j], counts[:, j], unit=unit) for i, j in indices
    ]
    clusters = int((counts > 0).any(axis=1).sum())
    critical_value = _critical_value(sums, counts, indices, clusters, seed)
    widening = critical_value / student_t_quantile(0.975, clusters - 1) if clusters > 1 else math.nan
    pairs = tuple(
        PairDifference(first=i, second=j, estimate=estimate, simultaneous_ci95=_widened(estimate, widening))
        for (i, j), estimate in zip(indices, estimates, strict=True)
    )
    return pairs, critical_value


def _widened(estimate: Estimate, widening: float) -> tuple[float, float]:
    """The interval of an estimate with both distances from the value multiplied; an exact constant keeps its own."""
    if estimate.is_exact or not math.isfinite(estimate.value):
        return estimate.ci95 if estimate.is_exact else (math.nan, math.nan)
    if math.isnan(widening):
        return -math.inf, math.inf
    low, high = estimate.ci95
    return estimate.value - widening * (estimate.value - low), estimate.value + widening * (
        high - estimate.value
    )


def _critical_value(
    sums: Float64[np.ndarray, "clusters candidates"],
    counts: Float64[np.ndarray, "clusters candidates"],
    indices: Sequence[tuple[int, int]],
    clusters: int,
    seed: int,
) -> float:
    """The 95 % quantile of the largest |t| over the pairs; NaN if no pair has a standard error."""
    totals = counts.sum(axis=0)
    usable = np.isfinite(sums).all(axis=0) & (totals > 0)
    places = np.cumsum(usable) - 1
    usable_pairs = [(places[i], places[j]) for i, j in indices if usable[i] and usable[j]]
    if clusters < 2 or not usable_pairs:
        return math.nan
    first, second = (np.array(indices_of_pairs) for indices_of_pairs in zip(*usable_pairs, strict=True))
    sums, counts, totals = sums[:, usable], counts[:, usable], totals[usable]
    influences = (sums - sums.sum(axis=0) / totals * counts) / totals
    largest = np.abs(influences).max()
    if not largest > 0:
        return math.nan
    covariance = (influences / largest).T @ (influences / largest)
    variances = covariance[first, first] + covariance[second, second] - 2 * covariance[first, second]
    distinct = variances > 1e-12 * np.maximum(covariance[first, first], covariance[second, second])
    if not distinct.any():
        return math.nan
    first, second, deviations = first[distinct], second[distinct], np.sqrt(variances[distinct])
    generator = np.random.default_rng(seed)
    largest_t = np.empty(DRAWS)
    step = max(1, MAX_VALUES // len(first))
    for start in range(0, DRAWS, step):
        drawn = generator.multivariate_normal(
            np.zeros(len(covariance)),
            covariance,
            min(step, DRAWS - start),
            method="eigh",
            check_valid="ignore",
        )
        differences = np.abs(drawn[:, first] - drawn[:, second]) / deviations
        largest_t[start : start + step] = differences.max(axis=1)
    degrees_of_freedom = clusters - 1
    largest_t /= np.sqrt(generator.chisquare(degrees_of_freedom, DRAWS) / degrees_of_freedom)
    single = student_t_quantile(0.975, degrees_of_freedom)
    bonferroni = student_t_quantile(1 - 0.025 / len(first), degrees_of_freedom)
    return min(max(float(np.quantile(largest_t, 0.95)), single), bonferroni)


def compact_letters(means: Sequence[float], different: Iterable[tuple[int, int]]) -> tuple[str, ...]:
    """A compact letter display: two candidates share a letter exactly if they are not called different.

    Letters are given in the order of the smallest mean that has them, so that "a" belongs to the best candidates. A
    candidate may have several, since ties are not transitive.

    Args:
        means: of each candidate; NaN comes last.
        different: the pairs of indices that are called different.
    """
    groups = [frozenset(range(len(means)))]
    for i, j in different:
        split = [
            part
            for group in groups
            for part in ((group - {i}, group - {j}) if i in group and j in group else (group,))
        ]
        groups = _without_subsets(split)
    order = sorted(range(len(means)), key=lambda index: (math.isnan(means[index]), means[index], index))
    ranks = {index: rank for rank, index in enumerate(order)}
    groups.sort(key=lambda group: sorted(ranks[index] for index in group))
    letters = _letter_names(len(groups))
    return tuple(
        "".join(letter for letter, group in zip(letters, groups, strict=True) if index in group)
        for index in range(len(means))
    )


def _without_subsets(groups: Sequence[frozenset[int]]) -> list[frozenset[int]]:
    """The groups that are not contained in another one, each once."""
    maximal: list[frozenset[int]] = []
    for group in sorted(set(groups), key=lambda group: (-len(group), sorted(group))):
        if not any(group <= other for other in maximal):
            maximal.append(group)
    return maximal


def _letter_names(count: int) -> list[str]:
    """So many names of groups: a to z, A to Z, then (53), (54) and so on."""
    names = [*ascii_lowercase, *ascii_uppercase]
    return [*names[:count], *(f"({number})" for number in range(len(names) + 1, count + 1))]
