"""What the audit says of the estimators is what ESTIMATORS promises and what the theory gives."""

import itertools
from dataclasses import replace

import pytest
import torch
from single_faults import rho, u_of

import kleash
from kleash.auditing import audit, from_fields
from kleash.auditing.quantities import OF_FAMILIES
from kleash.divergences import divergence
from kleash.estimators import ESTIMATORS

FOLLOWS = {"zero": "zero", "sum |p - q|": "sum |p - q|", "KL(p ‖ q)": "KL(p ‖ q)", "KL(q ‖ p)": "KL(q ‖ p)"}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_audits_confirm_the_contracts_of_estimators(name):
    record = ESTIMATORS[name]
    as_loss, as_reward = (audit(lambda p, q: record.of(u_of(p, q)), place) for place in ("loss", "reward"))
    assert as_loss.estimator == as_reward.estimator == name
    assert (as_loss.value == "KL(p ‖ q)") is record.unbiased
    assert ("negative_values" not in {f.kind for f in as_loss.findings}) is record.never_negative
    assert as_loss.gradient == FOLLOWS[record.backpropagated]
    assert (as_reward.gradient == "KL(p ‖ q)") is record.right_as_reward
    if name == "k1":  # its trainer weighs it
        assert {f.kind for f in as_reward.findings} == {"off_policy_value", "negative_values"}
        assert "follows KL(p ‖ q) between whole responses, as it should" in as_reward.verdict[1]


def skewed(p, q, mix=0.1):
    return (p * (p / (mix * p + (1 - mix) * q)).log()).sum(-1)


@pytest.mark.parametrize(
    ("function", "claims", "exchanged"),
    [
        (lambda p, q: 0.1 * skewed(p, q) + 0.9 * skewed(q, p, 0.9), "jensen_shannon:0.1", "jensen_shannon:0.9"),
        (skewed, "skew_kl:0.1", "skew_reverse_kl:0.1"),
        (lambda p, q: ((p**0.3 * q**0.7).sum(-1) - 1) / (0.3 * -0.7), "alpha:0.3", "alpha:0.7"),
    ],
)  # fmt: skip
def test_divergences_with_a_parameter_can_be_claimed(function, claims, exchanged):
    """TRL's JSD with beta 0.9, DistiLLM's skew KL, and the alpha divergence."""
    right, wrong = (audit(function, f"f(probs_p, probs_q) -> {name}") for name in (claims, exchanged))
    assert (right.value, right.gradient) == (claims, claims) and "wrong" not in {
        f.severity for f in right.faults
    }
    assert wrong.value == wrong.gradient == f"{exchanged}, p and q exchanged"
    assert {f.kind for f in wrong.faults if f.severity == "wrong"} == {"wrong_direction", "wrong_gradient"}
    assert claims not in OF_FAMILIES or audit(function, "probabilities").gradient == claims
    p, q = torch.tensor([[0.2, 0.8], [0.7, 0.3]], dtype=torch.float64)
    torch.testing.assert_close(divergence(claims, p.log(), q.log()), function(p, q))


def k(name):
    return ESTIMATORS[name].of


RIGHT = "KL(p ‖ q)"
HALF_SQUARE = "E_p (log p - log q)^2 / 2"


@pytest.mark.parametrize(
    ("function", "value", "gradient", "off_policy_value", "off_policy_gradient"),
    [
        (lambda p, q, b: rho(p, b) * u_of(p, q), RIGHT, RIGHT, True, True),
        (lambda p, q, b: rho(p, b) * k("k3")(u_of(p, q)), RIGHT, RIGHT, True, True),
        (lambda p, q, b: rho(p, b).detach() * k("k2")(u_of(p, q)), HALF_SQUARE, RIGHT, True, True),
        (lambda p, q, b: rho(p, b) * k("k2")(u_of(p, q)), HALF_SQUARE, HALF_SQUARE, True, None),
        (lambda p, q, b: rho(p, b).detach() * k("k3")(u_of(p, q)), RIGHT, "KL(q ‖ p)", True, None),
        (lambda p, q, b: k("k2")(u_of(p, q)), HALF_SQUARE, RIGHT, False, False),
        (lambda p, q, b: rho(p, p.detach()) * k("k3")(u_of(p, q)), RIGHT, RIGHT, False, False),
    ],
    ids=["rho k1", "rho k3", "sg(rho) k2", "rho k2", "sg(rho) k3", "k2", "r k3"],
)
def test_off_policy_surrogates(function, value, gradient, off_policy_value, off_policy_gradient):
    found = audit(function, "loss_with_behaviour")
    kinds = {finding.kind for finding in found.faults}
    assert (found.value, found.gradient) == (value, gradient)
    assert ("off_policy_value" not in kinds) is off_policy_value
    if off_policy_gradient is not None:
        assert ("off_policy_gradient" not in kinds) is off_policy_gradient


