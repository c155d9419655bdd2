"""Every field of ``ESTIMATORS`` by exact enumeration: expectations are finite sums, without noise."""

import math

import pytest
import torch
from compiling import compiles
from distributions import gradients, log
from hypothesis import given
from hypothesis import strategies as st

from kleash.divergences import kl, total_variation
from kleash.errors import ShapeError, UnknownNameError
from kleash.estimators import ESTIMATORS, absolute, k1, k2, k3, sampled_kl

NAMES = list(ESTIMATORS)
torch.manual_seed(0)
LOGITS_P, LOGITS_Q, LOGITS_MU = torch.randn(3, 8, dtype=torch.float64)
LOGP, LOGQ, LOGMU = (x.log_softmax(-1) for x in (LOGITS_P, LOGITS_Q, LOGITS_MU))

TARGETS = {
    "zero": lambda logp: 0 * logp,
    "KL(p || q)": lambda logp: kl(logp, LOGQ),
    "KL(q || p)": lambda logp: kl(LOGQ, logp),
    "sum |p - q|": lambda logp: 2 * total_variation(logp, LOGQ),
}


def in_p(function):
    """The gradient in the logits of p."""
    return gradients(function, LOGITS_P)[0]


def same(a, b):
    return torch.allclose(a, b, rtol=1e-9, atol=1e-12)


def test_the_names():
    assert NAMES == ["k1", "abs", "k2", "k3"]
    assert [ESTIMATORS[n].of for n in NAMES] == [k1, absolute, k2, k3]
    with pytest.raises(TypeError):
        ESTIMATORS["k4"] = ESTIMATORS["k1"]  # pyright: ignore


def test_values_by_hand():
    """p = .25 and q = .05 on the token: u = ln 5."""
    u = math.log(5)
    expected = {"k1": u, "abs": u, "k2": u * u / 2, "k3": 0.2 - 1 + u}
    for name, value in expected.items():
        there, back = log(0.25), log(0.05)
        assert sampled_kl(there, back, name).item() == pytest.approx(value)
    assert sampled_kl(log(0.05), log(0.25), "k1").item() == pytest.approx(-u)
    assert sampled_kl(log(0.05), log(0.25), "abs").item() == pytest.approx(u)
    assert sampled_kl(log(0.05), log(0.25), "k3").item() == pytest.approx(4 - u)
    assert sampled_kl(log(0.05), log(0.25)).item() == pytest.approx(4 - u), "k3 unless said otherwise"


@pytest.mark.parametrize("name", NAMES)
def test_which_values_are_unbiased(name):
    mean = (LOGP.exp() * sampled_kl(LOGP, LOGQ, name)).sum()
    assert same(mean, kl(LOGP, LOGQ)) is ESTIMATORS[name].unbiased


def test_abs_is_too_large_and_k2_off_at_fourth_order():
    exact = kl(LOGP, LOGQ)
    assert (LOGP.exp() * sampled_kl(LOGP, LOGQ, "abs")).sum() > exact
    direction = torch.tensor([1.0, -1.0], dtype=torch.float64)  # symmetric, so that the third order vanishes
    off = []
    for size in (0.1, 0.05):
        logp, logq = (size * direction).log_softmax(-1), (-size * direction).log_softmax(-1)
        off.append(((logp.exp() * k2(logp - logq)).sum() - kl(logp, logq)).item())
    assert off[0] / off[1] == pytest.approx(16, rel=0.02)


@pytest.mark.parametrize("name", NAMES)
def test_which_are_never_negative(name):
    u = torch.cat([torch.linspace(-30, 30, 2001, dtype=torch.float64), torch.tensor([1e-9, -1e-9])])
    assert bool((ESTIMATORS[name].of(u) >= 0).all()) is ESTIMATORS[name].never_negative


@given(st.floats(-80, 80, width=32))
def test_k3_is_never_negative_for_any_log_ratio_in_float32(u):
    assert k3(torch.tensor(u)) >= 0


@pytest.mark.parametrize("name", NAMES)
def test_what_backpropagation_follows(name):
    """As a loss, on samples of the current p: E_p[grad estimator], p itself a constant."""
    drawn = in_p(lambda logp: logp.exp().detach() * sampled_kl(logp, LOGQ, name))
    followed = {what for what, target in TARGETS.items() if same(drawn, in_p(target))}
    assert followed == {ESTIMATORS[name].backpropagated}


@pytest.mark.parametrize("name", NAMES)
def test_which_are_right_as_a_reward(name):
    """Detached, times the score: E_p[sg(estimator) grad log p]."""
    drawn = in_p(lambda logp: logp.exp().detach() * sampled_kl(logp, LOGQ, name).detach() * logp)
    assert same(drawn, in_p(TARGETS["KL(p || q)"])) is ESTIMATORS[name].right_as_reward


def test_k3_as_a_reward_follows_the_difference_of_the_two_directions():
    drawn = in_p(lambda logp: logp.exp().detach() * sampled_kl(logp, LOGQ, "k3").detach() * logp)
    expected = in_p(TARGETS["KL(p || q)"]) - in_p(TARGETS["KL(q || p)"])
    torch.testing.assert_close(drawn, expected)


