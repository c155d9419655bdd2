"""The fast core of KL(p || q): only p's masses are computed, and q enters by what it differs.

With ``r = zq - zp - x`` where ``x = E_p[zq - zp]``, and ``y = E_p expm1(r) = E_p phi(-r) + E_p r``,

    log p - log q = log1p(y) - r          KL(p || q) = log1p(y) - E_p r
    gradient in zp: p (E_p r - r)          gradient in zq: q - p = p (expm1(r) - y) / (1 + y)

``E_p r`` is 0 but for the rounding of ``x``, and is taken again. Whatever rounding the logits bring along is
that of a pair of true distributions, near which KL is as good as stationary: it enters at second order.
Nothing overflows or gets lost as long as q is nowhere further ahead of p than e^FAR: a row beyond that is NaN
here, for ``rows.py`` to do. A KL so small that nothing but the rounding of ``x`` may be left of it is minus
infinity here, for ``faint_kl`` to do; the gradients are right in such rows, too.

Uncompiled, every operation works on rows that stay in the cache and writes where it is told to.
"""

from math import factorial
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from kleash.divergences import phi
from kleash.linear.impl.row_statistics import LOG2_E, Buffers, polynomial, unless_small
from kleash.linear.impl.vocab_shards import LOCAL_VOCAB, LocalVocab

FAR = 40.0
"""How far q may be ahead of p on a token, in nats: a mass that underflows then adds less than 1e-16."""
FAINT = {torch.float32: 1e-12, torch.float64: 1e-24}
"""KL in nats below which a difference of two numbers is not to be had: the sum of phi is taken instead."""
PHI = tuple(1 / factorial(n) for n in range(2, 18))
"""phi(-r)/r^2 in powers of r."""
NUM_BUFFERS = 5
NO_BUFFERS: Buffers = (None,) * NUM_BUFFERS


class Moments(NamedTuple):
    """Some rows, measured from p; the numbers are columns."""

    top: Float[Tensor, "rows 1"]
    """p's largest logit."""
    total: Float[Tensor, "rows 1"]
    """The sum of ``mass``."""
    shift: Float[Tensor, "rows 1"]
    """x."""
    furthest: Float[Tensor, "rows 1"]
    """The largest of r here: which rows are too far, all ranks have to agree on."""
    mass: Float[Tensor, "rows vocab"]
    """exp(zp - top)."""
    ahead: Float[Tensor, "rows vocab"]
    """r."""


def moments(zp: Tensor, zq: Tensor, room: Buffers, apart: bool, across: LocalVocab = LOCAL_VOCAB) -> Moments:
    """Two models' logits, or, if ``apart``, those of p and by how much q's are larger."""
    difference = zq if apart else torch.sub(zq, zp, out=room[0])
    (top,) = across.all_reduce_max(zp.amax(-1, keepdim=True))
    mass = torch.add(top * -LOG2_E, zp, alpha=LOG2_E, out=room[1]).exp2_()
    moment = torch.mul(mass, difference, out=room[2]).sum(-1, keepdim=True)
    total, moment = across.all_reduce_sum(mass.sum(-1, keepdim=True), moment)
    shift = moment / total
    ahead = torch.sub(difference, shift, out=room[0])
    return Moments(top, total, shift, ahead.amax(-1, keepdim=True), mass, ahead)


def kl_if_reliable(kl: Float[Tensor, "rows 1"], furthest: Float[Tensor, "rows 1"]) -> Float[Tensor, " rows"]:
    """KL where this core may be believed, else NaN (far) or minus infinity (faint).

    Where q is nowhere ahead of p, the two are the same, and KL is 0.
    """
    same = (furthest == 0) & (kl == 0)
    kl = torch.where(furthest <= FAR, kl, torch.nan)
    return torch.where((kl < FAINT[kl.dtype]) & ~same, -torch.inf, kl)[:, 0]