def sequence_error(function, convention, sampling="on-policy"):
    """Relative error against the gradient of the KL between whole responses."""
    rows = audit(function, convention).gradients
    return next(r.relative_error for r in rows if r.target.startswith("sequence") and r.sampling == sampling)


SUMMED = from_fields("summed", "token_logp", "token_logq", "behaviour_logp", "mask", gives="sequence")
EXACT = from_fields("exact", "logp", "logq", "token_logp", gives="sequence")


def exact_with_future(logp, logq, token_logp):
    each = kleash.kl(logp, logq)
    later = each.detach().flip(-1).cumsum(-1).flip(-1) - each.detach()
    return (each + token_logp * later).sum(-1)


def prefix_weighted_k3(p, q, b, mask):
    return ((p - b).cumsum(-1).exp() * k("k3")(u_of(p, q))).sum(-1)


def test_rounding_does_not_split_a_zone():
    found = audit(lambda p, q: kleash.kl(p, q.clamp(min=-10)), "log_probabilities")
    (zone,) = [zone for zone in found.zones if zone.kind == "value"]
    assert 9.5 < zone.low < 11 and zone.high == torch.inf


@pytest.mark.parametrize(
    ("function", "right"),
    [(prefix_weighted_k3, True), (lambda p, q, b, mask: (rho(p, b) * k("k3")(u_of(p, q))).sum(-1), False)],
    ids=["rho_1:t k3", "rho_t k3"],
)
def test_only_prefix_weights_follow_the_sequence_kl_off_policy(function, right):
    error = sequence_error(function, SUMMED, "off-policy")
    assert (error < 1e-9) is right
    assert right or error > 0.1


@pytest.mark.parametrize("level", ["token", "prefix", "sequence"])
def test_importance_weights_estimate_their_level(level):
    def function(p, q, b, mask):
        weights = kleash.importance_weights(p.detach(), b, mask, level=level).values
        return kleash.kl_loss(p, q, mask, estimator="k1", weights=weights)

    found = audit(function, "loss_with_behaviour_and_mask")
    levels = {"token": "of the next token along the behaviour's prefixes"}
    along = levels.get(level, "between whole responses")
    if level == "sequence":
        rows = {r.level: r for r in found.values if r.pair == "sequences" and r.sampling == "off-policy"}
        assert rows["sequence"].bias == pytest.approx(0, abs=1e-12)
    assert f"Off-policy its value is KL(p ‖ q) {along}." in found.verdict


def test_a_gradient_masked_at_large_log_ratios_is_dead_while_the_value_is_not_flat():
    def function(p, q):
        u = u_of(p, q)
        return torch.where(u.abs() < 9, u, u.detach()).square() / 2

    found = audit(function, "loss")
    assert {"dead_gradient"} <= {finding.kind for finding in found.faults}
    assert not [zone for zone in found.zones if zone.kind == "value"]
    assert [(z.low, z.high) for z in found.zones] == [
        (-torch.inf, pytest.approx(-9, abs=1e-4)),
        (pytest.approx(9, abs=1e-4), torch.inf),
    ]


def test_a_gradient_rounded_to_zero_is_distinguished_from_a_clamp():
    """r k3 is a difference of two numbers of the size of q / p, and float32 has 24 bits."""
    found = audit(lambda p, q: (p - p.detach()).exp() * k("k3")(p - q), "loss")
    assert "dead_gradient" not in {finding.kind for finding in found.findings}
    nan = next(zone for zone in found.zones if zone.kind == "gradient is NaN")
    assert nan.high == pytest.approx(-torch.tensor(torch.finfo(torch.float32).max).log().item(), abs=1e-3)


ROWS = [[0.3, -0.5], [1.1, 0.2], [-0.4, 0.6]]
"""Logits of a Markov policy over two tokens: of the first token, and after each of them."""
REFERENCE_ROWS = [[-0.2, 0.4], [0.1, 0.9], [0.7, -0.3]]


def log_ratios_and_probabilities():
    """The policy's logits, and of each of its four responses of two tokens: log p, log q [4, 2]."""
    logits = torch.tensor(ROWS, dtype=torch.float64, requires_grad=True)
    logp = logits.log_softmax(-1)
    logq = torch.tensor(REFERENCE_ROWS, dtype=torch.float64).log_softmax(-1)
    responses = list(itertools.product((0, 1), repeat=2))
    p, q = (torch.stack([torch.stack([x[0, a], x[1 + a, b]]) for a, b in responses]) for x in (logp, logq))
    return logits, p, q


def of_distributions(name, p, q):
    """A quantity of two lists of log-probabilities."""
    u = p - q
    return {
        "KL(p ‖ q)": (p.exp() * u).sum(),
        "KL(q ‖ p)": (q.exp() * -u).sum(),
        "KL(p ‖ q) - KL(q ‖ p)": (p.exp() * u).sum() + (q.exp() * u).sum(),
        HALF_SQUARE: (p.exp() * u.square() / 2).sum(),
        "zero": 0 * p.sum(),
    }[name]


