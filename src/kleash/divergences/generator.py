"""phi, the generator of the KL divergence, and psi, the same per unit of q's mass; every other floor calls these."""

from math import factorial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kleash.arguments import validated
from kleash.autodiff import apply, forward_mode_active

# Two numbers are literals below: with dynamic=True torch.compile makes symbols of the floats of a module, and fails at
# one that two autograd functions read (seen in torch 2.13).
#   0.25: up to this absolute value the Taylor series is summed; a power of two, so that subtracting it is exact.
#   1000.0: exp(1000) is inf and exp(-1000) is 0 in every floating-point type.


@validated
def phi(u: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """The contribution of a token to KL(p || q) per unit of ``p``'s mass, in nats; never negative.

        phi(u) = expm1(-u) + u,    u = log p - log q,    phi'(u) = -expm1(-u)

    It is ``u`` (the textbook term) plus ``q/p - 1``, whose mean over ``p`` is zero. Up to |u| = 1/4, where the two
    terms cancel, its Taylor series is summed: the relative error is a few roundings for every u, in value and
    gradient. 0 at 0, ``inf`` at both infinities, NaN at NaN.

    Args:
        u: log ratios, float32 or float64.

    References:
        Schulman, "Approximating KL Divergence" (2020), http://joschu.net/blog/kl-approx.html
    """
    return _phi_of_elementary_functions(u) if forward_mode_active() else apply(_Phi, u)


def psi(v: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """The contribution of a token to KL(p || q) per unit of ``q``'s mass, for tokens with ``q >= p``.

        psi(v) = exp(-v) phi(-v) = 1 - (1 + v) exp(-v),    v = log q - log p >= 0,    psi'(v) = v exp(-v)

    It tends to 1 where ``p`` vanishes; ``p phi(u)`` would be 0 times inf there.

    Args:
        v: log ratios log q - log p, none of them negative; float32 or float64.
    """
    return _psi_of_elementary_functions(v) if forward_mode_active() else apply(_Psi, v)


def _series(x: Tensor) -> Tensor:
    """phi(-x) = x^2/2 + x^3/6 + ..., to one rounding for |x| <= 1/4."""
    terms = 13 if x.dtype == torch.float64 else 8
    total = torch.full_like(x, 1 / factorial(terms))
    for k in range(terms - 1, 1, -1):
        total.mul_(x).add_(1 / factorial(k))
    return total.mul_(x).mul_(x)


# Both forward functions split their argument into the part for the series and the rest, and add the contribution of
# the rest, which is exactly 0 if there is none. Selecting with torch.where takes ten times as long on a CPU, whose
# branch prediction fails on random signs and sizes.


class _ClosedForm(torch.autograd.Function):
    """A function of a tensor with its gradient in closed form, so that only the tensor is saved for it."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)


class _Phi(_ClosedForm):
    """phi."""

    @staticmethod
    def forward(u: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]
        near = u.clamp(-0.25, 0.25)
        rest = u - near
        beyond = torch.exp(-near).mul_(torch.expm1(-rest)).add_(rest.clamp(min=-1000.0))
        return _series(-near).add_(beyond)

    @staticmethod
    def backward(ctx: Any, weight: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]
        (u,) = ctx.saved_tensors
        return weight * -torch.expm1(-u)


class _Psi(_ClosedForm):
    """psi."""

    @staticmethod
    def forward(v: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]
        near = v.clamp(max=0.25)
        rest = (v - near).clamp(max=1000.0)
        beyond = (near + 1).mul_(torch.expm1(-rest)).add_(torch.exp(-rest).mul_(rest))
        return _series(near).sub_(beyond).mul_(torch.exp(-near))

    @staticmethod
    def backward(ctx: Any, weight: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]
        (v,) = ctx.saved_tensors
        v = v.clamp(max=1000.0)
        return weight * v * torch.exp(-v)


# Forward mode composes torch's own functions, which can be nested in any order. In torch 2.13 the tangent returned by
# a custom autograd function is a constant to an enclosing forward derivative, which would silently be 0.


def _phi_of_elementary_functions(u: Tensor) -> Tensor:
    """exp(-u) - 1 + u: a polynomial for small ``u``, where the difference cancels, and expm1 beyond."""
    far = u.abs() > 0.25
    near, rest = torch.where(far, 0.0, u), torch.where(far, u, 1.0)
    beyond = torch.expm1(-rest) + torch.where(rest < -1000.0, -1000.0, rest)
    return torch.where(far | u.isnan(), beyond, _polynomial(-near))


def _psi_of_elementary_functions(v: Tensor) -> Tensor:
    """1 - (1 + v) exp(-v): a polynomial for small ``v``, where the difference cancels, and itself beyond."""
    far = v > 0.25
    near, rest = torch.where(far, 0.0, v), torch.where(far, v, 1.0)
    rest = torch.where(rest > 1000.0, 1000.0, rest)
    return torch.where(far, 1 - (1 + rest) * torch.exp(-rest), torch.exp(-near) * _polynomial(near))


def _polynomial(x: Tensor) -> Tensor:
    """``_series`` without in-place operations, and with more terms, since each derivative loses one."""
    return phi_series(x, 15 if x.dtype == torch.float64 else 10)


def phi_series(x: Tensor, highest: int) -> Tensor:
    """phi(-x) = x^2/2 + x^3/6 + ..., up to this power."""
    total = torch.full_like(x, 1 / factorial(highest))
    for k in range(highest - 1, 1, -1):
        total = total * x + 1 / factorial(k)
    return total * x * x
