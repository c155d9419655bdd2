"""Values and first and second derivatives of the functions of a log ratio, against mpmath."""

import pytest
import torch
from mpmath import mp, mpf
from torch.autograd import forward_ad

from kleash.estimators import ESTIMATORS, bounded_k3, sampled_kl
from kleash.estimators.sampled import continued_k3

NEAR = (1e-300, 1e-20, 1e-8, 1e-4, 0.1, 0.2499, 0.25, 0.2501)
FAR = (0.7, 5.0, 5.1, 30.0, 90.0, 650.0)
BEYOND = (710.0, 5000.0)
"""Where exp(-u) overflows in float64; continued_k3 is linear there."""
RATIOS = [0.0, *NEAR, *(-u for u in NEAR), *FAR, *(-u for u in FAR)]


def k3_of(u, start=None):
    """phi and its first two derivatives; below ``start`` those of its tangent there."""
    at = u if start is None or u >= start else start
    value, slope = mp.exp(-at) - 1 + at, 1 - mp.exp(-at)
    return value + (u - at) * slope, slope, mp.exp(-at) if at == u else mpf(0)


EXACT = {
    "k1": lambda u: (u, mpf(1), mpf(0)),
    "abs": lambda u: (abs(u), mp.sign(u), mpf(0)),
    "k2": lambda u: (u * u / 2, u, mpf(1)),
    "k3": k3_of,
}
FUNCTIONS = {
    **{name: (lambda u, f=record.of: f(u), EXACT[name], 0) for name, record in ESTIMATORS.items()},
    **{
        f"sampled_kl {name}": (lambda u, n=name: sampled_kl(u, torch.zeros_like(u), n), EXACT[name], 0)
        for name in ESTIMATORS
    },
    "continued_k3": (continued_k3, lambda u: k3_of(u, mpf(-700)), 1),
    "bounded_k3": (bounded_k3(-5.0).of, lambda u: k3_of(u, mpf(-5)), 1),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_two_derivatives_agree_with_mpmath(name):
    """In backward mode, torch.func and forward mode, for log ratios at, near and far from 0."""
    function, exact, beyond = FUNCTIONS[name]
    ratios = [*RATIOS, *(sign * u for u in BEYOND for sign in (1, -1) if beyond)]
    with mp.workdps(400):
        exact_rows = [exact(mpf(u)) for u in ratios]
        value, slope, curve = (
            torch.tensor([float(row[k]) for row in exact_rows], dtype=torch.float64) for k in range(3)
        )
    at = torch.tensor(ratios, dtype=torch.float64, requires_grad=True)
    near = {"rtol": 1e-13, "atol": 0}
    result = function(at)
    torch.testing.assert_close(result.detach(), value, **near)
    (first,) = torch.autograd.grad(result.sum(), at, create_graph=True, materialize_grads=True)
    torch.testing.assert_close(first.detach(), slope, **near)
    second = torch.zeros_like(at)
    if first.requires_grad:
        (second,) = torch.autograd.grad(first.sum(), at, allow_unused=True, materialize_grads=True)
    # torch forms the derivative of expm1 as expm1 + 1: k3's, exp(-u), to a rounding of 1.
    rounding = {"rtol": 1e-13, "atol": 1e-16}
    torch.testing.assert_close(second, curve, **rounding)
    hessian = torch.func.hessian(lambda u: function(u).sum())(at.detach())
    torch.testing.assert_close(hessian, torch.diag(curve), **rounding)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(at.detach(), torch.full_like(slope, 3.0))
        torch.testing.assert_close(forward_ad.unpack_dual(function(dual)).tangent, 3 * slope, **near)
