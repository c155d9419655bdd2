"""U - a (U - C): a two-step example by exact enumeration, and properties of the fitted weight."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kleash.uncertainty import controlled_total

# After token 0 both models are (.5, .5); after token 1 they are (.01, .99) and (.99, .01). The first step is
# (.5, .5) against (.25, .75). In 200 sequences each outcome occurs exactly as often as under p.
OCCURRENCES = {(0, 0): 50, (0, 1): 50, (1, 0): 1, (1, 1): 99}
FIRST_P, FIRST_Q = (0.5, 0.5), (0.25, 0.75)
THEN_P, THEN_Q = ((0.5, 0.5), (0.01, 0.99)), ((0.5, 0.5), (0.99, 0.01))


def kl(p: tuple[float, ...], q: tuple[float, ...]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def two_steps() -> tuple[np.ndarray, np.ndarray]:
    """U and C of every sequence."""
    sampled, exact = [], []
    for (first, second), occurrences in OCCURRENCES.items():
        u = math.log(FIRST_P[first] / FIRST_Q[first])
        u += math.log(THEN_P[first][second] / THEN_Q[first][second])
        c = kl(FIRST_P, FIRST_Q) + kl(THEN_P[first], THEN_Q[first])
        sampled += [u] * occurrences
        exact += [c] * occurrences
    return np.array(sampled), np.array(exact)


def test_the_two_step_example_agrees_with_enumeration():
    sampled, exact = two_steps()
    total = controlled_total(sampled, exact, np.arange(200))
    for estimate in (total.estimate, total.monte_carlo, total.exact_sum):
        assert estimate.value == pytest.approx(2.395450, abs=1e-6)
    assert total.weight == pytest.approx(-0.718, abs=5e-4)
    assert controlled_total(exact.tolist(), exact, range(200)).weight == 1.0, "U - C does not vary"
    assert total.monte_carlo.standard_error**2 * 199 == pytest.approx(3.31591, abs=1e-5)
    assert total.exact_sum.standard_error**2 * 199 == pytest.approx(5.06974, abs=1e-5)
    assert total.estimate.standard_error**2 * 198 == pytest.approx(2.94458, abs=1e-5)


@settings(max_examples=30)
@given(st.integers(128, 180), st.integers(0, 1000), st.floats(0.0, 3.0))
def test_the_error_is_at_most_that_of_either_component_up_to_a_degree_of_freedom(clusters, seed, noise):
    random = np.random.default_rng(seed)
    exact = random.lognormal(size=3 * clusters)
    sampled = exact + (noise + 0.1) * random.standard_normal(3 * clusters)
    total = controlled_total(sampled, exact, np.repeat(np.arange(clusters), 3))
    best = min(total.monte_carlo.standard_error, total.exact_sum.standard_error)
    assert total.estimate.standard_error <= best * math.sqrt((clusters - 1) / (clusters - 2)) * (1 + 1e-9)
    assert total.estimate.clusters == clusters


def test_the_weight_is_fitted_over_clusters():
    """Within each cluster U - C cancels; only between clusters does it move with U."""
    c, d = np.random.default_rng(3).lognormal(size=(2, 128))
    exact = np.repeat(c, 2)
    sampled = exact + np.tile([10.0, -10.0], 128) + np.repeat(d, 2)
    total = controlled_total(sampled, exact, np.repeat(np.arange(128), 2))
    u = c + d
    assert total.weight == pytest.approx(np.cov(u, d)[0, 1] / np.cov(u, d)[1, 1], rel=1e-9)


def test_few_skewed_clusters_give_an_unbiased_total():
    """Each prompt has its own drift: with weights fitted on the 8 clusters (MIN_CLUSTERS = 8) their mean is 0.875."""
    random = np.random.default_rng(0)
    drifts = random.lognormal(-0.5, 1.0, size=(2000, 8))
    sampled = drifts + np.sqrt(2 * drifts) * random.standard_normal(drifts.shape)
    exact = drifts * random.uniform(0.8, 1.2, drifts.shape)
    totals = [controlled_total(*both, np.arange(8)) for both in zip(sampled, exact, strict=True)]
    assert {total.weight for total in totals} == {1.0}
    assert np.mean([total.estimate.value for total in totals]) == pytest.approx(1.0, abs=0.03)


@pytest.mark.parametrize("sampled", [1.0, math.inf])
def test_an_infinite_exact_term_makes_the_total_infinite(sampled):
    exact = np.ones(140)
    exact[3] = math.inf
    total = controlled_total(np.append(np.arange(139.0), sampled), np.roll(exact, 136), np.arange(140))
    assert math.isinf(total.estimate.value)
    assert total.weight == 1.0
    assert total.estimate.warnings == ("the sums of 1 of 140 clusters are infinite or not a number",)


def test_the_total_is_bounded_below_and_its_monte_carlo_component_is_not():
    random = np.random.default_rng(2)
    exact = np.abs(random.standard_normal(40)) * 1e-3
    total = controlled_total(exact + random.standard_normal(40), exact, np.arange(40))
    assert total.estimate.ci95[0] >= 0
    assert total.exact_sum.ci95[0] >= 0
    assert total.monte_carlo.ci95[0] < 0
