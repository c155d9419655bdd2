"""The audit's own numbers against sums written by hand with numpy and scipy."""

from itertools import combinations

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.special import rel_entr, softmax
from single_faults import clamped_before, k3, rho, right, u_of

from kleash.auditing import audit
from kleash.auditing.checks.precision import KL_LEVELS, pair_with_kl
from kleash.auditing.quantities import candidates, exact, is_unbounded
from kleash.auditing.toy_distributions import one_token_distributions, toy_distributions
from kleash.divergences import DIVERGENCES, divergence
from kleash.estimators import ESTIMATORS

SAME_QUANTITY = "{} and {} are the same; give them one label in auditing/quantities.py"


def probabilities(name):
    """p, q and the behaviour of a world, over one token."""
    world = toy_distributions()[name]
    sides = (world.logits_p, world.logits_q, world.logits_behaviour)
    return tuple(softmax(side.numpy(), axis=-1)[0] for side in sides)


def value_row(found, world, sampling="on-policy", level="token"):
    return next(r for r in found.values if (r.pair, r.sampling, r.level) == (world, sampling, level))


def gradient_row(found, world, target, sampling="on-policy"):
    return next(r for r in found.gradients if (r.pair, r.sampling, r.target) == (world, sampling, target))


ONE_TOKEN = [world.name for world in one_token_distributions()]


@pytest.fixture(scope="module")
def of_k2():
    return audit(lambda p, q: u_of(p, q).square() / 2, "loss")


@pytest.fixture(scope="module")
def of_k2_as_reward():
    return audit(lambda p, q: u_of(p, q).square() / 2, "reward")


@pytest.fixture(scope="module")
def of_k3():
    return audit(k3, "loss")


@pytest.fixture(scope="module")
def of_plain_k3():
    return audit(lambda p, q: (q - p).exp() - 1 + (p - q), "loss")


@pytest.mark.parametrize("name", ONE_TOKEN)
@pytest.mark.parametrize("sampling", ["on-policy", "off-policy"])
def test_bias_and_standard_deviation_are_moments_under_the_sampling_distribution(of_k2, name, sampling):
    p, q, behaviour = probabilities(name)
    drawn = p if sampling == "on-policy" else behaviour
    k2 = np.log(p / q) ** 2 / 2
    mean = (drawn * k2).sum()
    row = value_row(of_k2, name, sampling)
    assert row.exact == pytest.approx(rel_entr(p, q).sum(), rel=1e-9)
    assert row.expected == pytest.approx(mean, rel=1e-9)
    assert row.bias == pytest.approx(mean - rel_entr(p, q).sum(), rel=1e-6, abs=1e-12)
    assert row.standard_deviation == pytest.approx(np.sqrt((drawn * (k2 - mean) ** 2).sum()), rel=1e-9)
    assert row.lowest == pytest.approx(k2.min(), rel=1e-9)


def test_on_policy_and_off_policy_distributions_differ():
    for name in ONE_TOKEN:
        p, q, behaviour = probabilities(name)
        assert abs(p - behaviour).sum() > 0.02, "a dropped weight would hide"
        assert abs(rel_entr(p, q).sum() / rel_entr(q, p).sum() - 1) > 3e-3, "a swap would hide"


