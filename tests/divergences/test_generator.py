from decimal import Context, Decimal, localcontext

import pytest
import torch
from compiling import compiles

from kleash.divergences import phi
from kleash.divergences.generator import psi

MAGNITUDES = torch.logspace(-7, 1.9, 600, dtype=torch.float64)
BOTH_SIGNS = torch.cat([MAGNITUDES, -MAGNITUDES, torch.tensor([0.25, -0.25, 0.2499, -0.2501])])


def in_decimals(formula, at):
    with localcontext(Context(prec=60)):
        return [formula(Decimal(x)) for x in at.tolist()]


def worst_relative_error(got, expected, dtype):
    errors = [abs(float((Decimal(g) - e) / e)) for g, e in zip(got.tolist(), expected, strict=True)]
    return max(errors) / torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_phi_and_psi_are_accurate_to_a_few_roundings(dtype):
    at = BOTH_SIGNS.to(dtype)
    assert worst_relative_error(phi(at), in_decimals(lambda u: (-u).exp() - 1 + u, at), dtype) < 2.8
    at = at[at > 0]
    assert worst_relative_error(psi(at), in_decimals(lambda v: 1 - (1 + v) * (-v).exp(), at), dtype) < 2.6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("function", "derivative"),
    [(phi, lambda u: 1 - (-u).exp()), (psi, lambda v: v * (-v).exp())],
    ids=["phi", "psi"],
)
def test_gradients_are_accurate_to_a_few_roundings(function, derivative, dtype):
    at = (BOTH_SIGNS if function is phi else BOTH_SIGNS[BOTH_SIGNS > 0]).to(dtype).requires_grad_()
    (got,) = torch.autograd.grad(function(at).sum(), at)
    assert worst_relative_error(got, in_decimals(derivative, at.detach()), dtype) < 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_at_zero_infinity_and_nan(dtype):
    at = torch.tensor([0.0, torch.inf, -torch.inf, 1e4, -1e4, torch.nan], dtype=dtype)
    expected = torch.tensor([0.0, torch.inf, torch.inf, 9999.0, torch.inf, torch.nan], dtype=dtype)
    torch.testing.assert_close(phi(at), expected, rtol=0, atol=0, equal_nan=True)
    at = torch.tensor([0.0, torch.inf, 1e4, torch.nan], dtype=dtype)
    torch.testing.assert_close(psi(at), torch.tensor([0.0, 1.0, 1.0, torch.nan], dtype=dtype), equal_nan=True)
    assert phi(at)[0] == psi(at)[0] == 0


def test_gradients_far_from_zero_and_at_infinity():
    for function, ends, expected in (
        (phi, [1e4, 1e30, torch.inf, -torch.inf], [1.0, 1.0, 1.0, -torch.inf]),
        (psi, [1e4, 1e30, torch.inf, 0.0], [0.0, 0.0, 0.0, 0.0]),
    ):
        at = torch.tensor(ends, requires_grad=True)
        (got,) = torch.autograd.grad(function(at).sum(), at)
        assert got.tolist() == expected


@compiles
@pytest.mark.parametrize("function", [phi, psi])
def test_compiles_without_graph_breaks(function, compiler):
    """Code for both is generated in the test of the KL."""
    at = torch.linspace(-3 if function is phi else 0, 3, 61, requires_grad=True)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(at), function(at))
    (got,) = torch.autograd.grad(compiled(at).sum(), at)
    (expected,) = torch.autograd.grad(function(at).sum(), at)
    torch.testing.assert_close(got, expected)
