"""No rounding under autocast, forward or backward, in any backend."""

import pytest
import torch

from kleash.linear import Head, LinearOptions, linear_kl, linear_kl_loss, log_probabilities


@pytest.mark.parametrize("impl", ["reference", "chunked"])
@pytest.mark.parametrize("function", [linear_kl, linear_kl_loss])
def test_gradients_of_a_backward_pass_under_autocast_are_those_without(function, impl):
    torch.manual_seed(0)
    given = [torch.randn(shape) for shape in ((6, 16), (40, 16), (6, 16), (40, 16))]
    found = []
    for enabled in (False, True):
        hidden_p, weight_p, hidden_q, weight_q = (x.clone().requires_grad_() for x in given)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            options = LinearOptions(impl=impl)
            more = {"weights": torch.ones(6)} if function is linear_kl_loss else {}
            value = function(hidden_p, Head(weight_p), hidden_q, Head(weight_q), options=options, **more)
            loss = value.sum() if isinstance(value, torch.Tensor) else value.loss
            gradients = torch.autograd.grad(loss, [hidden_p, weight_p, hidden_q, weight_q], allow_unused=True)
            logp = log_probabilities(hidden_p.detach(), Head(weight_p.detach()))
        found.append([loss.detach(), logp, *(x for x in gradients if x is not None)])
    for plain, under_autocast in zip(*found, strict=True):
        torch.testing.assert_close(under_autocast, plain, rtol=1e-6, atol=1e-6)