def assert_gradient(row, found, target):
    lengths = np.linalg.norm(found), np.linalg.norm(target)
    assert row.cosine == pytest.approx(found @ target / lengths[0] / lengths[1], abs=1e-9)
    assert row.relative_size == pytest.approx(lengths[0] / lengths[1], rel=1e-9)
    error = np.linalg.norm(found - target) / lengths[1]
    assert row.relative_error == pytest.approx(error, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("name", ONE_TOKEN)
def test_gradient_rows_against_closed_forms(of_k3, of_k2_as_reward, name):
    """In the logits: KL(p ‖ q) gives p (u - KL), k3 gives p - q, off-policy the mean of (1 - q/p) grad log p."""
    p, q, behaviour = probabilities(name)
    u = np.log(p / q)
    found, forward = p - q, p * (u - (p * u).sum())
    assert_gradient(gradient_row(of_k3, name, "KL(q ‖ p)"), found, found)
    assert_gradient(gradient_row(of_k3, name, "KL(p ‖ q)"), found, forward)
    assert_gradient(gradient_row(of_k3, name, "KL(p ‖ q) + KL(q ‖ p)"), found, found + forward)
    weight = behaviour * (1 - q / p)
    assert_gradient(gradient_row(of_k3, name, "KL(q ‖ p)", "off-policy"), weight - p * weight.sum(), found)
    weight = p * u**2 / 2  # a reward multiplies the score function
    assert_gradient(gradient_row(of_k2_as_reward, name, "KL(p ‖ q)"), weight - p * weight.sum(), forward)


def enumerated(side):
    """log-probability of each of the 27 responses, from the logits of 13 prefixes, by plain loops."""
    logp = torch.log_softmax(side, -1).numpy()
    total = {}
    for a in range(3):
        for b in range(3):
            for c in range(3):
                total[a, b, c] = logp[0, a] + logp[1 + a, b] + logp[4 + 3 * a + b, c]
    return np.array(list(total.values()))


def test_sequence_kl_by_enumeration():
    world = toy_distributions()["sequences"]
    logp, logq, logb = (enumerated(s) for s in (world.logits_p, world.logits_q, world.logits_behaviour))
    exact = (np.exp(logp) * (logp - logq)).sum()
    found = audit(lambda p, q, b: rho(p, b) * right(p, q), "loss_with_behaviour")
    assert value_row(found, "sequences", "on-policy", "sequence").exact == pytest.approx(exact, rel=1e-9)
    assert value_row(found, "sequences", "on-policy", "token").exact == pytest.approx(exact, rel=1e-9)
    assert value_row(found, "sequences", "off-policy", "sequence").exact == pytest.approx(exact, rel=1e-9)
    along = value_row(found, "sequences", "off-policy", "token")
    assert along.expected == pytest.approx(along.exact, rel=1e-9)
    assert abs(along.exact / exact - 1) > 0.01
    by_numbers = world.probabilities("off-policy").numpy()
    assert by_numbers == pytest.approx(np.exp(logb), rel=1e-9)


def test_sequence_gradient_by_finite_differences():
    world = toy_distributions()["sequences"]
    found = exact("gradient", world, "on-policy", "KL(p ‖ q)")["sequence"]
    logq, step = enumerated(world.logits_q), 1e-5

    def kl(logits):
        logp = enumerated(logits)
        return (np.exp(logp) * (logp - logq)).sum()

    for prefix, token in ((0, 0), (2, 1), (7, 2), (12, 0)):
        nudge = torch.zeros_like(world.logits_p)
        nudge[prefix, token] = step
        slope = (kl(world.logits_p + nudge) - kl(world.logits_p - nudge)) / (2 * step)
        assert found[prefix, token].item() == pytest.approx(slope, abs=1e-9)


def test_token_gradient_holds_the_prefixes_fixed():
    """Each row is that of the next-token KL, times how often the prefix is reached."""
    world = toy_distributions()["sequences"]
    p, q = (softmax(side.numpy(), axis=-1) for side in (world.logits_p, world.logits_q))
    behaviour = softmax(world.logits_behaviour.numpy(), axis=-1)
    u = np.log(p / q)
    rows = p * (u - (p * u).sum(-1, keepdims=True))
    for sampling, drawn in (("on-policy", p), ("off-policy", behaviour)):
        reached = np.concatenate([[1.0], drawn[0], (drawn[0][:, None] * drawn[1:4]).ravel()])
        found = exact("gradient", world, sampling, "KL(p ‖ q)")["token"].numpy()
        assert found == pytest.approx(reached[:, None] * rows, abs=1e-12)


def test_gradient_candidates_are_distinct():
    """Else one could be taken for the other."""
    far = toy_distributions()["far"]
    for one, other in combinations(candidates("gradient", "KL(p ‖ q)"), 2):
        ours, theirs = (exact("gradient", far, "on-policy", label)["token"] for label in (one, other))
        assert not torch.allclose(ours, theirs, rtol=1e-2), SAME_QUANTITY.format(one, other)


def test_quantity_values_are_distinct():
    """Within what float32 may blur, on all pairs, or on the moderate pairs for the divergences."""
    found = list(candidates("value", "KL(p ‖ q)").items())
    for (one, ours), (other, theirs) in combinations(found, 2):
        assert not np.allclose(ours, theirs, rtol=2e-3, atol=2e-6), SAME_QUANTITY.format(one, other)


def test_zones_of_a_clamped_k3():
    """exp(x) - x - 1 reaches 10 at one positive x; on the other side x alone does, at 11."""
    edge = brentq(lambda x: np.exp(x) - x - 1 - 10, 1, 5)
    zones = [zone for zone in audit(clamped_before, "loss").zones if zone.kind == "gradient"]
    assert [(zone.low, zone.high) for zone in zones] == [
        (-np.inf, pytest.approx(-edge, abs=1e-4)),
        (pytest.approx(11.0, abs=1e-4), np.inf),
    ]
    assert edge == pytest.approx(2.61, abs=0.005)
    assert [zone.value for zone in zones] == [10.0, 10.0]


def test_cancellation_of_the_plain_expression_of_k3(of_plain_k3, of_k3):
    """The error of exp(-u) - 1 + u in float32 on the same float32 log-probabilities."""
    rows = [row for row in of_plain_k3.accuracy if row.dtype == "float32"]
    assert [row.kl for row in rows] == pytest.approx([1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2], rel=0.05)
    assert rows[0].relative_error > 0.1 > 1e-5 > rows[-1].relative_error
    assert max(row.unavoidable_error for row in rows) < 1e-6
    careful = [row for row in of_k3.accuracy if row.dtype == "float32"]
    assert max(row.relative_error for row in careful) < 1e-6


@pytest.mark.parametrize("level", range(7))
def test_the_error_is_against_float64_on_the_rounded_inputs(of_plain_k3, level):
    """Recomputed for the plain expression of k3, and for the careful one."""
    row = of_plain_k3.accuracy[level]
    pair = pair_with_kl(KL_LEVELS[level])
    p, q = (side.log_softmax(-1).float() for side in pair)
    u = p.double() - q.double()
    exact = (torch.expm1(-u) + u).numpy()
    with_series = u.numpy() ** 2 / 2 - u.numpy() ** 3 / 6 + u.numpy() ** 4 / 24 - u.numpy() ** 5 / 120
    exact = np.where(abs(u.numpy()) < 1e-2, with_series, exact)
    for found, error in (
        ((q - p).exp() - 1 + (p - q), row.relative_error),
        (ESTIMATORS["k3"].of(p - q), row.unavoidable_error),
    ):
        mine = np.linalg.norm(found.double().numpy() - exact) / np.linalg.norm(exact)
        assert error == pytest.approx(mine, rel=1e-3)
        assert error > 1e-10


def test_the_divergences_whose_saturation_is_a_fault_are_infinite_for_disjoint_supports():
    logp = torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64).log()
    logq = torch.tensor([[0.0, 0.5, 0.5]], dtype=torch.float64).log()
    names = {*DIVERGENCES, "jensen_shannon:0.1", "skew_kl:0.1", "alpha:0.5", "alpha:2"}
    infinite = {name for name in names if divergence(name, logp, logq).isinf().all()}
    assert set(filter(is_unbounded, names)) == infinite and {"kl", "chi_squared", "alpha:2"} <= infinite
