import math
from decimal import Decimal, localcontext

import pytest
import torch
from compiling import compiles
from hypothesis import example, given
from hypothesis import strategies as st

from kleash.divergences import phi
from kleash.errors import OptionError
from kleash.estimators import ESTIMATORS, bounded_k3, k3, sampled
from kleash.estimators.sampled import continued_k3, largest_log_ratio, log_ratio_and_k3


def k3_in_decimals(u: float) -> float:
    with localcontext() as context:
        context.prec = 60
        return float((-Decimal(u)).exp() - 1 + Decimal(u))


def in_blocks(u):
    """The implementation in blocks, which takes no series, for log ratios to 0."""
    log_ratio, value = log_ratio_and_k3(u, torch.zeros_like(u), torch.ones_like(u, dtype=torch.bool))
    assert torch.equal(log_ratio, u) or u.isnan().any()
    return value


both_implementations = pytest.mark.parametrize("implementation", [continued_k3, in_blocks])


@both_implementations
@given(st.floats(-79, 1000, width=32))
def test_it_is_k3_where_float32_does_not_overflow(implementation, u):
    value = implementation(torch.tensor([u, -0.0], dtype=torch.float32))
    assert value.dtype == torch.float32
    exact = k3_in_decimals(u)
    assert value[0].item() == pytest.approx(exact, rel=1e-6, abs=1e-24)
    assert value[0] >= 0 and value[1] == 0


@both_implementations
@pytest.mark.parametrize("u", [1e-4, -1e-4, 3e-6, -3e-6, 1e-7])
def test_it_is_accurate_near_zero(implementation, u):
    u = torch.tensor(u)
    assert implementation(u).item() == pytest.approx(k3_in_decimals(u.item()), rel=1e-6)


@both_implementations
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_below_the_limit_it_is_the_tangent(implementation, dtype):
    limit = largest_log_ratio(dtype)
    assert limit == (80 if dtype == torch.float32 else 700)
    value = implementation(torch.tensor([-limit, -limit - 1, -limit - 10], dtype=dtype))
    top = math.exp(limit)
    torch.testing.assert_close(value, torch.tensor([top, 2 * top, 11 * top], dtype=dtype), rtol=1e-5, atol=0)
    ends = implementation(torch.tensor([-torch.inf, torch.inf, torch.nan], dtype=dtype))
    assert ends[:2].tolist() == [torch.inf] * 2 and ends[2].isnan()
    assert phi(torch.tensor(-limit - 10, dtype=dtype)) == torch.inf, "phi overflows there"


def test_an_extreme_token_does_not_change_other_tokens():
    u = torch.linspace(-5, 5, 50)
    torch.testing.assert_close(in_blocks(torch.cat([u, torch.tensor([-95.0])]))[:-1], in_blocks(u))


def test_blocks_agree_with_the_whole_and_masked_tokens_are_ignored(monkeypatch):
    p, q = torch.linspace(-20, 0, 103).reshape(1, 103), torch.linspace(0, -3, 103).reshape(1, 103)
    counts = torch.arange(103).reshape(1, 103) % 3 != 0
    masked_pair = torch.where(counts, p, torch.nan), torch.where(counts, q, torch.inf)
    expected = torch.where(counts, p - q, 0.0)
    for size in (65536, 10):
        monkeypatch.setattr(sampled, "BLOCK_TOKENS", size)
        for logp_pair, mask, truth in (
            (masked_pair, counts, expected),
            ((x.t() for x in masked_pair), counts.t(), expected.t()),
        ):
            u, value = log_ratio_and_k3(*logp_pair, mask)
            assert torch.equal(u, truth)
            torch.testing.assert_close(value, continued_k3(truth), rtol=1e-6, atol=0)
    assert log_ratio_and_k3(p[:0], q[:0], counts[:0])[1].shape == (0, 103)
    wide = log_ratio_and_k3(p.double(), q, counts)[1]
    assert wide.dtype == torch.float64


def test_the_tangent_has_the_slope_of_k3_at_the_limit():
    u = torch.tensor([-90.0, -81.0, -79.0, 3.0], requires_grad=True)
    value = continued_k3(u)
    torch.testing.assert_close(value, continued_k3(u.detach()), rtol=1e-5, atol=0)
    (slope,) = torch.autograd.grad(value.sum(), u)
    expected = [-math.exp(80), -math.exp(80), -math.exp(79), 1 - math.exp(-3)]
    torch.testing.assert_close(slope, torch.tensor(expected), rtol=1e-5, atol=0)
    torch.testing.assert_close(torch.vmap(continued_k3)(u.detach()), value.detach(), rtol=1e-5, atol=0)


@given(st.floats(-200, 200), st.floats(-60, -0.01))
@example(-1.0, -1.0)
def test_bounded_k3_is_between_zero_and_k3(u, lower):
    u = torch.tensor(u, dtype=torch.float64, requires_grad=True)
    value = bounded_k3(lower).of(u)
    assert 0 <= value <= k3(u) * (1 + 1e-12)
    (slope,) = torch.autograd.grad(value, u)
    assert slope.item() == pytest.approx(-math.expm1(-max(u.item(), lower)), rel=1e-9, abs=1e-12)
    if u > lower:
        assert value.item() == k3(u).item()


def test_the_contract_of_bounded_k3():
    torch.manual_seed(0)
    logp, logq = (3 * torch.randn(2, 8, dtype=torch.float64)).log_softmax(-1)
    record = bounded_k3(-1.0)
    mean = (logp.exp() * record.of(logp - logq)).sum()
    exact = (logp.exp() * ESTIMATORS["k3"].of(logp - logq)).sum()
    assert mean < 0.99 * exact and not record.unbiased
    assert record.never_negative and not record.right_as_reward and record.backpropagated == "nothing named"


@pytest.mark.parametrize("lower", [0.0, 1.0, math.nan, -math.inf])
def test_an_invalid_bound_raises(lower):
    with pytest.raises(OptionError, match=f"lower is {lower}; give the log ratio, below 0"):
        bounded_k3(lower)


def test_a_bound_below_the_float_limit_has_no_effect():
    u = torch.tensor([-85.0, -3.0])
    torch.testing.assert_close(bounded_k3(-1000.0).of(u), continued_k3(u))


@compiles
def test_it_compiles_without_graph_breaks(compiler):
    u = torch.linspace(-90, 90, 41)
    compiled = torch.compile(continued_k3, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(u), continued_k3(u), rtol=1e-5, atol=0)