def enumerated(name, level):
    """A quantity of the Markov pair and its gradient, enumerated: of each token along the prefixes, or of responses."""
    logits, p, q = log_ratios_and_probabilities()
    if level == "sequence":
        value = of_distributions(name, p.sum(-1), q.sum(-1))
    else:
        value = of_distributions(name, p[[0, 2], 0], q[[0, 2], 0])
        for first in (0, 1):
            rows = slice(2 * first, 2 * first + 2)
            value = value + p[2 * first, 0].exp().detach() * of_distributions(name, p[rows, 1], q[rows, 1])
    return value.item(), torch.autograd.grad(value, logits)[0]


def enumerated_levels(function, place, value_name, gradient_name):
    """The levels at which a function of [4, 2] log-probabilities has these quantities as its mean and mean gradient."""
    logits, p, q = log_ratios_and_probabilities()
    values = function(p, q)
    weights = p.detach().sum(-1).exp()
    surrogate = values if place == "loss" else values.detach() * p.sum(-1)
    mean = (weights * values).sum().item()
    (gradient,) = torch.autograd.grad((weights * surrogate).sum(), logits)

    def level_of(matches):
        levels = [level for level in ("token", "sequence") if matches(level)]
        return {0: "neither", 1: levels[0] if levels else "", 2: "both"}[len(levels)]

    of_value = level_of(lambda level: enumerated(value_name, level)[0] == pytest.approx(mean, rel=1e-9))
    near = {"rtol": 1e-9, "atol": 1e-12}
    of_gradient = level_of(
        lambda level: torch.allclose(enumerated(gradient_name, level)[1], gradient, **near)
    )
    return of_value, "" if gradient_name == "zero" else of_gradient


@pytest.mark.parametrize(
    ("name", "is_of_sum", "place", "value", "gradient"),
    [
        ("k1", False, "loss", RIGHT, "zero"),
        ("k1", True, "loss", RIGHT, "zero"),
        ("k1", True, "reward", RIGHT, RIGHT),
        ("k2", False, "loss", HALF_SQUARE, RIGHT),
        ("k2", True, "loss", HALF_SQUARE, RIGHT),
        ("k3", False, "loss", RIGHT, "KL(q ‖ p)"),
        ("k3", True, "loss", RIGHT, "KL(q ‖ p)"),
        ("k3", False, "reward", RIGHT, "KL(p ‖ q) - KL(q ‖ p)"),
        ("k3", True, "reward", RIGHT, "KL(p ‖ q) - KL(q ‖ p)"),
    ],
)
def test_an_estimator_of_the_summed_log_ratio_is_told_from_the_sum_over_tokens(
    name, is_of_sum, place, value, gradient
):
    def function(p, q):
        u = u_of(p, q)
        return k(name)(u.sum(-1)) if is_of_sum else k(name)(u).sum(-1)

    found = audit(function, f"sequence_{place}")
    of_value, of_gradient = enumerated_levels(function, place, value, gradient)
    assert (found.value, found.gradient.removesuffix(" for one token")) == (value, gradient)
    assert (found.value_level, found.gradient_level) == (of_value, of_gradient)
    assert found.estimator_level == ("both" if name == "k1" else "sequence" if is_of_sum else "token")
    assert ("summed log ratio" in found.verdict[0]) is (found.estimator_level == "sequence")
    words = {"token": "token by token", "sequence": "between whole responses"}
    assert words.get(of_gradient, "") in found.verdict[1]


@pytest.mark.parametrize("convention", ["sequence_loss", "mean_loss", "loss"])
def test_the_level_is_named_whatever_the_shape_of_the_result(convention):
    def function(p, q):
        of_responses = k("k3")(u_of(p, q).sum(-1))
        match convention:
            case "mean_loss":
                return of_responses.mean()
            case "loss":  # an equal share of each token
                return of_responses.unsqueeze(-1).expand_as(p) / p.shape[-1]
        return of_responses

    found = audit(function, convention)
    assert found.estimator_level == "sequence" and "summed log ratio" in found.verdict[0]
    assert found.gradient.startswith("KL(q ‖ p)") and "between whole responses" in found.verdict[1]
    assert ("3 times" in found.verdict[1]) is (convention == "mean_loss")


@pytest.mark.parametrize("claims", ["kl", "reverse_kl"])
def test_the_exact_divergence_between_responses_is_told_from_the_sum_over_tokens(claims):
    convention = replace(EXACT, claims=claims)
    by_token = audit(lambda logp, logq, _: divergence(claims, logp, logq).sum(-1), convention)
    assert by_token.gradient_level == "token"
    assert by_token.value_level == ("both" if claims == "kl" else "token")
    if claims == "kl":
        assert audit(exact_with_future, convention).gradient_level == "sequence"
