"""Quantiles against their definition, and their intervals against a direct computation of Woodruff's."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats

from kleash.errors import OptionError, ShapeError
from kleash.uncertainty import quantiles, top_share

LEVELS = (0.0001, 0.5, 0.75, 0.9, 0.99, 0.999, 1.0)


def by_sorting(values: np.ndarray, level: float) -> float:
    """The smallest value that a share ``level`` of the values does not exceed."""
    ordered = np.sort(values[~np.isnan(values)])
    shares = np.arange(1, len(ordered) + 1) / len(ordered)
    return float(ordered[np.flatnonzero(shares >= level - 1e-12)[0]])


@settings(max_examples=60)
@given(
    hnp.arrays(
        np.float32, st.integers(1, 300), elements=st.floats(width=32) | st.sampled_from([0.0, -0.0, 1.0])
    )
)
def test_quantiles_agree_with_the_definition_bit_for_bit(values):
    if np.isnan(values).all():
        values = np.append(values, np.float32(1.0))
    estimates = quantiles(values, np.arange(len(values)) % 7, LEVELS)
    for level, estimate in zip(LEVELS, estimates, strict=True):
        assert estimate.value == by_sorting(values, level)
        assert estimate.ci95[0] <= estimate.value <= estimate.ci95[1]


def test_a_level_is_read_as_a_decimal():
    """0.07 * 100 is 7.000000000000001 in floating point; the quantile is the seventh value."""
    values = np.arange(1.0, 101.0).tolist()
    assert quantiles(values, range(100), (0.07,))[0].value == 7.0


def test_negative_and_positive_zero_are_one_value():
    estimate = quantiles(np.array([0.0, -0.0, -0.0, 0.0], np.float32), np.arange(4), (0.5,))[0]
    assert math.copysign(1.0, estimate.value) == 1.0
    assert not any(math.copysign(1.0, end) < 0 for end in estimate.ci95 if end == 0)


@pytest.mark.parametrize(("level", "bad", "end"), [(0.9, math.inf, 1), (0.1, -math.inf, 0)])
def test_an_interval_that_reaches_infinite_values_is_infinite(level, bad, end):
    values = np.random.default_rng(6).random(400).astype(np.float32)
    values[::20] = bad
    estimate = quantiles(values, np.arange(400) % 40, (level,))[0]
    assert math.isfinite(estimate.value)
    assert estimate.ci95[end] == bad
    assert math.isfinite(estimate.ci95[1 - end])


def test_nan_values_are_left_out_with_a_warning():
    values = np.array([math.nan, 5.0, math.nan, 1.0, 3.0], np.float32)
    estimate = quantiles(values, np.arange(5), (0.5,))[0]
    assert estimate.value == 3.0
    assert estimate.warnings[0] == "2 values are not a number and were left out"
    assert estimate.clusters == 3


def test_quantiles_and_top_share_of_no_values_are_nan():
    for values in (np.zeros(0, np.float32), np.array([math.nan], np.float32)):
        estimate = quantiles(values, np.zeros(len(values), int), (0.5,))[0]
        assert math.isnan(estimate.value) and math.isnan(estimate.standard_error) and estimate.clusters == 0
    for values in (np.zeros(0, np.float32), np.zeros(9, np.float32), np.array([1, math.inf], np.float32)):
        assert math.isnan(top_share(values, 0.01))


def woodruff(values: np.ndarray, clusters: np.ndarray, level: float) -> tuple[float, float]:
    """The interval by sorting, with the exact share of each cluster up to the quantile."""
    ordered = np.sort(values)
    count, size = len(ordered), int(clusters.max()) + 1
    below = np.bincount(clusters, weights=values <= by_sorting(values, level), minlength=size)
    totals = np.bincount(clusters, minlength=size)
    residuals = below - below.sum() / count * totals
    error = math.sqrt(size / (size - 1) * (residuals**2).sum()) / count
    t = float(stats.t.ppf(0.975, count**2 / (totals**2).sum() - 1))
    margin = t * max(error, math.sqrt(level * (1 - level) / count))
    logit = math.log(level / (1 - level))
    steps = margin / (level * (1 - level))
    lowest_share = min(level - margin, 1 / (1 + math.exp(-(logit - steps))))
    highest_share = max(level + margin, 1 / (1 + math.exp(-(logit + steps))))
    first, last = math.ceil(lowest_share * count), math.floor(highest_share * count) + 1
    return (
        float(ordered[first - 1]) if first >= 1 else -math.inf,
        float(ordered[last - 1]) if last <= count else math.inf,
    )


@pytest.mark.parametrize("level", [0.1, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_intervals_agree_with_woodruffs(level, seed):
    random = np.random.default_rng(seed)
    clusters = np.repeat(np.arange(60), random.integers(20, 200, 60))
    effects = random.standard_normal(60)
    values = np.exp(effects[clusters] + 0.5 * random.standard_normal(len(clusters))).astype(np.float32)
    estimate = quantiles(values, clusters, (level,))[0]
    low, high = woodruff(values, clusters, level)
    assert estimate.ci95 == (low, high)
    t = float(stats.t.ppf(0.975, len(values) ** 2 / (np.bincount(clusters) ** 2).sum() - 1))
    if math.isfinite(high):
        assert estimate.standard_error == pytest.approx((estimate.ci95[1] - estimate.ci95[0]) / 2 / t)
    few = values[:50], np.arange(50)
    assert quantiles(*few, (level,))[0].ci95 == woodruff(*few, level)
    independent = quantiles(values, np.arange(len(values)), (level,))[0]
    assert np.ptp(independent.ci95) < 0.6 * np.ptp(estimate.ci95) or level == 0.99


def test_too_few_values_give_an_infinite_or_clipped_end_and_a_maximum_none():
    values = np.random.default_rng(4).random(400).astype(np.float32)
    clusters = np.arange(400) % 40
    assert quantiles(values, clusters, (0.999,))[0].ci95[1] == math.inf
    clipped = quantiles(values, clusters, (0.999, 0.001), lower=0.0, upper=1.0)
    assert (clipped[0].ci95[1], clipped[1].ci95[0]) == (1.0, 0.0)
    assert math.isinf(clipped[0].standard_error)
    largest = quantiles(np.arange(100, dtype=np.float32), np.arange(100), (1.0,))[0]
    assert (largest.value, largest.ci95) == (99.0, (99.0, math.inf)) and math.isnan(largest.standard_error)


def test_a_quantile_of_identical_clusters_is_not_exact():
    """Each cluster has the same ten values, so the share up to any value is the same in all clusters."""
    values = np.tile(np.arange(10, dtype=np.float32), 40)
    low, high = quantiles(values, np.repeat(np.arange(40), 10), (0.5,))[0].ci95
    assert low <= 4 <= high and low < high


def test_intervals_of_constant_values_depend_on_the_number_of_clusters():
    """40 equal clusters bound the share of other clusters by 1 - 0.025^(1/40) = 8.8 %."""
    unseen = float(stats.beta.ppf(0.975, 1, 40))
    levels = (0.05, unseen + 1e-6, 0.5, 1 - unseen - 1e-6, 0.95)
    sample = np.full(400, 0.25, np.float32), np.arange(400) % 40, levels
    estimates = quantiles(*sample)
    ends = [estimate.ci95 for estimate in estimates]
    assert ends == [(-math.inf, 0.25), *[(0.25, 0.25)] * 3, (0.25, math.inf)]
    assert [one.standard_error for one in estimates] == [math.inf, 0.0, 0.0, 0.0, math.inf]
    for estimate in quantiles(*sample, known_value=0.25):
        assert (estimate.value, estimate.standard_error, estimate.ci95) == (0.25, 0.0, (0.25, 0.25))
        assert estimate.warnings == ()


def test_a_quantile_inside_ties_has_an_interval_of_width_zero():
    """Most tokens of two similar models have a KL of exactly 0."""
    random = np.random.default_rng(5)
    values = np.where(random.random(4000) < 0.9, 0.0, random.random(4000)).astype(np.float32)
    estimate = quantiles(values, np.arange(4000) % 40, (0.5,))[0]
    assert (estimate.value, estimate.standard_error, estimate.ci95) == (0.0, 0.0, (0.0, 0.0))


def test_the_error_of_a_quantile_of_one_cluster_is_nan():
    estimate = quantiles(np.arange(50, dtype=np.float32), np.zeros(50, int), (0.5,), lower=0.0)[0]
    assert math.isnan(estimate.standard_error)
    assert estimate.ci95 == (0.0, math.inf)
    assert estimate.warnings == ("only 1 cluster; below 30 the error itself is uncertain",)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("size", [1, 37, 99, 100, 1000, 1001])
def test_top_share_agrees_with_sorting(seed, size):
    values = np.random.default_rng(seed).lognormal(sigma=2, size=size).astype(np.float32)
    if seed == 3:
        values = np.round(values)
        values[0] = 1
    top = np.sort(values)[size - -(-size // 100) :]
    expected = top.sum(dtype=np.float64) / values.sum(dtype=np.float64)
    assert top_share(values.tolist(), 0.01) == pytest.approx(expected, rel=1e-9)


def test_invalid_levels_and_clusters_raise(unhooked):
    for level in (0.0, -0.1, 1.1):
        with pytest.raises(OptionError, match=rf"there is no quantile at {level}"):
            quantiles(np.ones(3), np.zeros(3, int), (0.5, level))
        with pytest.raises(OptionError, match=f"share is {level}; it is a share above 0, at most 1"):
            top_share(np.ones(3), level)
    with pytest.raises(ShapeError, match=r"values \(3,\), clusters \(2,\); give one of each per value"):
        quantiles(np.ones(3), np.zeros(2, int), (0.5,))
