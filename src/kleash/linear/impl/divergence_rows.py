"""Row cores made from a divergence's record: any of them, value and gradient in both logits.

With ``u = log p - log q`` and the record's scores ``s_p(u)`` and ``s_q(-u)``, one for either side,

    D(p || q) = finish(sum of p f(u))
    gradient in zp: finish' p (s_p - E_p s_p)        gradient in zq: finish' q (s_q - E_q s_q)

Every token's value is counted from the side that gives it more mass, as in kleash.divergences.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from kleash.divergences import Divergence
from kleash.divergences.table import Side, weighted_generator
from kleash.linear.impl.loop import RowCore
from kleash.linear.impl.project import both_normalised
from kleash.linear.impl.reference import divergence_of_logits
from kleash.linear.impl.vocab_shards import LOCAL_VOCAB, LocalVocab

NUM_BUFFERS = 20
"""Tensors shaped like a block's logits that exist together while a record's functions run."""


def record_rows(record: Divergence) -> RowCore:
    """The core that gives each row's value alone in a tuple; not finite where it cannot do a row."""

    def rows(zp: Tensor, zq: Tensor, room: object = None, across: LocalVocab = LOCAL_VOCAB) -> tuple[Tensor]:
        logp, logq = both_normalised(zp, zq, across)
        return (record.finish(summed(record, logp, logq, across)),)

    return rows


def summed(record: Divergence, logp: Tensor, logq: Tensor, across: LocalVocab) -> Float[Tensor, " rows"]:
    """E_p f(u) of each row, of logits that are all finite."""
    lead = logp - logq
    of_p = weighted_generator(record.from_p, logp, lead.clamp(min=0))
    of_p.add_(weighted_generator(record.from_q, logq, lead.neg_().clamp_(min=0)))
    return across.all_reduce_sum(of_p.sum(-1))[0]


def record_gradient_rows(
    record: Divergence,
    zp: Float[Tensor, "rows vocab"],
    zq: Float[Tensor, "rows vocab"],
    weight: Float[Tensor, " rows"],
    needs: tuple[bool, bool],
    across: LocalVocab = LOCAL_VOCAB,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The value of each row, and the gradients of ``weight D`` in both logits, where they are needed.

    The value is NaN for a row of which anything said here is not finite.
    """
    logp, logq = both_normalised(zp, zq, across)
    with torch.enable_grad():
        total = summed(record, logp, logq, across).detach().requires_grad_()
        value = record.finish(total)
        (slope,) = torch.autograd.grad(value, total, weight)
    value, right = value.detach(), value.detach().isfinite()
    u = logp - logq
    in_p = in_q = None
    if needs[0]:
        in_p, mean = pulled(record.from_p, logp, u, slope, across)
        right &= mean.isfinite()
    if needs[1]:
        in_q, mean = pulled(record.from_q, logq, u.neg_(), slope, across)
        right &= mean.isfinite()
    return torch.where(right, value, torch.nan), in_p, in_q


def pulled(
    side: Side, log_mass: Tensor, gap: Tensor, slope: Tensor, across: LocalVocab
) -> tuple[Tensor, Tensor]:
    """``slope mass (s - E s)``, and ``E s``."""
    mass, score = log_mass.exp(), side.score(gap)
    (mean,) = across.all_reduce_sum((mass * score).sum(-1))
    return mass.mul_(score - mean[:, None]).mul_(slope[:, None]), mean


def plain_rows(
    record: Divergence,
    zp: Float[Tensor, "rows vocab"],
    zq: Float[Tensor, "rows vocab"],
    weight: Float[Tensor, " rows"],
    across: LocalVocab = LOCAL_VOCAB,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same by the specification and autograd, for logits of any kind."""
    with torch.enable_grad():
        rows = [z.detach().requires_grad_() for z in (zp, zq)]
        value = divergence_of_logits(record, rows[0], rows[1], across)
        in_p, in_q = torch.autograd.grad(value, rows, weight)
    return value.detach(), in_p, in_q
