"""Any divergence of the table from hidden states: value and gradient, in every implementation."""

import numpy as np
import pytest
import torch
from linear_cases import (
    CHUNKED,
    EVERY,
    PLAIN,
    REFERENCE,
    SMALL,
    TINY,
    head_case,
    in_float64,
    leaves_of,
    logp_by_numpy,
    relative_rms,
)
from scipy.special import rel_entr

from kleash.divergences import DIVERGENCES, alpha_record, jensen_shannon_record, skew_kl_record
from kleash.linear import Head, linear_divergence, linear_divergence_loss


def mixed(weight):
    def value(p, q):
        m = weight * p + (1 - weight) * q
        return weight * rel_entr(p, m).sum(-1) + (1 - weight) * rel_entr(q, m).sum(-1)

    return value


NUMPY_VALUES = {
    "kl": ("kl", lambda p, q: rel_entr(p, q).sum(-1)),
    "reverse_kl": ("reverse_kl", lambda p, q: rel_entr(q, p).sum(-1)),
    "jeffreys": ("jeffreys", lambda p, q: ((p - q) * np.log(p / q)).sum(-1)),
    "jensen_shannon": ("jensen_shannon", mixed(0.5)),
    "jensen_shannon .2": (jensen_shannon_record(0.2), mixed(0.2)),
    "jensen_shannon .9 normalised": (jensen_shannon_record(0.9, True), lambda p, q: mixed(0.9)(p, q) / 0.09),
    "skew .1": (skew_kl_record(0.1), lambda p, q: rel_entr(p, 0.1 * p + 0.9 * q).sum(-1)),
    "alpha .3": (alpha_record(0.3), lambda p, q: ((p**0.3 * q**0.7).sum(-1) - 1) / (0.3 * -0.7)),
    "alpha 0": (alpha_record(0.0), lambda p, q: rel_entr(q, p).sum(-1)),
    "alpha 1.5": (alpha_record(1.5), lambda p, q: ((p**1.5 * q**-0.5).sum(-1) - 1) / 0.75),
    "chi_squared": ("chi_squared", lambda p, q: ((p - q) ** 2 / q).sum(-1)),
    "total_variation": ("total_variation", lambda p, q: abs(p - q).sum(-1) / 2),
    "hellinger": ("hellinger", lambda p, q: np.sqrt(((np.sqrt(p) - np.sqrt(q)) ** 2).sum(-1) / 2)),
}
ALL = pytest.mark.parametrize(("record", "numpy_value"), NUMPY_VALUES.values(), ids=NUMPY_VALUES.keys())


def test_every_divergence_of_the_table_is_tested():
    assert {record for record, _ in NUMPY_VALUES.values() if isinstance(record, str)} == set(DIVERGENCES)


@ALL
@EVERY
def test_values_equal_numpy_in_float64(options, record, numpy_value):
    case = head_case(torch.float64, distance=0.7, tokens=(3, 5), vocab_size=101, bias=True, softcap=6.0)
    temperature = np.float32(1.4)  # whose inverse numpy would round to float32
    logp = logp_by_numpy(case.hidden_p, case.head_p, temperature)
    logq = logp_by_numpy(case.hidden_q, case.head_q, temperature)
    actual = linear_divergence(*case.models, divergence=record, temperature=temperature, options=options)
    right = torch.as_tensor(numpy_value(np.exp(logp), np.exp(logq)))
    torch.testing.assert_close(actual, right, rtol=1e-8, atol=1e-10)


@ALL
def test_gradients_equal_finite_differences(record, numpy_value):
    case = head_case(
        torch.float64, 0.5, tokens=(2,), vocab_size=5, bias=True, softcap=3.0, scale=1.2, temperature=0.8
    )
    tensors, of = leaves_of(case, record)
    assert torch.autograd.gradcheck(of(TINY), tensors, fast_mode=True)


