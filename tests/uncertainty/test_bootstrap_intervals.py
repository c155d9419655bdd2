"""The bootstrap-t against one that draws clusters one by one, and coverage where the truth is known."""

import math

import numpy as np
import pytest
from prompt_sums import lognormal_prompts
from scipy import stats

from kleash.uncertainty import paired_difference, ratio_of_many, ratio_of_sums
from kleash.uncertainty.bootstrap import _few_resamples, _resamples

DRAWS = 20_000


def ratio_and_error(sums: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ratio and clustered error of each row."""
    size, ratio = sums.shape[-1], sums.sum(-1) / counts.sum(-1)
    residuals = sums - ratio[..., None] * counts
    return ratio, np.sqrt(size / (size - 1) * (residuals**2).sum(-1)) / counts.sum(-1)


def ends_of(strays: np.ndarray, value: float, error: float, size: int) -> tuple[float, float]:
    """At each end Student's t or the expanded quantile of the strays, whichever reaches further."""
    student = float(stats.t.ppf(0.975, size - 1))
    tail = float(stats.norm.cdf(-math.sqrt(size / (size - 1)) * student))
    low, high = np.quantile(strays, [tail, 1 - tail])
    return value - max(student, high) * error, value + max(student, -low) * error


@pytest.mark.parametrize(("clusters", "seed"), [(16, 1), (40, 2), (200, 3)])
def test_agrees_with_a_bootstrap_by_another_route(clusters: int, seed: int) -> None:
    sums, counts = lognormal_prompts(clusters, seed)
    chosen = np.random.default_rng(seed).choice(clusters, size=(DRAWS, clusters))
    value, error = ratio_and_error(sums, counts)
    drawn, errors = ratio_and_error(sums[chosen], counts[chosen])
    low, high = ends_of((drawn - value) / errors, float(value), float(error), clusters)
    estimate = ratio_of_sums(sums, counts)
    assert estimate.ci95 == pytest.approx((low, high), abs=0.1 * (high - low))
    student = float(stats.t.ppf(0.975, clusters - 1)) * estimate.standard_error
    assert high - value > 1.2 * student, "so mild an example would hide a missing bootstrap"


def test_a_paired_difference_agrees_with_a_bootstrap_by_another_route() -> None:
    sums_a, counts_a = lognormal_prompts(60, seed=4)
    _, counts_b = lognormal_prompts(60, seed=5)
    sums_b = 0.5 * sums_a / counts_a * counts_b
    chosen = np.random.default_rng(4).choice(60, size=(DRAWS, 60))

    def difference(*arrays: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        a, na, b, nb = arrays
        one, other = a.sum(-1) / na.sum(-1), b.sum(-1) / nb.sum(-1)
        moves = (a - one[..., None] * na) / na.sum(-1)[..., None] - (b - other[..., None] * nb) / nb.sum(-1)[
            ..., None
        ]
        return one - other, np.sqrt(60 / 59 * (moves**2).sum(-1))

    value, error = difference(sums_a, counts_a, sums_b, counts_b)
    drawn, errors = difference(*(array[chosen] for array in (sums_a, counts_a, sums_b, counts_b)))
    low, high = ends_of((drawn - value) / errors, float(value), float(error), 60)
    assert paired_difference(sums_a, counts_a, sums_b, counts_b).ci95 == pytest.approx(
        (low, high), abs=0.06 * (high - low)
    )


def test_the_long_tail_of_the_data_is_the_long_end_of_the_interval() -> None:
    sums, counts = lognormal_prompts(40, seed=2)
    right = ratio_of_sums(sums, counts)
    left = ratio_of_sums(-sums, counts)
    assert right.ci95[1] - right.value > 1.3 * (right.value - right.ci95[0])
    assert left.value - left.ci95[0] > 1.3 * (left.ci95[1] - left.value)


def test_where_nearly_all_clusters_are_alike_no_end_is_farther_than_four_times_students() -> None:
    sums, counts = np.zeros(40), np.full(40, 10)
    sums[5] = 3.0
    estimate = ratio_of_sums(sums, counts)
    student = float(stats.t.ppf(0.975, 39)) * estimate.standard_error
    assert estimate.ci95[1] == pytest.approx(estimate.value + 4 * student)
    assert estimate.ci95[0] == pytest.approx(estimate.value - student)


@pytest.mark.parametrize("clusters", [40, 3000])
def test_always_says_the_same(clusters: int) -> None:
    sums, counts = lognormal_prompts(clusters, seed=6)
    before = ratio_of_sums(sums, counts)
    _few_resamples.cache_clear()
    assert ratio_of_sums(sums, counts) == before


@pytest.mark.parametrize(
    ("clusters", "least", "most"), [(8, 0.92, 0.985), (32, 0.92, 0.98), (128, 0.925, 0.98)]
)
def test_covers_lognormal_prompts(clusters: int, least: float, most: float) -> None:
    sums, counts = lognormal_prompts(clusters, seed=20, columns=500)
    estimates = ratio_of_many(sums, counts, lower=0.0)
    covered = np.mean([one.ci95[0] <= 1 <= one.ci95[1] for one in estimates])
    assert least < covered < most


def test_the_plain_normal_interval_does_not_cover_them() -> None:
    sums, counts = lognormal_prompts(16, seed=20, columns=500)
    estimates = ratio_of_many(sums, counts, lower=0.0)
    assert np.mean([abs(one.value - 1) < 1.96 * one.standard_error for one in estimates]) < 0.88


def test_does_not_overdo_it_on_normal_prompts() -> None:
    random = np.random.default_rng(21)
    counts = np.full((64, 500), 10)
    estimates = ratio_of_many(10 + random.standard_normal(counts.shape), counts)
    covered = np.mean([one.ci95[0] <= 1 <= one.ci95[1] for one in estimates])
    assert 0.93 < covered < 0.98


@pytest.mark.parametrize("clusters", [9, 30])
def test_every_draw_is_measured_as_if_it_were_a_measurement(clusters: int) -> None:
    """The same draws of the sorted clusters, but one by one, with the error of the textbook."""
    sums, counts = lognormal_prompts(clusters, seed=7)
    sums, counts = sums[np.argsort(sums)], counts[np.argsort(sums)]
    times = np.concatenate(list(_resamples(clusters))).astype(int)
    chosen = np.stack([np.repeat(np.arange(clusters), row) for row in times])
    value, error = ratio_and_error(sums, counts)
    drawn, errors = ratio_and_error(sums[chosen], counts[chosen])
    strays = np.sort((drawn - value) / errors)
    student = float(stats.t.ppf(0.975, clusters - 1))
    tail = float(stats.norm.cdf(-math.sqrt(clusters / (clusters - 1)) * student))
    place = math.floor(tail * 2000) - 1
    low = value - max(student, strays[-1 - place]) * error
    high = value + max(student, -strays[place]) * error
    assert -strays[place] < 4 * student, "the bound would hide the draws"
    assert ratio_of_sums(sums, counts).ci95 == pytest.approx((low, high), rel=1e-9)


@pytest.mark.parametrize("clusters", [8, 3000])
def test_draws_are_as_many_clusters_with_replacement(clusters: int) -> None:
    times = np.concatenate(list(_resamples(clusters)))
    assert times.shape == (1999, clusters)
    assert np.all(times.sum(1) == clusters)
    assert times.var() == pytest.approx(1 - 1 / clusters, rel=0.05)
    assert np.abs(times.mean(0) - 1).max() < 0.15
    assert len({tuple(row[:8]) for row in times[:1000].tolist()}) > 500, "the draws differ"
