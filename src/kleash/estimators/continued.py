"""k3 where its exponential is too large to hold or to want: followed by its own tangent."""

from functools import partial
from math import expm1

import torch
from jaxtyping import Float
from torch import Tensor

from kleash.divergences import phi
from kleash.errors import OptionError
from kleash.estimators.sampled import Estimator

BLOCK = 131072
"""Tokens at a time: what fits a core's cache in float64."""


def largest_log_ratio(dtype: torch.dtype) -> float:
    """The log ratio, in nats, up to which an exponential and any sum of them can be held: 80 in float32."""
    return 700.0 if dtype == torch.float64 else 80.0


def continued_k3(u: Float[Tensor, "*tokens"], lower: float | None = None) -> Float[Tensor, "*tokens"]:
    """k3 down to a log ratio of ``lower``, and its tangent there below it.

        phi(u)                                   u >= lower
        phi(lower) + (u - lower) phi'(lower)     u < lower,    phi'(lower) = -expm1(-lower)

    Never negative, never above k3, and it has a slope everywhere. By default ``lower`` is -80 in
    float32 (-700 in float64), which changes nothing that a sum in that type could have held.

    Args:
        u: log ratios, float32 or float64.
        lower: below 0, in nats.
    """
    floor = -largest_log_ratio(u.dtype)
    start = floor if lower is None else max(lower, floor)
    if _is_plain(u) and u.numel() and bool(u.min() >= start):
        return _in_blocks(u)
    return phi(u.clamp(min=start)) + torch.where(u < start, u - start, 0.0) * -expm1(-start)


def _is_plain(u: Tensor) -> bool:
    """Whether ``u`` is float32 numbers in memory, of which no gradient is asked."""
    traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()  # pyright: ignore
    return u.dtype == torch.float32 and u.device.type == "cpu" and not u.requires_grad and not traced


def _in_blocks(u: Tensor) -> Tensor:
    """expm1(-u) + u in double precision, which needs no series: a quarter of its time."""
    given = u.reshape(-1)
    value = torch.empty_like(given)
    behind, grown = torch.empty(2, min(BLOCK, len(given)), dtype=torch.float64)
    for start in range(0, len(given), BLOCK):
        part = given[start : start + BLOCK]
        v, g = behind[: len(part)], grown[: len(part)]
        torch.expm1(v.copy_(part).neg_(), out=g)
        value[start : start + BLOCK] = g.sub_(v).clamp_(min=0)
    return value.view(u.shape)


def bounded_k3(lower: float) -> Estimator:
    """k3 that grows only linearly on tokens that ``p`` made less likely by more than ``-lower`` nats.

    For whoever prefers a smaller variance to an unbiased value: below ``lower`` it is k3's tangent
    (``continued_k3``), so it is too small there. Its slope is never 0: nothing is switched off.

    Args:
        lower: the log ratio, below 0, at which the tangent begins; -5 leaves q/p up to 148 as it is.

    Raises:
        OptionError: if ``lower`` is not a number below 0.
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
