"""Simultaneous differences: the critical value of max-t, its limits, false rankings, and letters."""

import math
import re
from dataclasses import replace
from itertools import combinations, permutations

import numpy as np
import pytest
from scipy import integrate, optimize, stats

from kleash.errors import ShapeError
from kleash.uncertainty.ratios import paired_difference
from kleash.uncertainty.simultaneous import (
    compact_letters,
    differences_from_control,
    simultaneous_differences,
)

CLUSTERS, CANDIDATES = 41, 5
VALUES = np.random.default_rng(0).standard_normal((CLUSTERS, CANDIDATES))
WHITENED = np.linalg.qr(VALUES - VALUES.mean(axis=0))[0]


def means_of_clusters(seed: int, clusters: int, shifts: list[float], noise: float = 0.1) -> np.ndarray:
    """[cluster, candidate]: an effect that all candidates share, noise of their own, and a shift."""
    generator = np.random.default_rng(seed)
    shared = generator.normal(1.0, 0.3, (clusters, 1))
    return shared + noise * generator.standard_normal((clusters, len(shifts))) + np.array(shifts)


def test_two_candidates_have_the_interval_of_one_paired_difference_with_a_longer_shorter_side():
    values = means_of_clusters(0, 40, [0.0, 0.05])
    counts = np.full(values.shape, 7.0)
    result = simultaneous_differences(values * 7, counts, unit="bits")
    columns = values[:, 0] * 7, counts[:, 0], values[:, 1] * 7, counts[:, 1]
    alone = paired_difference(*columns, unit="bits")
    assert result.pairs[0].estimate == alone
    assert result.critical_value == pytest.approx(stats.t.ppf(0.975, 39), rel=1e-12)
    low, high = result.pairs[0].simultaneous_ci95
    sides = sorted((alone.value - low, high - alone.value))
    shorter, longer = sorted((alone.value - alone.ci95[0], alone.ci95[1] - alone.value))
    assert shorter < 0.99 * longer
    assert sides == pytest.approx([shorter ** (2 / 3) * longer ** (1 / 3), longer], rel=1e-12)


def test_the_critical_value_of_equal_correlations_is_the_studentised_range():
    """Independent candidates of equal variance: max |t_ij| is the studentised range divided by sqrt(2)."""
    result = simultaneous_differences(WHITENED, np.ones_like(WHITENED))
    expected = stats.studentized_range.ppf(0.95, CANDIDATES, CLUSTERS - 1) / math.sqrt(2)
    assert result.critical_value == pytest.approx(expected, rel=0.012)


def dunnett_quantile(others: int, degrees_of_freedom: int) -> float:
    """The two-sided 95 % quantile of Dunnett's statistic for equal variances, by quadrature over control and scale."""
    z = np.linspace(-8, 8, 801)
    s = np.linspace(1e-3, 3, 601)
    density_z = stats.norm.pdf(z)[:, None]
    density_s = 2 * degrees_of_freedom * s * stats.chi2.pdf(degrees_of_freedom * s**2, degrees_of_freedom)

    def excess(c: float) -> float:
        within = stats.norm.cdf(z[:, None] + math.sqrt(2) * c * s) - stats.norm.cdf(
            z[:, None] - math.sqrt(2) * c * s
        )
        integrand = within**others * density_z * density_s
        return float(integrate.trapezoid(integrate.trapezoid(integrand, s, axis=1), z)) - 0.95

    return optimize.brentq(excess, 1.5, 5.0)


def test_the_critical_value_of_differences_from_a_control_is_that_of_dunnett():
    result = differences_from_control(WHITENED, np.ones_like(WHITENED))
    expected = dunnett_quantile(CANDIDATES - 1, CLUSTERS - 1)
    assert result.critical_value == pytest.approx(expected, rel=0.012)
    assert [(pair.first, pair.second) for pair in result.pairs] == [(1, 0), (2, 0), (3, 0), (4, 0)]
    all_pairs = simultaneous_differences(WHITENED, np.ones_like(WHITENED))
    assert result.critical_value < all_pairs.critical_value
    low, high = all_pairs.pairs[1].estimate.ci95
    assert result.pairs[1].estimate.ci95 == pytest.approx((-high, -low), rel=1e-9)


