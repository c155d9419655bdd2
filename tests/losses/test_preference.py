"""Rewards implied by a policy: against optima found without them, and generators written anew."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from kleash.divergences import DIVERGENCES, alpha_record
from kleash.errors import DetachedError, OptionError, UnknownNameError
from kleash.losses import dpo_loss, implicit_reward, response_log_ratio
from kleash.losses.preference import NO_REWARD

GENERATORS = {
    "kl": lambda t: t * np.log(t),
    "reverse_kl": lambda t: -np.log(t),
    "jeffreys": lambda t: (t - 1) * np.log(t),
    "jensen_shannon": lambda t: t / 2 * np.log(2 * t / (1 + t)) + np.log(2 / (1 + t)) / 2,
    "chi_squared": lambda t: (t - 1) ** 2,
    "alpha": lambda t: (t**1.7 - 1) / (1.7 * 0.7),
}
"""g of D(p || q) = sum q g(p / q), from the textbook; a multiple of t - 1 is free."""
Q = np.array([0.1, 0.2, 0.25, 0.3, 0.15])
REWARD = np.array([0.9, -0.4, 0.3, 0.0, -0.8])
BETA = 0.7


def record(name):
    return alpha_record(1.7) if name == "alpha" else name


def optimum(name):
    """The policy that maximises E_p reward - beta sum q g(p / q), by search."""

    def loss(logits):
        p = np.exp(logits - np.logaddexp.reduce(logits))
        return BETA * (Q * GENERATORS[name](p / Q)).sum() - p @ REWARD

    found = minimize(loss, np.log(Q), method="BFGS", options={"gtol": 1e-9})
    return torch.tensor(found.x).log_softmax(-1)


def expected_loss(logits, divergence):
    """The mean of the loss over pairs from q, labelled by Bradley and Terry with the true reward."""
    log_ratio = logits.log_softmax(-1) - torch.tensor(Q).log()
    total = logits.new_zeros(())
    for i in range(5):
        for j in range(5):
            wins = 1 / (1 + math.exp(REWARD[j] - REWARD[i]))
            pair = dpo_loss(log_ratio[[i]], log_ratio[[j]], beta=BETA, divergence=divergence)
            total = total + Q[i] * Q[j] * wins * pair.loss[0]
    return total


@pytest.mark.parametrize("name", GENERATORS)
def test_the_optimal_policy_of_a_reward_implies_that_reward(name):
    """Differences of it, that is; and the expected loss is flat there and nowhere near it."""
    best = optimum(name)
    implied = implicit_reward(best - torch.tensor(Q).log(), beta=BETA, divergence=record(name))
    assert (implied - implied[0]).numpy() == pytest.approx(REWARD - REWARD[0], abs=2e-5)
    logits = best.clone().requires_grad_()
    (slope,) = torch.autograd.grad(expected_loss(logits, record(name)), logits)
    assert slope.abs().max() < 1e-5
    beside = (best + torch.tensor([0.1, 0, 0, -0.1, 0])).requires_grad_()
    (slope,) = torch.autograd.grad(expected_loss(beside, record(name)), beside)
    assert slope.abs().max() > 1e-4


@pytest.mark.parametrize("name", GENERATORS)
def test_the_reward_is_the_derivative_of_the_generator(name):
    t, step = np.array([0.05, 0.4, 0.999, 1.3, 7.0]), 1e-6
    slope = (GENERATORS[name](t + step * t) - GENERATORS[name](t - step * t)) / (2 * step * t)
    implied = implicit_reward(torch.tensor(np.log(t)), beta=0.2, divergence=record(name)).numpy()
    assert implied - implied[0] == pytest.approx(0.2 * (slope - slope[0]), rel=1e-6, abs=1e-8)


def test_every_divergence_implies_a_reward_or_has_a_reason():
    assert set(DIVERGENCES) - set(NO_REWARD) <= set(GENERATORS)
    u = torch.linspace(-6, 6, 1000, dtype=torch.float64)
    for name, one in DIVERGENCES.items():
        rising = bool((one.score(u).diff() > 0).all())
        assert (name in NO_REWARD) == (not rising or name == "hellinger")
        if name in NO_REWARD:
            for given in (name, one):
                with pytest.raises(OptionError, match=r"implies no reward: (it|its) "):
                    implicit_reward(u, beta=1.0, divergence=given)
        else:
            rewards = [implicit_reward(u, beta=2.0, divergence=which) for which in (one, name)]
            torch.testing.assert_close(*rewards)


@torch.no_grad()
def test_dpo_of_a_small_example():
    got = dpo_loss(torch.tensor([1.5, 0.0]), torch.tensor([-0.5, 0.0]), beta=0.5)
    assert got.loss.tolist() == pytest.approx([math.log1p(math.exp(-1.0)), math.log(2)])
    assert got.chosen_reward.tolist() == [0.75, 0.0]
    assert got.rejected_reward.tolist() == [-0.25, 0.0]
    smooth = dpo_loss(torch.tensor([1.5]), torch.tensor([-0.5]), beta=0.5, label_smoothing=0.1).loss
    assert smooth.item() == pytest.approx(0.9 * math.log1p(math.exp(-1)) + 0.1 * math.log1p(math.e))


def test_with_label_smoothing_the_optimal_margin_is_finite():
    margin = torch.tensor([math.log(0.8 / 0.2)], dtype=torch.float64, requires_grad=True)
    loss = dpo_loss(margin, torch.zeros(1, dtype=torch.float64), beta=1.0, label_smoothing=0.2).loss
    (slope,) = torch.autograd.grad(loss.sum(), margin)
    assert abs(slope.item()) < 1e-15
    assert not dpo_loss(margin, margin, beta=1.0).chosen_reward.requires_grad


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_large_margins_do_not_overflow_or_lose_their_gradient(smoothing):
    chosen = torch.tensor([-4000.0, 4000.0], requires_grad=True)
    loss = dpo_loss(chosen, torch.zeros(2), beta=0.5, label_smoothing=smoothing).loss
    assert loss.tolist() == pytest.approx([2000 * (1 - smoothing), 2000 * smoothing])
    (slope,) = torch.autograd.grad(loss.sum(), chosen)
    assert slope.tolist() == pytest.approx([-0.5 * (1 - smoothing), 0.5 * smoothing])


@torch.no_grad()
def test_infinite_margins():
    far = torch.tensor([torch.inf, -torch.inf, torch.inf, torch.nan])
    other = torch.tensor([0.0, 0.0, torch.inf, 0.0])
    plain, smooth = (dpo_loss(far, other, beta=1.0, label_smoothing=s).loss.tolist() for s in (0.0, 0.1))
    assert plain[:2] == [0.0, torch.inf] and math.isnan(plain[2]) and math.isnan(plain[3])
    assert smooth[:2] == [torch.inf, torch.inf] and math.isnan(smooth[2])
    assert implicit_reward(torch.tensor([-100.0]), beta=1.0, divergence="reverse_kl").item() == -torch.inf
    assert implicit_reward(torch.tensor([100.0]), beta=1.0, divergence="chi_squared").item() == torch.inf


@pytest.mark.parametrize(
    ("name", "far"), [("reverse_kl", 100.0), ("jeffreys", 100.0), ("chi_squared", -100.0)]
)
def test_a_won_pair_whose_score_overflows_has_gradient_0(name, far):
    chosen, rejected = (torch.tensor([x, 1.0], requires_grad=True) for x in (max(0.0, -far), min(0.0, -far)))
    loss = dpo_loss(chosen, rejected, beta=0.1, divergence=name).loss
    slopes = torch.autograd.grad(loss.sum(), (chosen, rejected))
    assert loss[0] == slopes[0][0] == slopes[1][0] == 0
    assert slopes[0][1] < 0 < slopes[1][1]


def test_response_log_ratio_sums_unmasked_tokens():
    token_logp = torch.tensor([[torch.nan, -1.0, -2.0, torch.inf], [-1.0, -1.0, -1.0, -1.0]])
    token_logq = torch.tensor([[0.0, -1.5, -2.25, torch.inf], [-2.0, -1.0, -1.0, torch.nan]])
    mask = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 0]])
    token_logp.requires_grad_()
    ratio = response_log_ratio(token_logp, token_logq, mask)
    assert ratio.tolist() == [0.75, 0.0]
    (slope,) = torch.autograd.grad(ratio.sum(), token_logp)
    assert torch.equal(slope, mask.float())


ONE = torch.zeros(1, requires_grad=True)
FLAT, ROOT = "skew_kl:1", replace(DIVERGENCES["kl"], finish=torch.sqrt)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: dpo_loss(torch.zeros(1), torch.zeros(1), beta=1.0), DetachedError, "chosen_log_ratio"),
        (lambda: response_log_ratio(torch.zeros(1, 1), ONE[None], ONE[None] > 0), DetachedError, "p carries"),
        (lambda: dpo_loss(ONE, ONE, beta=0.0), OptionError, "beta is 0.0; give a finite number above 0"),
        (lambda: implicit_reward(ONE, beta=math.nan), OptionError, "beta is nan"),
        (lambda: dpo_loss(ONE, ONE, beta=1.0, label_smoothing=0.5), OptionError, "label_smoothing is 0.5"),
        (lambda: dpo_loss(ONE, ONE, beta=1.0, divergence="kll"), UnknownNameError, "did you mean 'kl'"),
        (lambda: implicit_reward(ONE, beta=1.0, divergence=FLAT), OptionError, "does not rise strictly at a"),
        (lambda: implicit_reward(ONE, beta=1.0, divergence=ROOT), OptionError, "a function of a sum, and"),
    ],
)
@pytest.mark.usefixtures("unhooked")
def test_invalid_preference_arguments_are_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()