def faint_kl(zp: Tensor, zq: Tensor, apart: bool, across: LocalVocab = LOCAL_VOCAB) -> Float[Tensor, " rows"]:
    """KL(p || q) of rows where the two nearly agree: a sum of terms none of which is negative."""
    x = moments(zp, zq, NO_BUFFERS, apart, across)
    (y,) = across.all_reduce_sum((torch.expm1(x.ahead) * x.mass).sum(-1, keepdim=True))
    (kl,) = across.all_reduce_sum(phi(torch.log1p(y / x.total) - x.ahead).mul_(x.mass).sum(-1, keepdim=True))
    return (kl / x.total)[:, 0]


def generator(x: Moments, room: Buffers) -> Float[Tensor, "rows vocab"]:
    """phi(-r) = expm1(r) - r, by its series where |r| is small, so that nothing cancels; never negative.

    A sum of two parts of which one is 0, and not ``torch.where``, which costs as much as all else.
    """
    terms = 14 if x.ahead.dtype == torch.float64 else 6
    rest = unless_small(x.ahead, room[2])
    near = torch.sub(x.ahead, rest, out=room[3])
    value = polynomial(near, PHI[:terms], room[4]).mul_(near)
    return value.add_(grown(rest, room[3]).sub_(rest))


def grown(rest: Float[Tensor, "rows vocab"], out: Tensor | None) -> Float[Tensor, "rows vocab"]:
    """expm1 of what is 0 or far from it, so that nothing cancels; uncompiled by way of exp2, which is faster."""
    if torch.compiler.is_compiling():
        return torch.expm1(rest)
    return torch.mul(rest, LOG2_E, out=out).exp2_().sub_(1.0)


class KLTerms(NamedTuple):
    """Means over p, in float64 on columns: what is left of their differences is exact."""

    kl: Float[Tensor, " rows"]
    """KL where it is trusted."""
    slack: Float[Tensor, "rows 1"]
    """E_p r."""
    excess: Float[Tensor, "rows 1"]
    """y."""


def summed(x: Moments, gaps: Float[Tensor, "rows 1"], slack: Float[Tensor, "rows 1"]) -> KLTerms:
    """From the sums of ``mass phi(-r)`` and ``mass r``."""
    total = x.total.double()
    slack, excess = slack.double() / total, (gaps.double() + slack.double()) / total
    kl = (torch.log1p(excess) - slack).to(x.total.dtype)
    return KLTerms(kl_if_reliable(kl, x.furthest), slack.to(kl.dtype), excess.to(kl.dtype))


def kl_rows(
    zp: Float[Tensor, "rows vocab"],
    zq: Float[Tensor, "rows vocab"],
    room: Buffers = NO_BUFFERS,
    *,
    apart: bool = False,
    across: LocalVocab = LOCAL_VOCAB,
) -> tuple[Tensor]:
    """KL(p || q) of each row, alone in its tuple; not finite for rows that this core cannot do."""
    x = moments(zp, zq, room, apart, across)
    gaps = generator(x, room).mul_(x.mass).sum(-1, keepdim=True)
    gaps, slack = across.all_reduce_sum(gaps, x.ahead.mul_(x.mass).sum(-1, keepdim=True))
    return (summed(x, gaps, slack).kl,)


def kl_gradient_rows(
    zp: Float[Tensor, "rows vocab"],
    zq: Float[Tensor, "rows vocab"],
    weight: Float[Tensor, " rows"],
    room: Buffers = NO_BUFFERS,
    *,
    apart: bool = False,
    needs: tuple[bool, bool] = (True, True),
    across: LocalVocab = LOCAL_VOCAB,
) -> tuple[Tensor | None, ...]:
    """KL(p || q) of each row, and the gradients of ``weight KL`` in p's logits and q's, where needed."""
    x = moments(zp, zq, room, apart, across)
    gaps = generator(x, room).mul_(x.mass)
    ahead = x.ahead.mul_(x.mass)
    found = summed(x, *across.all_reduce_sum(gaps.sum(-1, keepdim=True), ahead.sum(-1, keepdim=True)))
    share = weight[:, None] / x.total
    in_p = in_q = None
    if needs[1]:
        in_q = gaps.add_(ahead).addcmul_(x.mass, -found.excess).mul_(share / (1 + found.excess))
    if needs[0]:
        in_p = ahead.addcmul_(x.mass, -found.slack).mul_(-share)
    return found.kl, in_p, in_q
