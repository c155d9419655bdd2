"""Monotone functions of an estimate, and the running mean."""

import math

import numpy as np
import pytest
from prompt_sums import lognormal_prompts

from kleash.uncertainty import Estimate, ratio_of_sums, running_mean, transformed


def make_estimate(value: float, error: float, low: float, high: float) -> Estimate:
    return Estimate(
        value=value, unit="nats", standard_error=error, clusters=40, ci95=(low, high), warnings=("because",)
    )


def test_perplexity_maps_value_error_and_interval():
    result = transformed(make_estimate(2.0, 0.1, 1.7, 2.5), math.exp, math.exp)
    assert (result.value, result.unit) == (math.exp(2), "none")
    assert result.standard_error == pytest.approx(0.1 * math.exp(2))
    assert result.ci95 == (math.exp(1.7), math.exp(2.5))
    assert (result.clusters, result.warnings) == (40, ("because",))


def test_a_decreasing_function_swaps_the_ends():
    result = transformed(make_estimate(2.0, 0.1, 1.7, 2.5), lambda x: -x, lambda x: -1.0, unit="nats")
    assert (result.value, result.standard_error, result.unit) == (-2.0, 0.1, "nats")
    assert result.ci95 == (-2.5, -1.7)


def test_a_derivative_that_divides_by_zero_is_infinite():
    """The root of a mean square of 0 over a single cluster, whose error is unknown, or that is exactly 0."""
    result = transformed(make_estimate(0.0, 0.0, 0.0, 0.0), math.sqrt, lambda x: 0.5 / math.sqrt(x))
    assert (result.value, result.standard_error, result.ci95) == (0.0, 0.0, (0.0, 0.0))
    result = transformed(make_estimate(0.0, math.nan, 0.0, math.inf), math.sqrt, lambda x: 0.5 / math.sqrt(x))
    assert (result.value, result.ci95) == (0.0, (0.0, math.inf)) and math.isnan(result.standard_error)


def test_a_function_that_overflows_is_infinite():
    result = transformed(make_estimate(700.0, 10.0, 600.0, 800.0), math.exp, math.exp)
    assert result.ci95 == (math.exp(600), math.inf)
    infinite = transformed(make_estimate(math.inf, math.nan, math.nan, math.nan), math.exp, math.exp)
    assert math.isinf(infinite.value) and math.isnan(infinite.standard_error)


def test_the_transformed_error_agrees_with_simulation():
    random = np.random.default_rng(1)
    samples = 1 + 0.3 * random.standard_normal((2000, 100))
    true_error = np.exp(samples.mean(1)).std()
    result = transformed(ratio_of_sums(samples[0], np.ones(100)), math.exp, math.exp)
    assert result.standard_error == pytest.approx(float(true_error), rel=0.2)


def test_the_running_mean_agrees_with_the_mean_of_each_prefix():
    sums, counts = lognormal_prompts(57, seed=4)
    counts[4] = sums[4] = 0
    running = running_mean(sums, counts, points=10, lower=0.0)
    assert len(running.tokens) == 10
    assert running.tokens[-1] == counts.sum()
    assert np.all(np.diff(running.tokens) > 0)
    for tokens, mean, ci95 in zip(*running, strict=True):
        used = int(np.searchsorted(np.cumsum(counts), tokens)) + 1
        estimate = ratio_of_sums(sums[:used], counts[:used], lower=0.0)
        assert (mean, *ci95) == (estimate.value, *estimate.ci95)


def test_the_running_mean_of_few_or_no_or_infinite_clusters():
    few = running_mean([1.0, 2.0, 6.0], [1, 1, 1])
    assert few.tokens.tolist() == [1, 2, 3]
    assert few.mean.tolist() == pytest.approx([1.0, 1.5, 3.0])
    assert [len(column) for column in running_mean(np.zeros(0), np.zeros(0, int))] == [0, 0, 0]
    running = running_mean(np.array([1.0, 2.0, math.inf, 4.0]), np.ones(4, int))
    assert running.mean.tolist() == [1.0, 1.5, math.inf, math.inf]
    assert np.isnan(running.ci95[2:]).all()


def test_the_running_mean_of_nearly_constant_clusters_keeps_its_error():
    sums = 1e6 + 1e-3 * np.arange(50)
    running = running_mean(sums, np.ones(50, int), points=1)
    exact = running_mean(1e-3 * np.arange(50), np.ones(50, int), points=1)
    assert running.ci95[-1] - 1e6 == pytest.approx(exact.ci95[-1], rel=1e-5)
