"""The KL term of a VAE: against integrals, by hand, and where gradients must and must not flow."""

import math

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import norm

from kleash.divergences import kl_gaussian
from kleash.errors import OptionError, ShapeError
from kleash.losses import active_units, cyclical_annealing, free_bits, kl_per_dimension, linear_annealing


def integral(mean_p, log_variance_p, mean_q, log_variance_q):
    """E_p[log p - log q], integrated."""
    p = norm(mean_p, math.exp(log_variance_p / 2))
    q = norm(mean_q, math.exp(log_variance_q / 2))
    return quad(lambda x: p.pdf(x) * (p.logpdf(x) - q.logpdf(x)), *p.interval(1 - 1e-15))[0]


def test_the_kl_per_dimension_agrees_with_numerical_integration():
    mean, log_variance = torch.tensor([[[0.3, -1.2, 0.0]], [[-1.0, 0.4, -3.0]]], dtype=torch.float64)
    mean_q, log_variance_q = (torch.tensor(x, dtype=torch.float64) for x in ([0.5, 0.0, -2.0], 0.25))
    against_prior = kl_per_dimension(mean, log_variance)
    against_q = kl_per_dimension(mean, log_variance, mean_q, log_variance_q)
    for d in range(3):
        p = mean[0, d].item(), log_variance[0, d].item()
        assert against_prior[0, d].item() == pytest.approx(integral(*p, 0, 0), rel=1e-8)
        assert against_q[0, d].item() == pytest.approx(integral(*p, mean_q[d].item(), 0.25), rel=1e-8)
    torch.testing.assert_close(against_prior.sum(-1), kl_gaussian(mean, log_variance))
    torch.testing.assert_close(against_q.sum(-1), kl_gaussian(mean, log_variance, mean_q, log_variance_q))
    assert kl_per_dimension(torch.zeros(2, 3), torch.zeros(2, 3)).tolist() == [[0.0] * 3] * 2


def test_free_bits_of_a_small_example():
    kls = torch.tensor([[0.1, 2.0, 0.0], [0.7, 1.0, 0.2]])
    assert free_bits(kls, 0.5).item() == pytest.approx(0.5 + 1.5 + 0.5)
    assert free_bits(kls, 0.5, per_example=True).item() == pytest.approx((3.0 + 2.2) / 2)
    assert free_bits(kls, 0.0).item() == pytest.approx(kls.sum(-1).mean().item())
    assert free_bits(kls.bfloat16(), 0.5).dtype == torch.float32
    assert free_bits(torch.tensor([[torch.nan, 1.0]]), 0.5).isnan()


def test_free_bits_have_no_gradient_up_to_the_floor_of_the_mean_or_of_each_example():
    kls = torch.tensor([[0.8, 2.0, 0.5], [0.1, 1.0, 0.5]], requires_grad=True)
    (shared,) = torch.autograd.grad(free_bits(kls, 0.5), kls)
    (each,) = torch.autograd.grad(free_bits(kls, 0.5, per_example=True), kls)
    assert shared.tolist() == [[0.0, 0.5, 0.0]] * 2
    assert each.tolist() == [[0.5, 0.5, 0.0], [0.0, 0.5, 0.0]]


def test_linear_annealing_values():
    assert [linear_annealing(step, steps=4) for step in (0, 1, 2, 3, 4, 9)] == [0, 0.25, 0.5, 0.75, 1, 1]
    assert linear_annealing(1, steps=2, begin=0.2, end=0.6) == pytest.approx(0.4)
    assert linear_annealing(1, steps=2, begin=1.0, end=0.0) == 0.5


def test_cyclical_annealing_values():
    weights = [cyclical_annealing(step, steps=16, cycles=2) for step in range(20)]
    one = [0, 0.25, 0.5, 0.75, 1, 1, 1, 1]
    assert weights == [*one, *one, 1, 1, 1, 1]
    slow = [cyclical_annealing(step, steps=4, cycles=1, rising=1.0) for step in range(5)]
    assert slow == [0, 0.25, 0.5, 0.75, 1]
    assert cyclical_annealing(1, steps=8, cycles=2, begin=0.2, end=0.6) == pytest.approx(0.4)
    uneven = [cyclical_annealing(step, steps=10, cycles=4) for step in range(11)]
    assert uneven == pytest.approx([0, 0.8, 1, 0.4, 1, 0, 0.8, 1, 0.4, 1, 1])


def test_active_units_have_varying_means():
    rng = np.random.default_rng(0)
    means = rng.normal(size=(500, 4)) * np.sqrt([1.0, 0.012, 0.008, 0.0]) + [0.0, 0.0, 5.0, -3.0]
    found = active_units(torch.tensor(means).requires_grad_())
    assert found.active.tolist() == [True, True, False, False] and found.number.item() == 2
    assert found.variance.numpy() == pytest.approx(means.var(axis=0, ddof=1))
    assert not found.variance.requires_grad
    assert active_units(torch.tensor(means), threshold=0.5).number.item() == 1
    assert active_units(torch.tensor([[0.0], [torch.nan]])).number.item() == 0


FLAT = torch.zeros(3)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: free_bits(FLAT, 0.5), ShapeError, r"dimension_kl \(3,\); give dimension_kl \[batch, dim\]"),
        (lambda: free_bits(FLAT[None], -0.1), OptionError, "floor_nats is -0.1"),
        (lambda: active_units(FLAT[None]), ShapeError, "at least two"),
        (lambda: linear_annealing(-1, steps=4), OptionError, "step is -1; give"),
        (lambda: cyclical_annealing(0, steps=3, cycles=4), OptionError, "there are 4 cycles in 3 steps"),
        (lambda: cyclical_annealing(0, steps=8, rising=0.0), OptionError, "rising is 0.0; it is a share"),
    ],
)
@pytest.mark.usefixtures("unhooked")
def test_invalid_latent_arguments_are_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()