def test_a_candidate_that_copies_another_does_not_raise_the_critical_value():
    values = means_of_clusters(1, 60, [0.0, 0.1])
    repeated = np.repeat(values, 3, axis=1)
    result = simultaneous_differences(repeated, np.ones_like(repeated))
    assert result.critical_value == pytest.approx(stats.t.ppf(0.975, 59), rel=0.01)
    ties = {(pair.first, pair.second) for pair in result.pairs if pair.is_tie}
    assert ties == {(0, 1), (0, 2), (1, 2), (3, 4), (3, 5), (4, 5)}
    assert result.pairs[0].simultaneous_ci95 == (0.0, 0.0)


@pytest.mark.parametrize("noise", [1e-3, 1e-8])
def test_differences_far_smaller_than_what_candidates_share_are_compared(noise):
    values = means_of_clusters(4, 60, [0.0, 0.0, 0.0, 8 * noise], noise)
    result = simultaneous_differences(values, np.ones_like(values))
    expected = simultaneous_differences((values - values[:, :1]) / noise, np.ones_like(values))
    assert result.letters == ("a", "a", "a", "b")
    assert result.critical_value == pytest.approx(expected.critical_value, rel=0.012)


def test_a_candidate_of_another_size_leaves_the_critical_value_of_the_others():
    """Beside a candidate with 10^12 times their noise, the others keep the correlations of their differences."""
    values = means_of_clusters(5, 60, [0.0, 0.0, 0.0, 0.0])
    values[:, 1:3] = values[:, :1] + 1e-3 * (values[:, 1:3] - 1)
    far = np.column_stack([values, 1e12 * np.random.default_rng(1).standard_normal(60)])
    near = simultaneous_differences(values, np.ones_like(values)).critical_value
    draws = np.random.default_rng(2).standard_normal((20_000, 60))
    pairs = list(combinations(range(5), 2))
    differences = np.stack([far[:, i] - far[:, j] for i, j in pairs], axis=1)
    differences -= differences.mean(axis=0)
    t = draws @ (differences / np.linalg.norm(differences, axis=0))
    t /= np.sqrt(np.random.default_rng(3).chisquare(59, (20_000, 1)) / 59)
    expected = np.quantile(np.abs(t).max(axis=1), 0.95)
    result = simultaneous_differences(far, np.ones_like(far)).critical_value
    assert near < result == pytest.approx(expected, rel=0.015)


@pytest.mark.parametrize("clusters", [30, 300])
def test_tied_candidates_are_seldom_ranked_and_different_ones_are(clusters):
    false_rankings = missed = 0
    for seed in range(200):
        values = means_of_clusters(seed, clusters, [0.0, 0.0, 0.0, 0.3])
        result = simultaneous_differences(values, np.ones_like(values), seed=seed)
        called = {(pair.first, pair.second) for pair in result.pairs if not pair.is_tie}
        false_rankings += bool(called & set(combinations(range(3), 2)))
        missed += not called >= {(0, 3), (1, 3), (2, 3)}
    assert false_rankings <= 18  # 5 % of 200 are 10, with a standard deviation of 3
    assert missed == 0


@pytest.mark.parametrize(("clusters", "length_spread"), [(4, 0.0), (12, 1.0)])
def test_few_clusters_seldom_tell_many_tied_candidates_from_a_control(clusters, length_spread):
    false_differences = 0
    for seed in range(150):
        values = means_of_clusters(seed, clusters, [0.0] * 28)
        tokens = np.ceil(100 * np.random.default_rng(seed).lognormal(0.0, length_spread, (clusters, 1)))
        result = differences_from_control(values * tokens, np.repeat(tokens, 28, axis=1), seed=seed)
        false_differences += not all(pair.is_tie for pair in result.pairs)
    assert false_differences <= 15  # 5 % of 150 are 7.5, with a standard deviation of 2.7


def test_ties_of_candidates_with_unequal_tails_are_seldom_ranked(monkeypatch):
    """Of a sample without the long tail that some of them have, nothing says that it is missing."""
    monkeypatch.setattr("kleash.uncertainty.simultaneous.DRAWS", 4_000)
    false_rankings = 0
    for seed in range(150):
        generator = np.random.default_rng([7, seed])
        tokens = generator.integers(1, 1000, (64, 1)) * np.ones((1, 6))
        tails = [generator.lognormal(-0.5, 1.0, (64, 3)), generator.gamma(4.0, 0.25, (64, 3))]
        values = generator.lognormal(0.0, 1.0, (64, 1)) * np.concatenate(tails, axis=1)
        result = simultaneous_differences(values * tokens, tokens, seed=seed)
        false_rankings += not all(pair.is_tie for pair in result.pairs)
    assert false_rankings <= 9  # 6 %; without a lengthened side, 12 %


