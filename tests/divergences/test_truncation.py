from functools import partial

import pytest
import torch
from distributions import log
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kleash.divergences import at_temperature, truncate
from kleash.errors import OptionError
from kleash.estimators import Semantics


def transformers_distribution(logits, temperature, top_k, top_p, min_p):
    """The distribution that ``generate`` draws from."""
    steps = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    steps += [TopKLogitsWarper(top_k)] if top_k is not None else []
    steps += [TopPLogitsWarper(top_p)] if top_p is not None and top_p < 1 else []
    steps += [MinPLogitsWarper(min_p)] if min_p is not None else []
    ids = torch.zeros(len(logits), 1, dtype=torch.long)
    return steps(ids, logits).log_softmax(-1)


@st.composite
def logits_and_limits(draw):
    rows, vocab = draw(st.integers(1, 3)), draw(st.integers(1, 12))
    # Whole and half numbers, so that ties are common.
    number = st.integers(-8, 8).map(lambda n: n / 2) | st.just(-torch.inf)
    row = st.lists(number, min_size=vocab, max_size=vocab).filter(lambda xs: max(xs) > -torch.inf)
    logits = torch.tensor([draw(row) for _ in range(rows)], dtype=torch.float64)
    return (
        logits,
        draw(st.sampled_from([0.25, 1.0, 1.7])),
        draw(st.none() | st.integers(1, 14)),
        draw(st.none() | st.floats(0.01, 1.0)),
        draw(st.none() | st.floats(0.0, 1.0)),
    )


@settings(max_examples=300)
@given(logits_and_limits())
def test_truncate_agrees_with_the_logits_warpers_of_transformers(request):
    logits, temperature, top_k, top_p, min_p = request
    got = truncate(at_temperature(logits, temperature), top_k=top_k, top_p=top_p, min_p=min_p)
    expected = transformers_distribution(*request)
    torch.testing.assert_close(got.logp, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(got.kept, expected > -torch.inf)
    assert got.kept.any(-1).all()


@given(logits_and_limits())
def test_the_log_kept_mass_is_the_removed_normaliser(request):
    logits, temperature, top_k, top_p, min_p = request
    logp = at_temperature(logits, temperature)
    got = truncate(logp, top_k=top_k, top_p=top_p, min_p=min_p)
    expected = torch.where(got.kept, logp.exp(), 0.0).sum(-1).log()
    torch.testing.assert_close(got.log_kept_mass, expected, rtol=1e-12, atol=1e-14)
    assert (got.log_kept_mass <= 0).all()


def test_a_large_vocabulary_in_float32():
    torch.manual_seed(0)
    logits = 3 * torch.randn(2, 100_000)
    got = truncate(logits.log_softmax(-1), top_k=5000, top_p=0.9, min_p=1e-4)
    expected = transformers_distribution(logits, 1.0, 5000, 0.9, 1e-4)
    assert (got.kept != (expected > -torch.inf)).sum() <= 2, "rounding of a long sum may move the edge"
    assert 0 < got.kept.sum() < 10_000


def test_a_mass_of_exactly_top_p_is_not_exceeded():
    logits = torch.zeros(1, 2, dtype=torch.float64)
    expected = transformers_distribution(logits, 1.0, None, 0.5, None) > -torch.inf
    assert torch.equal(truncate(logits.log_softmax(-1), top_p=0.5).kept, expected)
    assert expected.sum() == 1


def test_the_likeliest_token_always_remains():
    logp = torch.tensor([[0.0, -50.0, -torch.inf], [-50.0, -50.0, 0.0]]).log_softmax(-1)
    got = truncate(logp, top_k=1, top_p=1e-9, min_p=1.0)
    assert got.kept.sum(-1).tolist() == [1, 1]
    assert got.logp.max(-1).values.tolist() == pytest.approx([0, 0], abs=1e-7)


@pytest.mark.parametrize("limits", [{"top_k": 1}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
def test_nan_stays_nan(limits):
    got = truncate(torch.full((2, 3), torch.nan), **limits)
    assert got.logp.isnan().all() and got.log_kept_mass.isnan().all()


def test_without_limits_the_distribution_is_unchanged():
    torch.manual_seed(1)
    logp = (60 * torch.randn(4, 1000)).log_softmax(-1)  # many probabilities underflow
    for got in (truncate(logp), truncate(logp, top_k=5000, top_p=1.0, min_p=0.0)):
        assert torch.equal(got.logp, logp)
        assert (got.log_kept_mass == 0).all() and got.kept.all()


def test_a_small_removed_mass_is_accurate_in_float32():
    logp = torch.tensor([1 - 3e-9, 3e-9], dtype=torch.float64).log().float()
    assert truncate(logp, top_k=1).log_kept_mass.item() == pytest.approx(-3e-9, rel=1e-5)


def test_gradients_are_those_of_the_renormalised_distribution():
    logits = torch.tensor([1.0, 0.5, -1.0, -3.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x: truncate(x.log_softmax(-1), top_p=0.8, top_k=3).logp[:2].exp(), logits
    )
    (gradient,) = torch.autograd.grad(truncate(logits.log_softmax(-1), top_k=2).logp[0], logits)
    inside = logits[:2].softmax(-1)
    expected = torch.tensor([inside[1].item(), -inside[1].item(), 0, 0], dtype=torch.float64)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"top_k": 0}, "top_k is 0; give a finite number, at least 1"),
        ({"top_p": 0.0}, "top_p is 0.0; it is a share above 0, at most 1"),
        ({"top_p": float("nan")}, "top_p is nan"),
        ({"min_p": -0.1}, "min_p is -0.1; it is a share, from 0 to 1"),
    ],
)
def test_invalid_limits_raise(limits, message):
    for refuses in (partial(truncate, log(0.5, 0.5)), Semantics):
        with pytest.raises(OptionError, match=message):
            refuses(**limits)


def test_log_probabilities_of_a_confident_model_are_accurate_in_float32():
    """torch's log_softmax errs by 3e-4."""
    logits = torch.full((152_000,), -17.3)
    logits[7] = 0
    off = at_temperature(logits, 1.0).double() - logits.double().log_softmax(-1)
    assert off.abs().max() < 3e-6


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("inf"), float("nan")])
def test_invalid_temperatures_raise(temperature):
    with pytest.raises(OptionError, match=f"temperature is {temperature}; give a finite number above 0"):
        at_temperature(torch.zeros(2), temperature)
    with pytest.raises(OptionError, match=f"temperature is {temperature}; give a finite number above 0"):
        Semantics(temperature=temperature)


def test_a_small_kept_mass_is_accurate_in_float32():
    logits = torch.zeros(50_000, dtype=torch.float64)
    logits[7] = 1e-3
    logp = logits.log_softmax(-1)
    assert truncate(logp.float(), top_k=1).log_kept_mass.item() == pytest.approx(logp[7].item(), abs=1e-6)
