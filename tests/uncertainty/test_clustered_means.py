"""Means per token: values and errors against the textbook, scipy and a jackknife, and edge cases."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prompt_sums import lognormal_prompts, prompts
from scipy import stats

from kleash.errors import ShapeError
from kleash.uncertainty import (
    cluster_labels,
    clustered_mean,
    controlled_total,
    paired_difference,
    ratio_of_many,
    ratio_of_sums,
    running_mean,
)


def jackknife_error(estimated, size: int) -> float:
    """Standard error of ``estimated`` of some clusters, from leaving out one of them at a time."""
    without = np.array([estimated(np.arange(size) != c) for c in range(size)])
    return math.sqrt((size - 1) / size * ((without - without.mean()) ** 2).sum())


def test_the_value_is_the_mean_per_token_and_not_the_mean_of_means():
    estimate = ratio_of_sums(np.array([1.0, 30.0]), np.array([1, 10]))
    assert estimate.value == pytest.approx(31 / 11)
    assert (estimate.unit, estimate.clusters) == ("nats", 2)


@pytest.mark.parametrize("seed", range(3))
def test_unequal_counts_agree_with_the_jackknife(seed):
    sums, counts = lognormal_prompts(400, seed=seed, spread=0.5)
    estimate = ratio_of_sums(sums, counts)
    expected = jackknife_error(lambda kept: sums[kept].sum() / counts[kept].sum(), 400)
    assert estimate.standard_error == pytest.approx(expected, rel=0.01)


@settings(max_examples=30)
@given(prompts())
def test_the_interval_contains_students_interval(sums_and_counts):
    sums, counts = sums_and_counts
    estimate = ratio_of_sums(sums, counts)
    degrees_of_freedom = max(1.0, counts.sum() ** 2 / (counts**2).sum() - 1)
    half = float(stats.t.ppf(0.975, degrees_of_freedom)) * estimate.standard_error
    low, high = estimate.ci95
    assert low <= estimate.value - half * (1 - 1e-9)
    assert high >= estimate.value + half * (1 - 1e-9)
    assert max(estimate.value - low, high - estimate.value) <= 4 * half * (1 + 1e-9)


@settings(max_examples=30)
@given(prompts(), st.floats(0.01, 100), st.integers(2, 9))
def test_the_error_scales_with_the_values_and_not_with_the_counts(sums_and_counts, scale, times):
    sums, counts = sums_and_counts
    one, scaled = ratio_of_sums(sums, counts), ratio_of_sums(scale * sums, counts)
    assert scaled.value == pytest.approx(scale * one.value, rel=1e-9)
    assert scaled.standard_error == pytest.approx(scale * one.standard_error, rel=1e-9)
    assert scaled.ci95 == pytest.approx([scale * end for end in one.ci95], rel=1e-6, abs=1e-9 * scale)
    longer = ratio_of_sums(times * sums, times * counts)
    assert longer.value == pytest.approx(one.value, rel=1e-9)
    assert longer.standard_error == pytest.approx(one.standard_error, rel=1e-9)


@settings(max_examples=30)
@given(prompts(), st.randoms(use_true_random=False))
def test_the_order_of_the_clusters_does_not_matter(sums_and_counts, random):
    sums, counts = sums_and_counts
    order = list(range(len(sums)))
    random.shuffle(order)
    assert ratio_of_sums(sums[order].tolist(), counts[order].tolist()) == ratio_of_sums(sums, counts)


@settings(max_examples=30)
@given(prompts(most=12))
def test_clustered_mean_of_observations_equals_the_ratio_of_their_sums(sums_and_counts):
    sums, counts = sums_and_counts
    names = np.array([f"prompt {c}" for c in range(len(sums))])
    labels = np.repeat(names, counts)
    estimate = clustered_mean(np.repeat(sums / counts, counts).tolist(), labels.tolist())
    expected = ratio_of_sums(sums, counts)
    assert estimate.value == pytest.approx(expected.value, rel=1e-12)
    assert estimate.standard_error == pytest.approx(expected.standard_error, rel=1e-9)
    assert estimate.clusters == expected.clusters


def test_repeated_observations_of_a_cluster_do_not_shrink_the_error():
    """Eight copies with the same label give the same error, eight copies with new labels a smaller one."""
    sums, counts = lognormal_prompts(40, seed=3)
    labels = np.arange(40)
    one = clustered_mean(sums / counts, labels)
    eight = clustered_mean(np.tile(sums / counts, 8), np.tile(labels, 8))
    assert eight.standard_error == pytest.approx(one.standard_error, rel=1e-9)
    distinct = clustered_mean(np.tile(sums / counts, 8), np.arange(320))
    assert distinct.standard_error == pytest.approx(one.standard_error * math.sqrt(39 / 319), rel=1e-9)


@pytest.mark.parametrize("counts_per_column", [False, True], ids=["shared counts", "counts per column"])
def test_ratio_of_many_equals_ratio_of_sums_per_column(counts_per_column):
    sums, counts = lognormal_prompts(50, seed=4, columns=5)
    if counts_per_column:
        counts[:30, 1] = 0
        sums[:30, 1] = 0
    shared = counts if counts_per_column else counts[:, 0]
    options = {"unit": list("abcde"), "lower": [*[0.0] * 4, 9.0], "upper": [0.5, *[None] * 4]}
    for k, column in enumerate(ratio_of_many(sums, shared, **options)):
        count_columns = counts[:, k] if counts_per_column else counts[:, 0]
        options_of_column = {name: each[k] for name, each in options.items()}
        assert column == ratio_of_sums(sums[:, k], count_columns, **options_of_column)


def test_a_constant_has_no_error_despite_rounding():
    counts = np.arange(3, 40)
    for value in (0.0, 1.0, 0.1, 1 / 3, -0.7):
        estimate = ratio_of_sums(value * counts, counts, lower=-1.0, upper=1.0)
        assert estimate.value == pytest.approx(value, rel=1e-15)
        assert estimate.standard_error == 0
        assert estimate.ci95[0] <= estimate.value <= estimate.ci95[1] != estimate.ci95[0]
        assert math.isinf(estimate.relative_error)


@pytest.mark.parametrize(
    ("bad", "expected"), [(math.inf, math.inf), (-math.inf, -math.inf), (math.nan, math.nan)]
)
def test_non_finite_sums_have_a_warning_and_no_error(bad, expected):
    sums, counts = lognormal_prompts(40, seed=5)
    sums[7] = bad
    broken = ratio_of_sums(np.ones(40), np.append(counts[1:], abs(bad)))
    assert math.isnan(broken.standard_error) and "of 1 of 40" in broken.warnings[0]
    estimate = ratio_of_sums(sums, counts, lower=0.0)
    assert estimate.value == pytest.approx(expected, nan_ok=True)
    assert math.isnan(estimate.standard_error)
    assert all(math.isnan(end) for end in estimate.ci95)
    assert estimate.warnings == ("the sums of 1 of 40 clusters are infinite or not a number",)
    assert paired_difference(counts, counts, sums, counts).value == pytest.approx(-expected, nan_ok=True)
    large = ratio_of_sums(1e200 * np.arange(1.0, 8.0), np.ones(7), lower=0.0)  # whose squares overflow
    assert large.standard_error == pytest.approx(1e200 * float(stats.sem(np.arange(7.0))), rel=1e-12)


def test_the_mean_of_no_clusters_is_nan():
    none = np.zeros(0)
    for estimate, clusters in (
        (ratio_of_sums(none, none), 0),
        (paired_difference(np.ones(3), np.ones(3), np.zeros(3), np.zeros(3)), 3),
    ):
        assert np.isnan([estimate.value, estimate.standard_error, *estimate.ci95]).all()
        assert estimate.clusters == clusters


def test_clusters_without_tokens_are_left_out():
    sums, counts = lognormal_prompts(40, seed=6)
    assert ratio_of_sums(np.append(sums, [0.0, 0]), np.append(counts, [0, 0])) == ratio_of_sums(sums, counts)


def test_the_interval_is_clipped_to_the_bounds():
    counts = np.full(9, 10)
    agreements = np.array([10, 10, 10, 10, 10, 10, 10, 10, 2])
    unbounded = ratio_of_sums(agreements, counts)
    bounded = ratio_of_sums(agreements, counts, lower=0.0, upper=1.0)
    assert unbounded.ci95[1] > 1 and bounded.ci95[1] == 1
    assert bounded.ci95[0] == max(0.0, unbounded.ci95[0])
    outside = ratio_of_sums(agreements, counts, lower=0.95, upper=0.96)
    assert outside.ci95 == (outside.value, 0.96), "the value itself is never clipped"
    assert ratio_of_sums(counts, counts, lower=0.5, upper=0.6).ci95[1] == 1, (
        "nor where all clusters are equal"
    )
    assert ratio_of_sums(agreements, counts, upper=0.9).ci95 == (unbounded.ci95[0], outside.value)


def test_few_clusters_have_a_warning_and_a_dominant_one_has_none():
    sums, counts = np.ones(30), np.ones(30, int)
    sums[::2] = 2
    assert ratio_of_sums(sums, counts).warnings == ()
    few = "only 29 clusters; below 30 the error itself is uncertain"
    assert ratio_of_sums(sums[:29], counts[:29]).warnings == (few,)
    sums[3] = 50
    assert ratio_of_sums(sums, counts).warnings == ()


def test_str_shows_the_error_and_the_warnings():
    estimate = ratio_of_sums(np.array([1.0, 2.0, 3.0]), np.ones(3), unit="nats")
    assert str(estimate).splitlines() == [
        "2.00 ± 0.58 nats over 3 clusters",
        "  warning: only 3 clusters; below 30 the error itself is uncertain",
    ]
    assert estimate.relative_error == pytest.approx(1 / math.sqrt(12))
    assert math.isinf(ratio_of_sums(np.array([-1.0, 1.0]), np.ones(2)).relative_error)
    assert "none" not in str(ratio_of_sums(np.array([1.0, 2.0]), np.ones(2), unit="none"))
    far = str(ratio_of_sums(np.array([1e21, 2e21, 3e21]), np.ones(3)))
    assert far.startswith("2.00e+21 ± 5.8e+20 nats"), "and not twenty digits"


def test_a_paired_difference_has_the_error_of_a_paired_test():
    random = np.random.default_rng(7)
    shared = random.lognormal(size=60)
    a, b = shared + 0.1 * random.standard_normal(60), shared + 0.1 * random.standard_normal(60)
    estimate = paired_difference(10 * a, np.full(60, 10), 10 * b, np.full(60, 10))
    assert estimate.value == pytest.approx(a.mean() - b.mean(), abs=1e-12)
    assert estimate.standard_error == pytest.approx(float(stats.sem(a - b)), rel=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_a_paired_difference_of_unequal_counts_agrees_with_the_jackknife(seed):
    sums_a, counts_a = lognormal_prompts(300, seed=seed, spread=0.5)
    _, counts_b = lognormal_prompts(300, seed=seed + 100)
    sums_b = 0.8 * sums_a / counts_a * counts_b + np.random.default_rng(seed).standard_normal(300)
    estimate = paired_difference(sums_a, counts_a, sums_b, counts_b)

    def difference(kept: np.ndarray) -> float:
        return sums_a[kept].sum() / counts_a[kept].sum() - sums_b[kept].sum() / counts_b[kept].sum()

    assert estimate.standard_error == pytest.approx(jackknife_error(difference, 300), rel=0.02)


def test_a_prompt_in_only_one_measurement_counts_in_that_measurement():
    sums, counts = lognormal_prompts(40, seed=9)
    sums_b, counts_b = np.append(sums[:-1], 0.0), np.append(counts[:-1], 0)
    estimate = paired_difference(sums, counts, sums_b.tolist(), counts_b.tolist())
    assert estimate.clusters == 40
    assert estimate.value == pytest.approx(sums.sum() / counts.sum() - sums[:-1].sum() / counts[:-1].sum())


def test_inputs_of_different_shapes_raise(unhooked):
    with pytest.raises(ShapeError, match=r"sums \(3,\), counts \(2,\); give one of each per cluster"):
        ratio_of_sums(np.ones(3), np.ones(2))
    for shape in ((3, 2), (3,)):
        with pytest.raises(
            ShapeError, match=r"sums are \(3,.* and counts \(3, 1\); give \[cluster, column\]"
        ):
            ratio_of_many(np.ones(shape), np.ones((3, 1)))
    with pytest.raises(ShapeError, match=r"values \(3,\), clusters \(4,\); give one of each per value"):
        clustered_mean(np.ones(3), np.ones(4))
    with pytest.raises(
        ShapeError, match=r"monte_carlo \(3,\), exact \(2,\), clusters \(3,\); give one of each"
    ):
        controlled_total(np.ones(3), np.ones(2), np.ones(3))
    with pytest.raises(ShapeError, match=r"sums \(3,\), counts \(2,\); give one of each per cluster"):
        running_mean(np.ones(3), np.ones(2))
    with pytest.raises(ShapeError, match=r"document_ids \(3,\), window_ids \(2,\); give one of each per"):
        cluster_labels(np.zeros(3, int), np.zeros(2, int))
    with pytest.raises(ShapeError, match=r"sums_a"):
        paired_difference(np.ones(3), np.ones(3), np.ones(3), np.ones(4))