@pytest.mark.parametrize(
    ("name", "attached", "right"),
    [
        ("k1", True, True),
        ("k2", False, True),
        ("k2", True, False),
        ("k3", True, True),
        ("k3", False, False),
    ],
)
def test_which_weight_makes_the_gradient_right_off_policy(name, attached, right):
    """Samples of mu, each weighted by rho = p / mu, with or without the gradient of the weight."""

    def surrogate(logp):
        rho = (logp - LOGMU).exp()
        return LOGMU.exp() * (rho if attached else rho.detach()) * sampled_kl(logp, LOGQ, name)

    assert same(in_p(surrogate), in_p(TARGETS["KL(p || q)"])) is right


def test_a_detached_weight_on_k3_follows_the_other_direction():
    drawn = in_p(lambda logp: LOGMU.exp() * (logp - LOGMU).exp().detach() * sampled_kl(logp, LOGQ, "k3"))
    torch.testing.assert_close(drawn, in_p(TARGETS["KL(q || p)"]))


def test_off_policy_values_need_the_weight():
    exact, mu = kl(LOGP, LOGQ), LOGMU.exp()
    for name in ("k1", "k3"):
        values = sampled_kl(LOGP, LOGQ, name)
        assert not same((mu * values).sum(), exact)
        assert same((mu * (LOGP - LOGMU).exp() * values).sum(), exact)


def test_value_of_k3_with_the_gradient_of_k2():
    def straight_through(logp):
        second, third = sampled_kl(logp, LOGQ, "k2"), sampled_kl(logp, LOGQ, "k3")
        return logp.exp().detach() * (third.detach() + second - second.detach())

    assert same(straight_through(LOGP).sum(), kl(LOGP, LOGQ))
    assert same(in_p(straight_through), in_p(TARGETS["KL(p || q)"]))


def test_every_k1_plus_a_multiple_of_the_weight_is_unbiased():
    u = LOGP - LOGQ
    for a in (-1.0, 0.3, 1.0, 2.0):
        assert same((LOGP.exp() * (u + a * torch.expm1(-u))).sum(), kl(LOGP, LOGQ))
    assert same(k3(u), u + torch.expm1(-u))


def test_the_best_multiple_is_the_regression_and_is_not_k3():
    """a = -Cov(u, w) / Var(w) under p; the variance has its minimum there."""
    u = LOGP - LOGQ
    p, w = LOGP.exp(), torch.exp(-(LOGP - LOGQ))

    def covariance(x, y):
        return (p * (x - (p * x).sum()) * (y - (p * y).sum())).sum()

    def variance(a):
        return covariance(u + a * (w - 1), u + a * (w - 1)).item()

    best = (-covariance(u, w) / covariance(w, w)).item()
    assert abs(best - 1) > 0.01
    assert variance(best) < min(variance(best - 0.1), variance(best + 0.1), variance(0.0), variance(1.0))


def test_the_usual_clamp_has_no_gradient_where_the_drift_is_largest_and_ours_has():
    drifted = torch.tensor([-2.7, 11.5, -30.0], requires_grad=True)
    clamped = (torch.exp((-drifted).clamp(-20, 20)) - 1 + drifted).clamp(-10, 10)
    (dead,) = torch.autograd.grad(clamped.sum(), drifted)
    (alive,) = torch.autograd.grad(k3(drifted).sum(), drifted)
    assert (dead == 0).all()
    torch.testing.assert_close(alive, 1 - torch.exp(-drifted.detach()))


def test_half_precision_is_subtracted_in_float32():
    token_logp, token_logq = torch.tensor([-9.0]).bfloat16(), torch.tensor([-9.0625]).bfloat16()
    for name in NAMES:
        value = sampled_kl(token_logp, token_logq, name)
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, sampled_kl(token_logp.float(), token_logq.float(), name))
    value = sampled_kl(torch.tensor([-1.0]).bfloat16(), torch.tensor([-1.01], dtype=torch.float32), "k1")
    assert value.item() == pytest.approx(0.01, rel=1e-4)


def test_a_token_that_q_rules_out_is_infinite_in_every_estimator():
    for name in NAMES:
        assert sampled_kl(torch.tensor([-1.0]), torch.tensor([-torch.inf]), name).item() == torch.inf


@pytest.mark.parametrize("name", NAMES)
def test_the_same_is_exactly_zero_and_empty_stays_empty(name):
    token_logp = torch.tensor([[-3.7, -0.1]])
    assert sampled_kl(token_logp, token_logp, name).tolist() == [[0, 0]]
    assert sampled_kl(token_logp[:0], token_logp[:0], name).shape == (0, 2)


def test_shapes_and_names_that_do_not_fit(unhooked):
    with pytest.raises(
        ShapeError, match=r"token_logp is \(2, 3\) and token_logq \(3,\); give the same tokens"
    ):
        sampled_kl(torch.zeros(2, 3), torch.zeros(3))
    with pytest.raises(UnknownNameError, match=r"no estimator is called 'k5'; there are k1, abs, k2, k3"):
        sampled_kl(torch.zeros(2), torch.zeros(2), "k5")


@compiles
@pytest.mark.parametrize("name", NAMES)
def test_compiles_in_one_piece(name, compiler):
    compiled = torch.compile(lambda a, b: sampled_kl(a, b, name), fullgraph=True, backend="aot_eager")
    a, b = torch.linspace(-3, 0, 20), torch.linspace(-1, -2, 20)
    torch.testing.assert_close(compiled(a, b), sampled_kl(a, b, name))
