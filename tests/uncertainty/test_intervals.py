"""Intervals against scipy and simulated coverage at both ends; Student's t; constant samples; warnings."""

import math
import runpy
from collections.abc import Iterator
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prompt_sums import lognormal_prompts
from scipy import stats

from kleash.errors import OptionError
from kleash.uncertainty import (
    clustered_mean,
    controlled_total,
    paired_difference,
    quantiles,
    ratio_of_many,
    ratio_of_sums,
    running_mean,
    student_t_quantile,
)
from kleash.uncertainty.diagnostics import unseen_share


@pytest.fixture(scope="module")
def benchmark(root: Path) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(root / "benchmarks")
        yield import_module("intervals")


def distances_in_errors(sums: np.ndarray, counts: np.ndarray, **bounds: float) -> tuple[float, float]:
    """Standard errors from the estimate to both ends."""
    estimate = ratio_of_sums(sums, counts, **bounds)
    low, high = estimate.ci95
    return (estimate.value - low) / estimate.standard_error, (high - estimate.value) / estimate.standard_error


@pytest.mark.parametrize(("clusters", "seed"), [(6, 1), (16, 1), (40, 2), (300, 3), (5000, 4)])
def test_the_end_of_the_long_tail_is_students_t_times_an_exponential_of_the_skewness(clusters, seed):
    sums, _ = lognormal_prompts(clusters, seed, spread=0.7)
    means = sums / 16
    t = float(stats.t.ppf(0.975, clusters - 1))
    g = float(stats.skew(means)) / math.sqrt(clusters)
    weight = (1 + 2 * t * t) / (6 * t) + 18 * min(1, clusters / 30) / math.sqrt(clusters)
    long = t * min(math.exp(weight * abs(g)), 2.5)
    expected = (t, long) if g > 0 else (long, t)
    assert distances_in_errors(sums, np.full(clusters, 16)) == pytest.approx(expected, rel=1e-8)
    assert distances_in_errors(-sums, np.full(clusters, 16)) == pytest.approx(expected[::-1], rel=1e-8)


def test_the_end_away_from_a_bound_is_at_least_students_t_of_the_logarithm():
    values = np.array([0.1, 0.9, 1.0, 1.1, 1.9])
    t, error = float(stats.t.ppf(0.975, 4)), float(stats.sem(values))
    assert distances_in_errors(values, np.ones(5)) == pytest.approx((t, t))
    _, above = distances_in_errors(values, np.ones(5), lower=0.0)
    assert above == pytest.approx(math.expm1(t * error) / error)
    assert distances_in_errors(values, np.ones(5), lower=1.0) == pytest.approx((0.0, t)), "on its bound"
    estimate = ratio_of_sums(values, np.ones(5), lower=-1.0, upper=2.0)
    assert estimate.ci95[0] == pytest.approx(2 - math.exp(t * error)), "at the distance from the upper bound"
    assert estimate.ci95[1] == pytest.approx(1 + 2 * math.expm1(t * error / 2))


def test_no_end_is_farther_than_two_and_a_half_times_students_t():
    sums, counts = np.zeros(40), np.full(40, 10)
    sums[5] = 3.0
    t = float(stats.t.ppf(0.975, 39))
    assert distances_in_errors(sums, counts) == pytest.approx((t, 2.5 * t))


@pytest.mark.parametrize("clusters", [30, 300])
@pytest.mark.parametrize("name", ["normal", "lognormal 1"])
def test_each_end_has_its_nominal_error_rate(benchmark, name, clusters):
    """A gate on the upper end passes wrongly in at most 2.5 % of samples."""
    sample = benchmark.PROCESSES[name](np.random.default_rng([5, clusters]), (clusters, 3000))
    estimates = ratio_of_many(sample.sums, sample.counts, lower=sample.lower, upper=sample.upper)
    low, high = np.array([estimate.ci95 for estimate in estimates]).T
    assert (high < sample.truth).mean() < 0.029 + 1.6 * math.sqrt(0.029 / 3000)
    assert (low > sample.truth).mean() < 0.025 + 1.6 * math.sqrt(0.025 / 3000)


def test_intervals_of_five_normal_clusters_are_not_too_wide():
    random = np.random.default_rng(21)
    estimates = ratio_of_many(10 + random.standard_normal((5, 2000)), np.ones((5, 2000)))
    low, high = np.array([estimate.ci95 for estimate in estimates]).T
    assert 0.94 < ((low <= 10) & (high >= 10)).mean() < 0.985
    assert np.median(high - low) < 2 * (2 * 1.96 / math.sqrt(5)), "a known standard deviation is the unit"