def test_the_difference_of_two_known_means_is_exact():
    """As of two copies of the reference, whose KL is 0 by construction."""
    values = np.column_stack([means_of_clusters(6, 50, [0.0]), np.zeros((50, 2))])
    result = simultaneous_differences(values, np.ones_like(values), known_values=[None, 0.0, 0.0])
    assert result.pairs[2].simultaneous_ci95 == (0.0, 0.0) and not result.pairs[2].estimate.warnings
    assert result.letters == ("b", "a", "a")
    alone = simultaneous_differences(values[:, 1:], np.ones((50, 2)), known_values=[0.0, 0.0])
    assert alone.pairs[0] == replace(result.pairs[2], first=0, second=1)
    unknown = simultaneous_differences(values, np.ones_like(values))
    assert unknown.pairs[2].simultaneous_ci95 == (-math.inf, math.inf)


def test_differences_without_an_error_rank_nothing():
    constant = np.broadcast_to(np.array([1.0, 2.0, 2.0]), (50, 3)).copy()
    result = simultaneous_differences(constant, np.ones_like(constant))
    assert all(pair.is_tie for pair in result.pairs)
    assert result.letters == ("a", "a", "a")
    alone = simultaneous_differences(constant[:1], np.ones((1, 3)))
    assert all(pair.is_tie for pair in alone.pairs) and math.isnan(alone.critical_value)


def test_an_infinite_mean_leaves_the_other_pairs_as_they_are():
    values = means_of_clusters(2, 50, [0.0, 0.5, 0.0])
    values[3, 2] = math.inf
    result = simultaneous_differences(values, np.ones_like(values))
    assert not result.pairs[0].is_tie
    assert result.pairs[1].is_tie and result.pairs[2].is_tie
    assert math.isnan(result.pairs[1].simultaneous_ci95[0])


def test_few_clusters_have_the_interval_of_bonferroni():
    values = means_of_clusters(3, 5, [0.0, 0.1, 0.2])
    result = simultaneous_differences(values, np.ones_like(values))
    one, all_three = stats.t.ppf([0.975, 1 - 0.025 / 3], 4)
    assert result.critical_value == pytest.approx(all_three, rel=1e-9)
    for pair in result.pairs:
        alone, together = (
            np.abs(np.subtract(x, pair.estimate.value)).max()
            for x in (pair.estimate.ci95, pair.simultaneous_ci95)
        )
        assert together == pytest.approx(alone * all_three / one, rel=1e-9)


def test_letters_are_shared_exactly_by_ties():
    generator = np.random.default_rng(3)
    for candidates in (1, 2, 5, 9):
        for _ in range(40):
            pairs = list(combinations(range(candidates), 2))
            different = {pair for pair in pairs if generator.random() < 0.5}
            letters = compact_letters(generator.random(candidates).tolist(), different)
            for i, j in pairs:
                assert bool(set(letters[i]) & set(letters[j])) == ((i, j) not in different)
            assert all(letters)
            groups = [
                {index for index, text in enumerate(letters) if letter in text}
                for letter in sorted(set("".join(letters)))
            ]
            assert not any(a <= b for a, b in permutations(groups, 2))
            for group in groups:  # none can be left out
                others = [other for other in groups if other is not group]
                assert any(not any({i, j} <= other for other in others) for i in group for j in group)


def test_ties_without_an_order_have_few_letters():
    """120 candidates of which each is different from one other have 2^60 largest groups."""
    pairs = list(combinations(range(120), 2))
    different = {(i, i + 1) for i in range(0, 120, 2)}
    letters = compact_letters(list(map(float, range(120))), different)
    groups = [set(re.findall(r"[a-zA-Z]|\(\d+\)", text)) for text in letters]
    assert all(bool(groups[i] & groups[j]) == ((i, j) not in different) for i, j in pairs)
    assert len(set.union(*groups)) < 120


def test_letters_go_with_the_means_and_need_not_be_transitive():
    assert compact_letters([3.0, 1.0, 2.0], [(0, 1)]) == ("b", "a", "ab")
    assert compact_letters([math.nan, 1.0], [(0, 1)]) == ("b", "a")


@pytest.mark.parametrize("shape", [(5,), (5, 1)])
def test_one_candidate_is_refused(shape):
    with pytest.raises(ShapeError, match="two candidates or more"):
        simultaneous_differences(np.ones(shape), np.ones(shape))
