"""Means, spreads and their ratios over seeds have the intervals that scipy gives them."""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from scipy import special, stats

X, Y = np.random.default_rng(1).multivariate_normal([3.0, 2.5], [[0.5, 0.3], [0.3, 0.9]], size=12).T


@pytest.fixture(scope="module")
def statistics(root: Path) -> Iterator[ModuleType]:
    """The module of the benchmark."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(root / "benchmarks")
        yield import_module("spread_statistics")


def test_means_and_paired_differences_have_student_t_intervals(statistics):
    for found, oracle in (
        (statistics.mean_of(X), stats.ttest_1samp(X, 0.0)),
        (statistics.difference_of(X, Y), stats.ttest_rel(X, Y)),
    ):
        np.testing.assert_allclose(found["ci95"], oracle.confidence_interval(0.95), rtol=1e-9)
        assert found["n"] == 12
    assert statistics.difference_of(X, Y)["value"] == pytest.approx(X.mean() - Y.mean())


@pytest.mark.parametrize("n", [3, 12])
def test_standard_deviations_have_chi_squared_intervals(statistics, n):
    found = statistics.spread_of(X[:n])
    tails = stats.chi2.ppf([0.975, 0.025], n - 1)
    assert found["value"] == pytest.approx(stats.tstd(X[:n]))
    np.testing.assert_allclose(found["ci95"], stats.tstd(X[:n]) * np.sqrt((n - 1) / tails), rtol=1e-9)


def test_ratio_of_spreads_interval_matches_pitman_morgan(statistics):
    found = statistics.ratio_of_spreads(X, Y)
    assert found["value"] == pytest.approx(stats.tstd(X) / stats.tstd(Y))
    for end in found["ci95"]:
        assert stats.pearsonr(X - end * Y, X + end * Y).pvalue == pytest.approx(0.05, rel=1e-6)
    assert found["ci95"][0] < found["value"] < found["ci95"][1]
    reverse = statistics.ratio_of_spreads(Y, X)
    np.testing.assert_allclose(reverse["ci95"][::-1], 1 / np.array(found["ci95"]))


@pytest.mark.parametrize("x", [0.0, 1e-3, 2.0, 9.5, 60.0])
def test_incomplete_gamma_matches_scipy(statistics, x):
    assert statistics.gamma_below(9.5, x) == pytest.approx(special.gammainc(9.5, x), rel=1e-12)


def test_too_few_numbers_have_no_interval(statistics):
    assert statistics.mean_of([2.0]) == {"value": 2.0, "ci95": None, "n": 1}
    assert statistics.spread_of([2.0, 3.0])["value"] is None
    assert statistics.ratio_of_spreads([1.0, 2.0, 3.0], [2.0, 1.0, 4.0])["value"] is None


def test_path_is_read_at_first_crossing_of_smoothed_reward(statistics):
    rewards, kls = [0.0, 2.0, 4.0, 0.0, 9.0], [0.0, 1.0, 3.0, 5.0, 7.0]  # smoothed 1 3 2 4.5, and .5 2 4 6
    reached = statistics.reached
    assert reached(rewards, kls, 2.5, 2) == pytest.approx(0.5 + 0.75 * 1.5)
    assert reached(rewards, kls, 4.0, 2) == pytest.approx(4 + 0.8 * 2)
    assert reached(rewards, kls, 0.5, 2) == 0.5
    assert reached(rewards, kls, 4.6, 2) is None


def test_frontier_is_interpolated_linearly_in_root_kl(statistics):
    at = statistics.reward_at
    assert at([4.0, 1.0], [3.0, 1.0], 2.25) == pytest.approx(2.0)
    assert at([4.0, 1.0], [3.0, 1.0], 4.0) == pytest.approx(3.0)
    assert at([4.0, 1.0], [3.0, 1.0], 4.1) is None
    assert at([4.0, 1.0], [3.0, 1.0], 0.9) is None