@pytest.mark.parametrize("clusters", [5, 12, 30, 300])
@pytest.mark.parametrize(
    "name", ["97 % zeros", "agreement 0.98", "agreement by prompt", "lognormal 1.5", "longer drift more"]
)
def test_intervals_that_undercover_have_a_warning(benchmark, name, clusters):
    sample = benchmark.PROCESSES[name](np.random.default_rng([6, clusters]), (clusters, 500))
    estimates = ratio_of_many(sample.sums, sample.counts, lower=sample.lower, upper=sample.upper)
    silent = [
        not estimate.warnings and not estimate.ci95[0] <= sample.truth <= estimate.ci95[1]
        for estimate in estimates
    ]
    assert np.mean(silent) <= 0.1
    assert clusters >= 30 or not any(silent), "few clusters always have a warning"


@pytest.mark.parametrize("clusters", [3, 30, 64])
def test_intervals_cover_where_few_clusters_hold_most_of_the_tokens(clusters, monkeypatch, root):
    """On distributions on which no limit was chosen, below ten clusters of equal length (Kish 1965) and above."""
    monkeypatch.syspath_prepend(root / "benchmarks")
    distributions = runpy.run_path(str(root / "benchmarks" / "coverage.py"))["DISTRIBUTIONS"]["tested on"]
    random = np.random.default_rng([9, clusters])
    hits: dict[bool, list[bool]] = {True: [], False: []}
    for distribution in distributions:
        sums, counts, truth = distribution(random, (clusters, 500))
        are_few = counts.sum(0) ** 2 / (counts**2).sum(0) < 10
        for estimate, is_few in zip(ratio_of_many(sums, counts, lower=0.0), are_few.tolist(), strict=True):
            hits[is_few].append(estimate.ci95[0] <= truth <= estimate.ci95[1])
    assert np.mean(hits[True]) > 0.9 and len(hits[True]) > 50
    assert clusters < 10 or np.mean(hits[False]) > 0.93


@pytest.mark.parametrize("clusters", [2, 5, 40, 400])
@pytest.mark.parametrize("hit", [0, 1])
def test_a_constant_share_has_the_clopper_pearson_interval(clusters, hit):
    counts = np.full(clusters, 70)
    estimate = ratio_of_sums(hit * counts, counts, unit="probability", lower=0.0, upper=1.0)
    exact = stats.binomtest(hit * clusters, clusters).proportion_ci(0.95, method="exact")
    assert estimate.ci95 == pytest.approx((exact.low, exact.high), rel=1e-9)
    assert bool(estimate.warnings) == (clusters < 30)
    assert not estimate.is_exact and math.isinf(estimate.relative_error)
    scaled = ratio_of_sums(hit * counts * 3.0, counts, lower=0.0, upper=3.0)
    assert scaled.ci95 == pytest.approx([3 * end for end in estimate.ci95], rel=1e-9)


def test_the_interval_of_a_constant_uses_the_effective_number_of_clusters():
    """Four long prompts and forty of one token count as about four (Kish's effective number)."""
    counts = np.append(np.full(4, 1000), np.ones(40))
    effective = counts.sum() ** 2 / (counts**2).sum()
    low, high = ratio_of_sums(counts, counts, lower=0.0, upper=1.0).ci95
    assert high == 1 and low == pytest.approx(0.025 ** (1 / effective)) and low < 0.45


@pytest.mark.parametrize("clusters", [1, 5, 40])
@pytest.mark.parametrize("value", [0.0, 0.3])
def test_a_constant_without_bounds_has_an_infinite_interval_and_a_warning(clusters, value):
    counts = np.full(clusters, 10)
    free, above = ratio_of_sums(value * counts, counts), ratio_of_sums(value * counts, counts, lower=0.0)
    assert free.ci95 == (-math.inf, math.inf)
    least = value * 0.025 ** (1 / clusters) if clusters > 1 else 0.0
    assert above.ci95 == (pytest.approx(least), math.inf)
    for estimate in (free, above):
        assert estimate.value == pytest.approx(value) and estimate.warnings
        assert estimate.standard_error == pytest.approx(0.0 if clusters > 1 else math.nan, nan_ok=True)
        assert " ± " not in str(estimate) and "nan" not in str(estimate)
        assert not estimate.relative_error <= 0.5
    if clusters > 1:
        assert any("says nothing about the spread of other clusters" in warning for warning in above.warnings)


def test_a_constant_is_exact_only_if_it_is_the_known_value():
    zeros, counts = np.zeros(5), np.full(5, 10)
    labels = np.arange(5)
    means = running_mean(zeros, counts, known_value=0.0)
    for estimate in (
        ratio_of_sums(zeros, counts, lower=0.0, known_value=0.0),
        ratio_of_sums(zeros[:1], counts[:1], lower=0.0, known_value=0.0),
        paired_difference(zeros, counts, zeros, counts, known_value=0.0),
        controlled_total(zeros, zeros, labels, known_value=0.0).estimate,
    ):
        numbers = estimate.value, estimate.standard_error, estimate.ci95, estimate.warnings
        assert numbers == (0, 0, (0, 0), ())
        assert estimate.is_exact and estimate.relative_error == 0
        assert str(estimate).startswith("0 nats exactly, over ")
    assert (means.ci95 == 0).all() and np.isinf(running_mean(zeros, counts).ci95).all()
    assert ratio_of_sums(zeros + 1, counts, lower=0.0, known_value=0.0).warnings
    assert ratio_of_sums(np.eye(5)[0], counts, lower=0.0, known_value=0.0).standard_error > 0
    assert not ratio_of_sums(zeros[:1] + 1, counts[:1], lower=0.0, known_value=0.0).is_exact


