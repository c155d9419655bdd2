"""The fast core of KL(p || q): only p's masses are computed, and q enters by what it differs.

With ``r = zq - zp - x`` where ``x = E_p[zq - zp]``, and ``y = E_p expm1(r)``,

    log p - log q = log1p(y) - r          KL(p || q) = log1p(y) - E_p r
    gradient in zp: p (E_p r - r)          gradient in zq: q - p = p (expm1(r) - y) / (1 + y)

``E_p r`` is 0 but for the rounding of ``x``, and is taken again. Whatever rounding the logits bring along is
that of a pair of true distributions, near which KL is as good as stationary: it enters at second order.
Nothing overflows or gets lost as long as q is nowhere further ahead of p than e^FAR: a row beyond that is NaN
here, for ``rows.py`` to do. A KL so small that ``log1p(y) - E_p r`` is left with its rounding is minus
infinity here, for ``faint_kl`` to do; the gradients are right in such rows, too.

Uncompiled, every operation works on rows that stay in the cache and writes where it is told to.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from kleash.divergences import phi
from kleash.linear.impl.rows import LOG2_E, Room

FAR = 40.0
"""How far q may be ahead of p on a token, in nats: a mass that underflows then adds less than 1e-16."""
FAINT = {torch.float32: 1e-9, torch.float64: 1e-12}
"""KL in nats below which ``log1p(y) - E_p r`` is not trusted to a few thousandths."""
ROOMS = 3
NO_ROOM: Room = (None,) * ROOMS


class Rows(NamedTuple):
    """Some rows, measured from p; the numbers are columns."""

    top: Float[Tensor, "rows 1"]
    """p's largest logit."""
    total: Float[Tensor, "rows 1"]
    """The sum of ``mass``."""
    shift: Float[Tensor, "rows 1"]
    """x."""
    mass: Float[Tensor, "rows vocab"]
    """exp(zp - top)."""
    ahead: Float[Tensor, "rows vocab"]
    """r."""


def measured(zp: Tensor, zq: Tensor, room: Room, apart: bool) -> Rows:
    """Two models' logits, or, if ``apart``, those of p and by how much q's are larger."""
    top = zp.amax(-1, keepdim=True)
    mass = torch.add(top * -LOG2_E, zp, alpha=LOG2_E, out=room[1]).exp2_()
    total = mass.sum(-1, keepdim=True)
    difference = zq if apart else torch.sub(zq, zp, out=room[0])
    shift = torch.mul(mass, difference, out=room[2]).sum(-1, keepdim=True) / total
    return Rows(top, total, shift, mass, torch.sub(difference, shift, out=room[0]))


def trusted(kl: Float[Tensor, "rows 1"], furthest: Float[Tensor, "rows 1"]) -> Float[Tensor, " rows"]:
    """KL where this core may be believed, else NaN (far) or minus infinity (faint).

    Where q is nowhere ahead of p, the two are the same, and KL is 0.
    """
    same = (furthest == 0) & (kl == 0)
    kl = torch.where(furthest <= FAR, kl, torch.nan)
    return torch.where((kl < FAINT[kl.dtype]) & ~same, -torch.inf, kl)[:, 0]


def faint_kl(zp: Tensor, zq: Tensor, apart: bool) -> Float[Tensor, " rows"]:
    """KL(p || q) of rows where the two nearly agree: a sum of terms none of which is negative."""
    x = measured(zp, zq, NO_ROOM, apart)
    y = (torch.expm1(x.ahead) * x.mass).sum(-1, keepdim=True) / x.total
    return (phi(torch.log1p(y) - x.ahead).mul_(x.mass).sum(-1, keepdim=True) / x.total)[:, 0]


def kl_rows(
    zp: Float[Tensor, "rows vocab"],
    zq: Float[Tensor, "rows vocab"],
    room: Room = NO_ROOM,
    *,
    apart: bool = False,
) -> tuple[Tensor]:
    """KL(p || q) of each row, alone in its tuple; not finite for rows that this core cannot do."""
    x = measured(zp, zq, room, apart)
    furthest = x.ahead.amax(-1, keepdim=True)
    y = torch.expm1(x.ahead, out=room[2]).mul_(x.mass).sum(-1, keepdim=True) / x.total
    slack = x.ahead.mul_(x.mass).sum(-1, keepdim=True) / x.total
    return (trusted(torch.log1p(y) - slack, furthest),)


def kl_gradient_rows(
    zp: Float[Tensor, "rows vocab"],
    zq: Float[Tensor, "rows vocab"],
    weight: Float[Tensor, " rows"],
    room: Room = NO_ROOM,
    *,
    apart: bool = False,
    needs: tuple[bool, bool] = (True, True),
) -> tuple[Tensor | None, ...]:
    """KL(p || q) of each row, and the gradients of ``weight KL`` in p's logits and q's, where needed."""
    x = measured(zp, zq, room, apart)
    furthest = x.ahead.amax(-1, keepdim=True)
    extra = torch.expm1(x.ahead, out=room[2]).mul_(x.mass)
    y = extra.sum(-1, keepdim=True) / x.total
    ahead = x.ahead.mul_(x.mass)
    slack = ahead.sum(-1, keepdim=True) / x.total
    share = weight[:, None] / x.total
    in_p = in_q = None
    if needs[0]:
        in_p = ahead.addcmul_(x.mass, -slack).mul_(-share)
    if needs[1]:
        in_q = extra.addcmul_(x.mass, -y).mul_(share / (1 + y))
    return trusted(torch.log1p(y) - slack, furthest), in_p, in_q
