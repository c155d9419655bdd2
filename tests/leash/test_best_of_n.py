"""Best of n: against every n-tuple there is, every sample there is, and the jackknife written out."""

import itertools
import math

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.special import rel_entr
from scipy.stats import binom

from kleash.errors import NotProbabilitiesError, OptionError, ShapeError
from kleash.leash import best_of_n_bound, best_of_n_kl, best_of_n_kl_from_rewards, best_of_n_kl_from_winners
from kleash.leash.best_of_n import _pseudo_values


def by_enumeration(probs, rewards, n):
    """The winner of every tuple of draws, ties shared among the draws that tie."""
    won = np.zeros(len(probs))
    for drawn in itertools.product(range(len(probs)), repeat=n):
        best = [i for i in drawn if rewards[i] == max(rewards[j] for j in drawn)]
        for i in best:
            won[i] += np.prod([probs[j] for j in drawn]) / len(best)
    return rel_entr(won, probs).sum()


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "rewards", [[0.0, 1.0, 2.0, 3.0], [2.0, 1.0, 1.0, -5.0], [1.0, 1.0, 0.0, 0.0], [7.0] * 4]
)
def test_the_exact_kl_agrees_with_enumeration_of_all_draws(rewards, n):
    probs = [0.1, 0.4, 0.2, 0.3]
    assert best_of_n_kl(probs, rewards, n) == pytest.approx(
        by_enumeration(probs, rewards, n), rel=1e-12, abs=1e-14
    )


def test_known_values_of_the_exact_kl():
    assert best_of_n_kl([0.5, 0.5], [0, 1], 4) == pytest.approx(0.4594, abs=5e-5)
    assert best_of_n_bound(4) == pytest.approx(0.6363, abs=5e-5)
    assert best_of_n_kl(np.full(10, 0.1), np.arange(10), 64) == pytest.approx(2.2935, abs=5e-5)
    assert best_of_n_bound(64) == pytest.approx(3.1745, abs=5e-5)
    assert best_of_n_kl([0.5, 0.5], [3, 3], 9) == 0.0
    thirds = [best_of_n_kl([p] * 3, [0, 1, 2], 5) for p in (1 / 3, 0.333333)]
    assert thirds[1] == pytest.approx(thirds[0], rel=1e-13)
    assert best_of_n_kl([0.2, 0.0, 0.8], [1, 9, 2], 3) == best_of_n_kl([0.2, 0.8], [1, 2], 3)
    assert best_of_n_kl([0.2, 0.8], [-math.inf, math.inf], 10**6) == pytest.approx(-math.log(0.8))


@pytest.mark.parametrize("n", [1, 2, 16, 1000])
def test_the_bound_is_the_integral_and_the_limit_of_many_outcomes(n):
    def density_times_its_log(x):
        return n * x ** (n - 1) * (math.log(n) + (n - 1) * math.log(x))

    integral = quad(density_times_its_log, 0, 1, limit=500, points=[1 - 5 / n])[0]
    assert best_of_n_bound(n) == pytest.approx(integral, abs=1e-7)
    many = 10**5
    got = best_of_n_kl(np.full(many, 1 / many), np.arange(many), n)
    assert got == pytest.approx(best_of_n_bound(n), abs=1e-5)


def test_the_exact_kl_is_below_the_bound_also_for_rare_outcomes():
    rng = np.random.default_rng(0)
    for n in (1, 2, 7, 300):
        for _ in range(20):
            probs = rng.dirichlet(np.full(8, 0.3))
            assert 0 <= best_of_n_kl(probs, rng.integers(0, 5, 8), n) <= best_of_n_bound(n) + 1e-15
    assert best_of_n_kl([1 - 1e-13, 1e-13], [0, 1], 2) == pytest.approx(2e-13 * math.log(2) - 1e-13, rel=1e-3)


