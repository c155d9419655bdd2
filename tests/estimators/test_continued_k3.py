import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kleash.divergences import phi
from kleash.errors import OptionError
from kleash.estimators import ESTIMATORS, bounded_k3, k3
from kleash.estimators.sampled import continued_k3, largest_log_ratio


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_below_the_limit_it_is_the_tangent(dtype):
    limit = largest_log_ratio(dtype)
    assert limit == (80 if dtype == torch.float32 else 700)
    value = continued_k3(torch.tensor([-limit, -limit - 1, -limit - 10], dtype=dtype))
    top = math.exp(limit)
    torch.testing.assert_close(value, torch.tensor([top, 2 * top, 11 * top], dtype=dtype), rtol=1e-5, atol=0)
    ends = continued_k3(torch.tensor([-torch.inf, torch.inf, torch.nan], dtype=dtype))
    assert ends[:2].tolist() == [torch.inf] * 2 and ends[2].isnan()
    assert phi(torch.tensor(-limit - 10, dtype=dtype)) == torch.inf, "phi overflows there"


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
