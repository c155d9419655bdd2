"""Per-token KL estimators k1, abs, k2 and k3, their contracts, and k3 continued by its tangent."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from math import expm1
from types import MappingProxyType

import torch
from jaxtyping import Float
from torch import Tensor

from kleash.arguments import validated
from kleash.autodiff import forward_mode_active, with_slope
from kleash.divergences import phi
from kleash.errors import OptionError
from kleash.kl_rules import CONTRACTS, Contract
from kleash.precision import at_least_float32
from kleash.registry import look_up


@validated
def k1(log_ratio: Float[Tensor, "*tokens"]) -> Float[Tensor, "*tokens"]:
    """u, the log ratio: unbiased; single values may be negative."""
    return log_ratio


@validated
def absolute(log_ratio: Float[Tensor, "*tokens"]) -> Float[Tensor, "*tokens"]:
    """|u|: never negative; biased upwards."""
    return log_ratio.abs()


@validated
def k2(log_ratio: Float[Tensor, "*tokens"]) -> Float[Tensor, "*tokens"]:
    """u^2 / 2: biased, close to the KL for similar distributions; its expected gradient is that of the KL."""
    return log_ratio.square() / 2


@validated
def k3(log_ratio: Float[Tensor, "*tokens"]) -> Float[Tensor, "*tokens"]:
    """phi(u) = exp(-u) - 1 + u: unbiased and never negative; its expected gradient is that of KL(q || p)."""
    return phi(log_ratio)


def with_k2_gradient(
    value: Tensor, token_logp: Tensor, token_logq: Tensor, weight: Tensor | float = 1.0
) -> Tensor:
    """``value`` with the gradient of ``weight`` times k2, which follows KL(p || q).

    It is 0 for a token that either distribution excludes, whose log ratio is infinite.
    """
    log_ratio = at_least_float32(token_logp) - at_least_float32(token_logq)
    slope = torch.where(log_ratio.isinf(), 0.0, log_ratio).detach()
    return with_slope(value.detach(), log_ratio, weight * slope)


@dataclass(frozen=True, kw_only=True)
class Estimator(Contract):
    """A function of the log ratio ``u = log p(x) - log q(x)``, ``x ~ p``, with its contract.

    The contract holds where ``q`` is nowhere 0 under ``p``. Elsewhere the KL and all estimators are infinite.
    """

    of: Callable[[Tensor], Tensor]
    """The function of the log ratio."""


FUNCTIONS = {"k1": k1, "abs": absolute, "k2": k2, "k3": k3}
SLOPES: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"k1": torch.ones_like, "abs": torch.sign, "k2": lambda u: u, "k3": lambda u: -torch.expm1(-u)}
)
"""Name -> the derivative of the estimator in the log ratio."""
ESTIMATORS: Mapping[str, Estimator] = MappingProxyType(
    {name: Estimator(of=FUNCTIONS[name], **asdict(contract)) for name, contract in CONTRACTS.items()}
)
"""Name -> estimator and its contract; a test enumerates every field."""


@validated
def sampled_kl(
    token_logp: Float[Tensor, "*tokens"], token_logq: Float[Tensor, "*tokens"], estimator: str = "k3"
) -> Float[Tensor, "*tokens"]:
    """An estimate of KL(p || q) in nats from each token ``x ~ p``: a function of its log ratio.

        estimator(log p(x) - log q(x))

    This requires tokens drawn from ``p``; tokens drawn from a behaviour distribution need weights
    (``importance_weights``). ``ESTIMATORS`` lists the names and the contract of each. Autograd differentiates the
    function itself: for k1 the expected gradient is zero, for k3 it is that of KL(q || p). A token with probability 0
    under ``q`` gives ``inf`` in all of them. No mask is applied. Tokens that the caller selects away afterwards, with
    ``torch.where(mask, value, 0.0)``, get the gradient 0 also if they are NaN or infinite.

    Args:
        token_logp: log-probabilities of the drawn tokens under the distribution that they were drawn from.
        token_logq: the same tokens under the other distribution.
        estimator: "k1", "abs", "k2" or "k3".

    Returns:
        One number per token, in float64 if an input is float64, otherwise in float32.

    Raises:
        UnknownNameError: if there is no estimator of this name.
        ShapeError: if the two differ in shape.

    References:
        Schulman, "Approximating KL Divergence" (2020), http://joschu.net/blog/kl-approx.html

    >>> token_logp, token_logq = torch.tensor([-1.0]), torch.tensor([-2.0])
    >>> kleash.sampled_kl(token_logp, token_logq, "k1")
    tensor([1.])
    """
    function, slope = (look_up(table, estimator, "estimator") for table in (FUNCTIONS, SLOPES))
    log_ratio = at_least_float32(token_logp) - at_least_float32(token_logq)
    if forward_mode_active():
        return function(log_ratio)
    return with_slope(function(log_ratio.detach()), log_ratio, slope(log_ratio))


def largest_log_ratio(dtype: torch.dtype) -> float:
    """The largest log ratio, in nats, whose exponential can be summed without overflow: 80 in float32."""
    return 700.0 if dtype == torch.float64 else 80.0


@validated
def continued_k3(u: Float[Tensor, "*tokens"], lower: float | None = None) -> Float[Tensor, "*tokens"]:
    """k3 for log ratios down to ``lower``, and its tangent at ``lower`` below.

        phi(u)                                   u >= lower
        phi(lower) + (u - lower) phi'(lower)     u < lower,    phi'(lower) = -expm1(-lower)

    It is never negative, never above k3, and its slope is nowhere 0 below ``lower``. The default ``lower`` is -80 in
    float32 (-700 in float64), where a sum of k3 in that type would overflow anyway.

    Args:
        u: log ratios, float32 or float64.
        lower: below 0, in nats.
    """
    smallest = -largest_log_ratio(u.dtype)
    start = smallest if lower is None else max(lower, smallest)
    # torch.where and not clamp, whose slope at its bounds changed in torch 2.15.
    below = u < start
    return phi(torch.where(below, start, u)) + torch.where(below, u - start, 0.0) * -expm1(-start)


@validated
def bounded_k3(lower: float) -> Estimator:
    """k3 that grows only linearly for log ratios below ``lower``: ``continued_k3`` as an ``Estimator``.

    It has a smaller variance than k3 and a bias: its values are too small below ``lower``. Its slope is never 0, so no
    token loses its gradient.

    Args:
        lower: the log ratio, below 0, at which the tangent begins; -5 leaves ratios q/p up to 148 unchanged.

    Raises:
        OptionError: if ``lower`` is not a finite number below 0.
    """
    if not -float("inf") < lower < 0:
        raise OptionError(f"lower is {lower}; give the log ratio, below 0, at which the tangent begins")
    return Estimator(
        of=partial(continued_k3, lower=lower),
        unbiased=False,
        never_negative=True,
        backpropagated="nothing named",
        right_as_reward=False,
    )