def mean_over_all_samples(chance, draws, n):
    """The expectation of the estimate for two outcomes, over every number of wins that draws can show."""
    total = 0.0
    for wins in range(draws + 1):
        rewards = np.array([1.0] * wins + [0.0] * (draws - wins))
        total += binom.pmf(wins, draws, chance) * (best_of_n_bound(n) - _pseudo_values(rewards, n).mean())
    return total


@pytest.mark.parametrize(("chance", "n"), [(0.5, 4), (0.3, 3), (0.8, 2)])
def test_the_bias_from_rewards_falls_with_the_square_of_the_draws(chance, n):
    truth = best_of_n_kl([1 - chance, chance], [0, 1], n)
    biases = [abs(mean_over_all_samples(chance, draws, n) - truth) for draws in (32, 64, 128)]
    assert biases[0] < 0.01 * truth
    assert biases[0] / biases[1] > 3.2 and biases[1] / biases[2] > 3.2


def placed(rewards, n):
    """What the estimate is without the jackknife: each draw placed among the others, one at a time."""
    total = 0.0
    for i, reward in enumerate(rewards):
        others = np.delete(rewards, i)
        below, m = (others < reward).mean(), (others == reward).mean()
        if m == 0:
            continue
        top = below + m
        won = top**n - below**n
        bound = math.log(n) - (n - 1) / n
        powers = top**n * math.log(top) - (below**n * math.log(below) if below else 0.0)
        together = won * math.log(won / m)
        total += (won * bound + (n - 1) * powers - together) / m
    return math.log(n) - (n - 1) / n - total / len(rewards)


@pytest.mark.parametrize("seed", range(4))
def test_the_estimate_from_rewards_is_the_jackknife(seed):
    rng = np.random.default_rng(seed)
    rewards, n = rng.integers(0, 12, 20).astype(float), 6
    without = np.array([placed(np.delete(rewards, i), n) for i in range(20)])
    pseudo = 20 * placed(rewards, n) - 19 * without
    got = best_of_n_kl_from_rewards(rewards, n)
    assert got.value == pytest.approx(pseudo.mean())
    assert got.standard_error == pytest.approx(pseudo.std(ddof=1) / math.sqrt(20))
    assert (got.unit, got.clusters) == ("nats", 20)


def test_prompts_are_clusters():
    rng = np.random.default_rng(1)
    rewards = np.stack([rng.integers(0, levels, 40) for levels in (2, 3, 5, 50)]).astype(float)
    each = [best_of_n_kl_from_rewards(row, 8).value for row in rewards]
    got = best_of_n_kl_from_rewards(rewards, 8)
    assert got.value == pytest.approx(np.mean(each)) and got.clusters == 4
    assert got.standard_error == pytest.approx(np.std(each, ddof=1) / 2)


def test_the_standard_error_is_the_spread_of_the_estimate():
    rng = np.random.default_rng(2)
    probs, n = np.full(10, 0.1), 16
    found = [best_of_n_kl_from_rewards(rng.integers(0, 10, 100).astype(float), n) for _ in range(100)]
    truth = best_of_n_kl(probs, np.arange(10), n)
    spread = np.std([one.value for one in found])
    assert np.mean([one.value for one in found]) == pytest.approx(truth, abs=3 * spread / math.sqrt(100))
    assert np.mean([one.standard_error for one in found]) == pytest.approx(spread, rel=0.2)
    assert np.mean([one.ci95[0] <= truth <= one.ci95[1] for one in found]) > 0.88


def test_rewards_that_never_tie_give_the_bound_and_a_warning():
    got = best_of_n_kl_from_rewards(np.random.default_rng(3).normal(size=(5, 20)), 8)
    assert got.value == best_of_n_bound(8) and got.standard_error == 0
    assert any("no two rewards of a prompt tie" in warning for warning in got.warnings)
    assert any("20 draws per prompt for the best of 8; below 32" in warning for warning in got.warnings)
    enough = best_of_n_kl_from_rewards(np.array([0.0, 0.0, 1.0, 2.0] * 8), 8)
    assert not any("draws per prompt" in warning or "tie" in warning for warning in enough.warnings)


