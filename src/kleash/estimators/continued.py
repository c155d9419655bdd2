"""k3 where its exponential is too large to hold or to want: followed by its own tangent."""

from functools import partial
from math import expm1

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kleash.arguments import validated
from kleash.divergences import phi
from kleash.errors import OptionError
from kleash.estimators.sampled import Estimator

BLOCK = 65536
"""Tokens at a time: what fits a core's cache in float64."""


def largest_log_ratio(dtype: torch.dtype) -> float:
    """The log ratio, in nats, up to which an exponential and any sum of them can be held: 80 in float32."""
    return 700.0 if dtype == torch.float64 else 80.0


@validated
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
    below = u < start  # where, as torch 2.15 took the slope of clamp from its bounds
    return phi(torch.where(below, start, u)) + torch.where(below, u - start, 0.0) * -expm1(-start)


def log_ratio_and_k3(
    token_logp: Float[Tensor, "*tokens"],
    token_logq: Float[Tensor, "*tokens"],
    counts: Bool[Tensor, "*tokens"],
) -> tuple[Float[Tensor, "*tokens"], Float[Tensor, "*tokens"]]:
    """u = log p - log q where ``counts`` is true and 0 elsewhere, and ``continued_k3`` of it; no gradients.

    On float32 numbers in memory both are formed while a part of them is in the cache: a
    training step pays for one pass over the tokens instead of twenty.
    """
    p, q = token_logp.detach(), token_logq.detach()
    traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()  # pyright: ignore
    if traced or p.device.type != "cpu" or (p.dtype, q.dtype) != (torch.float32, torch.float32):
        u = torch.where(counts, p - q, 0.0)
        return u, continued_k3(u)
    u, value = (torch.empty_like(p, memory_format=torch.contiguous_format) for _ in range(2))
    flat = [x.reshape(-1) for x in (p, q, counts, u, value)]
    zero = p.new_zeros(())
    wide, grown = torch.empty(2, min(BLOCK, p.numel()), dtype=torch.float64)
    for start in range(0, p.numel(), BLOCK):
        p_part, q_part, here, u_part, k3_part = (x[start : start + BLOCK] for x in flat)
        torch.where(here, p_part - q_part, zero, out=u_part)
        k3_part.copy_(_k3_of_part(u_part, wide[: len(u_part)], grown[: len(u_part)]))
    return u, value


def _k3_of_part(u: Tensor, wide: Tensor, grown: Tensor) -> Tensor:
    """expm1(-u) + u in double precision, which needs no series: a quarter of its time."""
    if not u.min() >= -largest_log_ratio(u.dtype):  # or NaN
        return continued_k3(u)
    torch.expm1(wide.copy_(u).neg_(), out=grown)
    return grown.sub_(wide).clamp_(min=0)  # for an expm1 that is a rounding off, next to 0


@validated
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
