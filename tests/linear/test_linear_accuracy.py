"""Near models with bfloat16 inputs: error of values below 0.1 %, direction of gradients, no negative value."""

import pytest
import torch
from linear_cases import CHUNKED, REFERENCE, SMALL, head_case, in_float64, leaves_of

from kleash.divergences import DIVERGENCES, alpha_record, jensen_shannon_record, skew_kl_record
from kleash.linear import Head, linear_divergence, linear_divergence_loss, linear_kl_loss, linear_objective

RECORDS = {name: name for name in DIVERGENCES} | {
    "jensen_shannon .1": jensen_shannon_record(0.1),
    "jensen_shannon .9 normalised": jensen_shannon_record(0.9, True),
    "skew .1": skew_kl_record(0.1),
    "alpha .3": alpha_record(0.3),
    "alpha 1.5": alpha_record(1.5),
}
OF_ALL = pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS.keys())


def near(steps):
    """Two bfloat16 models with one body, whose heads differ by a rounding step in some entries, and by a bias."""
    case = head_case(torch.bfloat16, 1e-4, tokens=(33,), vocab_size=401)
    case.hidden_q = case.hidden_q.clone()
    case.hidden_q[:, :13] = case.hidden_p
    case.head_p = Head(case.head_p.weight, torch.zeros(401).bfloat16())
    case.head_q = Head(case.head_q.weight, torch.full((401,), steps * 2e-3).bfloat16())
    case.head_q.bias[::3] = 0.0
    return case


@OF_ALL
@pytest.mark.parametrize("steps", [1.0, 20.0], ids=["1e-6", "1e-4"])
def test_values_and_gradients_of_near_models_from_bfloat16(steps, record):
    weights, case = torch.linspace(0.5, 1.5, 33), near(steps)

    def actual(each, options):
        tensors, of = leaves_of(each, record, weights=weights)
        loss, per_token = of(options)(*tensors)
        return per_token.double(), [x.double() for x in torch.autograd.grad(loss, tensors)]

    exact, right = actual(in_float64(case), REFERENCE)
    assert_near(record, steps, (exact, right), actual(case, SMALL))


def assert_near(record, steps, right_ones, actual):
    (exact, right), (ours, mine) = right_ones, actual
    if record == "kl":
        assert 0.1 < exact.median() / (1e-6 * steps**2) < 4
    # Total variation is of first order in the difference, and so is what the logits' rounding does to it.
    assert ((ours - exact).abs() / exact).max() < (5e-3 if record == "total_variation" else 1e-3)
    for a, b in zip(right, mine, strict=True):
        assert torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0) > 0.999


def test_an_objective_of_near_models_from_bfloat16():
    case = near(1.0)
    actual = []
    for each, choice in ((in_float64(case), REFERENCE), (case, SMALL)):
        tensors, _ = leaves_of(each)
        hp, wp, bp, hq, wq, bq = tensors
        loss, terms = linear_objective(
            hp, Head(wp, bp), each.tokens, hq, Head(wq, bq), lambda t, rows: t.kl, options=choice
        )
        actual.append((terms.kl.double(), [x.double() for x in torch.autograd.grad(loss, tensors)]))
    assert_near("kl", 1.0, *actual)


@OF_ALL
def test_no_divergence_is_negative(record):
    for distance in (1e-2, 1e-4, 1e-6, 1e-7, 3e-8):
        case = head_case(torch.float32, distance, tokens=(150,))
        weights = torch.ones(150)
        for options in (REFERENCE, CHUNKED):
            values = linear_divergence(*case.models, divergence=record, options=options)
            assert values.min() >= 0, (distance, options.impl)
        case.head_p.weight.requires_grad_()
        formed = linear_divergence_loss(*case.models, weights=weights, divergence=record, options=CHUNKED)
        assert formed.per_token.min() >= 0, distance
        if distance >= 1e-4:
            assert formed.per_token.max() > 0


def test_no_kl_of_an_objective_is_negative():
    for distance in (1e-2, 1e-6, 3e-8):
        case = head_case(torch.float32, distance, tokens=(150,))
        case.head_p.weight.requires_grad_()
        _, terms = linear_objective(*case.models[:2], case.tokens, *case.models[2:], lambda t, rows: t.kl)
        same = linear_kl_loss(*case.models, weights=torch.ones(150), options=CHUNKED).per_token
        assert terms.kl.min() >= 0 and terms.entropy.min() >= 0
        torch.testing.assert_close(terms.kl, same, rtol=1e-4, atol=1e-14)