def test_intervals_stay_between_zero_and_the_bound():
    nearly = best_of_n_kl_from_rewards(np.append(np.arange(18.0), [17.0, 17.0]), 8)
    assert 0 < nearly.ci95[0] < nearly.value < nearly.ci95[1] == best_of_n_bound(8)
    winners = best_of_n_kl_from_winners(np.log([0.01, 0.02, 0.9]), 8)
    assert winners.ci95 == (0.0, best_of_n_bound(8))


@pytest.mark.parametrize(("mass", "n"), [(0.5, 4), (0.01, 64), (0.9, 2)])
def test_the_estimate_from_winners_assumes_the_best_response(mass, n):
    rest = 50_000
    probs = np.append(np.full(rest, (1 - mass) / rest), mass)
    expected = best_of_n_kl(probs, np.arange(rest + 1), n)
    got = best_of_n_kl_from_winners(np.log(np.full(3, mass)), n)
    assert got.value == pytest.approx(expected, rel=1e-4)


def test_the_estimate_from_likely_and_unlikely_winners():
    assert best_of_n_kl_from_winners(np.log([0.5, 0.5]), 4).value == pytest.approx(0.4991, abs=1e-4)
    ends = best_of_n_kl_from_winners(np.array([-np.inf, -800.0, -40.0]), 16)
    assert ends.value == pytest.approx(best_of_n_bound(16), rel=1e-14)
    assert best_of_n_kl_from_winners(np.zeros(2), 16).value == pytest.approx(0.0, abs=1e-15)
    grouped = best_of_n_kl_from_winners(np.log([0.5, 0.4, 0.1, 0.2]), 4, prompts=["a", "a", "b", "b"])
    assert grouped.clusters == 2


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: best_of_n_bound(0), OptionError, "n is 0; the best is taken of at least 1"),
        (lambda: best_of_n_kl([1.0], [0.0], -1), OptionError, "n is -1"),
        (lambda: best_of_n_kl([0.5, 0.5], [0.0], 2), ShapeError, r"probs are \(2,\) and rewards \(1,\)"),
        (lambda: best_of_n_kl([0.5, 0.6], [0, 1], 2), NotProbabilitiesError, "sum to 1.1, the least is 0.5"),
        (lambda: best_of_n_kl([-0.5, 1.5], [0, 1], 2), NotProbabilitiesError, "the least is -0.5"),
        (lambda: best_of_n_kl([math.nan, 1.0], [0, 1], 2), NotProbabilitiesError, "sum to nan"),
        (lambda: best_of_n_kl([], [], 2), NotProbabilitiesError, "the least is absent"),
        (lambda: best_of_n_kl([0.5, 0.5], [0, math.nan], 2), OptionError, "1 rewards are NaN"),
        (
            lambda: best_of_n_kl_from_rewards(np.zeros(2), 2),
            ShapeError,
            r"rewards are \(2,\); give \[draws\]",
        ),
        (lambda: best_of_n_kl_from_rewards(np.zeros((0, 5)), 2), ShapeError, r"rewards are \(0, 5\)"),
        (lambda: best_of_n_kl_from_rewards(np.full(4, np.nan), 2), OptionError, "4 rewards are NaN"),
        (
            lambda: best_of_n_kl_from_winners(np.array([0.1]), 2),
            OptionError,
            "reaches 0.1; a log-probability",
        ),
        (lambda: best_of_n_kl_from_winners(np.array([np.nan]), 2), OptionError, "reaches nan"),
        (lambda: best_of_n_kl_from_winners(np.zeros((2, 2)), 2), ShapeError, r"winner_logp is \(2, 2\)"),
        (lambda: best_of_n_kl_from_winners(np.zeros(2), 2, prompts=[1]), ShapeError, "2"),
    ],
)
@pytest.mark.usefixtures("unhooked")
def test_invalid_best_of_n_arguments_are_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()