def test_every_estimator_handles_a_constant_sample():
    zeros, counts, labels = np.zeros(7), np.full(7, 10), np.arange(7)
    sample = np.zeros(70, np.float32), np.repeat(labels, 10), (0.3, 0.5, 0.99, 1.0)
    estimates = [
        clustered_mean(zeros, labels, lower=0.0),
        paired_difference(zeros, counts, zeros, counts),
        controlled_total(zeros, zeros, labels).estimate,
        *quantiles(*sample, lower=0.0),
    ]
    for estimate in estimates:
        assert estimate.warnings[0] == "only 7 clusters; below 30 the error itself is uncertain"
    known = [estimate.ci95 == (0.0, 0.0) for estimate in estimates]
    # Seven equal clusters bound the 0.3 quantile and the median.
    assert known == [False, False, False, True, True, False, False]
    difference = paired_difference(counts, counts, counts, counts, unit="probability", lower=-1.0, upper=1.0)
    assert difference.ci95 == pytest.approx((-unseen_share(7, 0.975), unseen_share(7, 0.975)))


def test_two_clusters_are_few_and_not_equal():
    few = "only 2 clusters; below 30 the error itself is uncertain"
    sides = (np.array(pair) for pair in ((3.0, 1), (10, 20), (2.0, 9), (10, 20)))
    assert paired_difference(*sides).warnings == (few,)
    one_sided = ratio_of_sums(np.array([3.0, 1.0]), np.array([10, 20]), lower=0.0).warnings
    assert one_sided[0] == few and not any("same mean" in warning for warning in one_sided)
    assert f"as much as {100 * stats.beta.ppf(0.95, 1, 2):.0f} % of all" in one_sided[1]


def test_the_paired_difference_is_exact_only_for_identical_measurements():
    sums, counts = lognormal_prompts(10, seed=8)
    same = paired_difference(sums, counts, sums, counts)
    assert (same.value, same.standard_error, same.ci95, same.warnings) == (0.0, 0.0, (0.0, 0.0), ())
    assert same.is_exact and not paired_difference(sums, counts, sums[::-1], counts[::-1]).is_exact
    agreement = np.array([10.0, 10, 9, 10, 8])
    assert not paired_difference(agreement, np.full(5, 10), agreement, np.full(5, 10)).is_exact, "by chance"


@pytest.mark.parametrize(("tied", "others"), [(58, 6), (9, 9), (2, 2)])
def test_mostly_tied_clusters_have_a_warning(tied, others):
    sums, counts = np.full(tied + others, 70.0), np.full(tied + others, 10)
    sums[:others] = np.arange(others)
    (warning,) = (one for one in ratio_of_sums(sums, counts, lower=0.0).warnings if "rests on" in one)
    assert (
        f"{tied} of {len(sums)} clusters have the same mean: the estimate rests on the other {others},"
        in warning
    )
    assert not any("rests on" in one for one in ratio_of_sums(sums, counts, lower=0.0, upper=1.0).warnings)


WHOLE = [1, 2, 3, 4, 7, 15, 29, 63, 127, 199, 200, 201, 511, 4095, 1e5, 1e6]
PROBABILITIES = [1e-8, 1e-4, 0.025, 0.3, 0.5, 0.51, 0.95, 0.975, 1 - 1e-4, 1 - 1e-8]
FRACTIONS = [*product([0.001, 0.025, 0.995, 0.999], [1.0001, 1.02, 1.2, 1.5, 2.7, 63.2])]


@pytest.mark.parametrize(("probability", "nu"), [*product(PROBABILITIES, WHOLE), *FRACTIONS])
def test_quantiles_of_students_t_agree_with_scipy(probability, nu):
    expected = float(stats.t.ppf(probability, nu))
    rel = 1e-9 if 1e-4 <= probability <= 1 - 1e-4 else 1e-6
    assert student_t_quantile(probability, nu) == pytest.approx(expected, rel=rel)


def test_invalid_arguments_of_students_t_raise():
    for probability in (0.0, 1.0, -0.1, math.nan, 1e-9, 1 - 1e-15):
        with pytest.raises(OptionError, match=r"probability is .*; give one from 1e-08 to 1 - 1e-08"):
            student_t_quantile(probability, 7)
    for degrees_of_freedom in (0.0, 0.99, 1.5, math.inf, math.nan):
        with pytest.raises(OptionError, match=r"degrees_of_freedom is .*; give a whole number from 1 on"):
            student_t_quantile(0.9995, degrees_of_freedom)