@ALL
@pytest.mark.parametrize(
    ("dtype", "distance"), [(torch.float32, 2.0), (torch.float32, 0.02), (torch.bfloat16, 0.02)], ids=str
)
def test_the_error_is_that_of_float32_logits(dtype, distance, record, numpy_value):
    """Relative RMS error of the value and all gradients of a weighted loss."""
    case = head_case(dtype, distance, bias=True, tokens=(41,))
    weights = torch.linspace(-1, 2, 41)

    def actual(of_case, options):
        tensors, of = leaves_of(of_case, record, weights=weights)
        loss, per_token = of(options)(*tensors)
        return per_token, *torch.autograd.grad(loss, tensors)

    exact, plain, ours = actual(in_float64(case), REFERENCE), actual(case, PLAIN), actual(case, SMALL)
    assert exact[0].median() > 1e-6, "so small a divergence would hide a wrong sign"
    budgets = 1.5, *[2.5 if dtype == torch.bfloat16 else 1.5] * 6
    for number, (right, cheap, mine, budget) in enumerate(zip(exact, plain, ours, budgets, strict=True)):
        assert relative_rms(mine, right) <= budget * relative_rms(cheap, right) + 1e-6, number


@ALL
def test_a_loss_and_values_have_the_same_gradient(record, numpy_value):
    case = head_case(torch.float64, 1.0, tokens=(13,), vocab_size=37, bias=True, softcap=5.0)
    weights = torch.linspace(-1, 2.1, 13, dtype=torch.float64)
    tensors, of = leaves_of(case, record, weights=weights)
    _, per_token_of = leaves_of(case, record)
    loss, per_token = of(SMALL)(*tensors)
    values = per_token_of(REFERENCE)(*tensors)
    torch.testing.assert_close(per_token, values.detach())
    torch.testing.assert_close(loss, (values * weights).sum())
    actual = torch.autograd.grad(3 * loss, tensors)
    for a, b in zip(actual, torch.autograd.grad(3 * (values * weights).sum(), tensors), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("record", ["jensen_shannon", "total_variation", "hellinger"])
def test_bounded_divergences_stay_bounded_where_supports_do_not_meet(record):
    never = -torch.inf
    zp = torch.tensor([[0.0, 1.0, never, never], [0.0, 1.0, 0.5, 2.0], [0.0, 1.0, 0.0, 50.0]])
    zq = torch.tensor([[never, never, 0.0, 1.0], [0.5, 0.0, 0.5, 1.0], [900.0, 1.0, -900.0, 3.0]])
    bound = {"jensen_shannon": torch.tensor(2.0).log(), "total_variation": 1.0, "hellinger": 1.0}[record]
    zp.requires_grad_()
    loss, actual = linear_divergence_loss(
        zp, Head(None), zq, Head(None), weights=torch.ones(3), divergence=record, options=TINY
    )
    assert abs(actual[0] - bound) < 1e-6 and abs(actual[2] - bound) < 1e-2
    loss.backward()
    assert zp.grad.isfinite().all()
    assert zp.grad[1].abs().min() > 0


@pytest.mark.parametrize("record", DIVERGENCES)
def test_gradients_of_pairs_so_far_apart_that_scores_overflow(record):
    """Also where a score is infinite in float64, of a token whose mass underflows."""
    z = torch.tensor(
        [[[0.0, -69.0], [0.0, -50.0], [1.0, -800.0]], [[0.0, -161.0], [1.0, -1550.0], [0.0, -1550.0]]]
    )
    for pair in (z, z.flip(0)):
        grads = []
        for options in (REFERENCE, CHUNKED):
            zp, zq = leaves = [x.clone().requires_grad_() for x in pair]
            models = zp, Head(None), zq, Head(None)
            finite = linear_divergence(*models, divergence=record, options=options).isfinite().float()
            loss = linear_divergence_loss(*models, divergence=record, weights=finite, options=options).loss
            grads.append(torch.autograd.grad(loss, leaves))
        torch.testing.assert_close(grads[1], grads[0], rtol=1e-3, atol=1e-12)
        assert record != "chi_squared" or pair is not z or grads[0][0][0].abs().max() > 1e9
