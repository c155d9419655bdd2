import math
from functools import partial

import pytest
import torch
from distributions import gradients, log, pairs
from hypothesis import given, settings
from textbook import textbook

from kleash.divergences import alpha_divergence, jensen_shannon, kl, renyi, skew_kl
from kleash.divergences.table import log_mixture
from kleash.errors import OptionError

SHARES = [0.001, 0.3, 0.5, 0.999]
ALPHAS = [-1.5, -0.001, 1e-9, 0.001, 0.2, 0.499, 0.5, 0.9, 0.999, 1 - 1e-9, 1.001, 2.0, 5.0]
ORDERS = [0.01, 0.5, 0.999, 1.001, 2.0, 10.0]


@pytest.mark.parametrize("mix", SHARES)
@settings(max_examples=8)
@given(pair=pairs(spread=1500.0))
def test_mixtures_agree_with_the_textbook(mix, pair):
    skew, of_both = textbook("skew_kl", *pair, mix), textbook("jensen_shannon_of", *pair, mix)
    assert skew_kl(*pair, mix).item() == pytest.approx(skew, rel=1e-9, abs=1e-15)
    assert skew <= -math.log(mix) * (1 + 1e-12)
    assert jensen_shannon(*pair, mix).item() == pytest.approx(of_both, rel=1e-9, abs=1e-15)
    normalised = jensen_shannon(*pair, mix, normalised=True).item()
    assert normalised == pytest.approx(of_both / (mix * (1 - mix)), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("alpha", ALPHAS)
@settings(max_examples=8)
@given(pair=pairs(spread=400.0) | pairs(spread=0.3, zeros=False))
def test_alpha_divergence_agrees_with_the_textbook(alpha, pair):
    expected = textbook("alpha_divergence", *pair, alpha)
    got = alpha_divergence(*pair, alpha).item()
    assert got == pytest.approx(expected, rel=1e-9, abs=1e-14) or min(got, expected) > 1e300


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("spread", [0.3, 2000.0])
@settings(max_examples=8)
@given(data=pairs(spread=1.0))
def test_renyi_agrees_with_the_textbook(order, spread, data):
    pair = [(spread * logits).log_softmax(-1) for logits in data]
    expected = textbook("renyi", *pair, order)
    assert renyi(*pair, order).item() == pytest.approx(expected, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("order", ORDERS)
@settings(max_examples=8)
@given(pair=pairs(spread=100.0))
def test_renyi_gradients_in_float32_are_finite_where_the_sum_would_overflow(order, pair):
    logits = [torch.stack([x, x.roll(1), x / 1000]).float() for x in pair]
    logits = [torch.where(x.isnan(), 0.0, x) for x in logits]
    value = renyi(*(x.log_softmax(-1) for x in logits), order)
    if value.isfinite().all():
        for gradient in gradients(lambda p, q: renyi(p, q, order), *logits):
            assert gradient.isfinite().all()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("spread", [0.05, 3.0])
def test_renyi_gradients_agree_with_finite_differences(order, spread):
    torch.manual_seed(0)
    logits = [(spread * torch.randn(3, 5, dtype=torch.float64)).requires_grad_() for _ in "pq"]
    assert torch.autograd.gradcheck(lambda a, b: renyi(a.log_softmax(-1), b.log_softmax(-1), order), logits)


def test_families_are_continuous_at_their_limits():
    torch.manual_seed(0)
    logp, logq = torch.randn(2, 8, dtype=torch.float64).log_softmax(-1)
    forward, backward = kl(logp, logq), kl(logq, logp)
    normalised = partial(jensen_shannon, normalised=True)
    for at_limit, near_limit, expected in (
        (alpha_divergence(logp, logq, 1.0), alpha_divergence(logp, logq, 1 - 1e-9), forward),
        (alpha_divergence(logp, logq, 0.0), alpha_divergence(logp, logq, 1e-9), backward),
        (renyi(logp, logq, 1.0), renyi(logp, logq, 1 + 1e-9), forward),
        (skew_kl(logp, logq, 0.0), skew_kl(logp, logq, 1e-9), forward),
        (skew_kl(logp, logq, 1.0), skew_kl(logp, logq, 1 - 1e-9), torch.zeros_like(forward)),
        (normalised(logp, logq, 0.0), normalised(logp, logq, 1e-9), forward),
        (normalised(logp, logq, 1.0), normalised(logp, logq, 1 - 1e-9), backward),
        (jensen_shannon(logp, logq, 0.0), jensen_shannon(logp, logq, 1e-9), torch.zeros_like(forward)),
        (jensen_shannon(logp, logq, 1.0), jensen_shannon(logp, logq, 1 - 1e-9), torch.zeros_like(forward)),
    ):
        torch.testing.assert_close(at_limit, expected, rtol=1e-12, atol=1e-15)
        torch.testing.assert_close(near_limit, expected, rtol=1e-6, atol=1e-8)


def test_families_on_disjoint_supports():
    logp, logq = log(1, 0), log(0, 1)
    assert skew_kl(logp, logq, 0.2).item() == pytest.approx(-math.log(0.2))
    assert jensen_shannon(logp, logq, 0.2).item() == pytest.approx(-0.2 * math.log(0.2) - 0.8 * math.log(0.8))
    assert alpha_divergence(logp, logq, 0.5).item() == pytest.approx(4)
    assert alpha_divergence(logp, logq, 1.5) == torch.inf
    assert renyi(logp, logq, 0.5) == renyi(logp, logq, 2.0) == torch.inf


@pytest.mark.parametrize("share", [0.0, 1e-6, 0.4, 1 - 1e-6, 1.0])
def test_log_mixture_agrees_with_logaddexp(share):
    v = torch.tensor([-1e4, -30.0, -1e-9, 0.0, 1e-9, 0.99, 1.01, 40.0, 1e4], dtype=torch.float64)
    ends = torch.tensor([1 - share, share], dtype=torch.float64).log().unsqueeze(-1)
    expected = torch.logaddexp(ends[0], ends[1] + v)
    torch.testing.assert_close(log_mixture(share, 1 - share, v), expected, rtol=1e-11, atol=1e-15)


@pytest.mark.parametrize("share", [1e-12, 0.4, 1 - 1e-6])
def test_log_mixture_does_not_cancel_near_zero(share):
    v = torch.tensor([1e-7, -1e-7], dtype=torch.float64)
    torch.testing.assert_close(log_mixture(share, 1 - share, v), share * v, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("function", "wrong", "message"),
    [
        (skew_kl, 1.5, "mix is 1.5; it is a share, from 0 to 1"),
        (jensen_shannon, -0.1, "weight is -0.1; it is a share"),
        (alpha_divergence, math.inf, "alpha is inf; give a finite number"),
        (renyi, 0.0, "order is 0.0; give a finite number above 0"),
    ],
)
def test_invalid_parameters_raise(function, wrong, message):
    with pytest.raises(OptionError, match=message):
        function(log(0.5, 0.5), log(0.5, 0.5), wrong)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("mix", [1e-12, 1e-7, 1e-4])
def test_shares_near_zero_lose_no_accuracy(mix, dtype):
    """1 - mix and 1 + mix are rounded for so small a share."""
    logp, logq = (torch.tensor(x, dtype=torch.float64) for x in ([0.0, -200.0, 50.0], [3.0, 0.0, -70.0]))
    logp, logq = logp.log_softmax(-1), logq.log_softmax(-1)
    mixed = torch.logaddexp(logp + math.log(mix), logq + math.log1p(-mix))
    kl_p, kl_q = kl(logp, mixed).item(), kl(logq, mixed).item()
    p, q = logp.to(dtype).requires_grad_(), logq.to(dtype)
    rel = 1e-5 if dtype == torch.float32 else 1e-12
    value = skew_kl(p, q, mix)
    assert value.item() == pytest.approx(kl_p, rel=rel) and value <= -math.log(mix) * (1 + rel)
    assert torch.autograd.grad(value, p)[0].isfinite().all()
    jensen_shannon_value = jensen_shannon(p, q, mix)
    assert jensen_shannon_value.item() == pytest.approx(mix * kl_p + (1 - mix) * kl_q, rel=rel)


@pytest.mark.parametrize("order", [0.5, 2.0])
def test_renyi_of_close_pairs_is_accurate_in_float32(order):
    torch.manual_seed(3)
    logits = torch.randn(8, 2000)
    moved = logits + 1e-3 * torch.randn(8, 2000)
    expected = renyi(logits.double().log_softmax(-1), moved.double().log_softmax(-1), order)
    got = renyi(logits.log_softmax(-1), moved.log_softmax(-1), order)
    assert ((got - expected).abs() / expected).max() < 1e-3
