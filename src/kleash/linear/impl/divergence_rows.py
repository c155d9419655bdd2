"""Value and gradient of any divergence, from its record, for rows of finite logits.

With ``u = log p - log q`` and the record's scores ``s_p(u)`` and ``s_q(-u)``,

    D(p || q) = finish(sum of p f(u))
    gradient in zp: finish' p (s_p - E_p s_p)        gradient in zq: finish' q (s_q - E_q s_q)

Each token's term is computed from the side that gives it more mass, as in kleash.divergences.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from kleash.divergences import Divergence
from kleash.divergences.table import Side, weighted_generator
from kleash.linear.impl.chunk_loop import RowCallable
from kleash.linear.impl.project import both_normalised
from kleash.linear.impl.reference import divergence_of_logits
from kleash.linear.vocab_shards import LOCAL_VOCAB, LocalVocab

NUM_BUFFERS = 20
"""Tensors of a block's size that exist together while a record's functions run."""


def fast_divergence_rows(divergence: Divergence) -> RowCallable:
    """The function of each row's value from the divergence's generators; its result is not finite where it fails."""

    def rows(
        zp: Tensor, zq: Tensor, buffers: object = None, vocab_shards: LocalVocab = LOCAL_VOCAB
    ) -> tuple[Tensor]:
        logp, logq = both_normalised(zp, zq, vocab_shards)
        return (divergence.finish(generator_sum(divergence, logp, logq, vocab_shards)),)

    return rows


def generator_sum(
    record: Divergence, logp: Tensor, logq: Tensor, vocab_shards: LocalVocab
) -> Float[Tensor, " rows"]:
    """E_p f(u) of each row, from finite log-probabilities."""
    u = logp - logq
    terms = weighted_generator(record.from_p, logp, u.clamp(min=0))
    terms.add_(weighted_generator(record.from_q, logq, u.neg_().clamp_(min=0)))
    return vocab_shards.all_reduce_sum(terms.sum(-1))[0]


def record_gradient_rows(
    record: Divergence,
    zp: Float[Tensor, "rows vocab"],
    zq: Float[Tensor, "rows vocab"],
    weight: Float[Tensor, " rows"],
    needs: tuple[bool, bool],
    vocab_shards: LocalVocab = LOCAL_VOCAB,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The value of each row, and the gradients of ``weight D`` in both logits, where needed.

    The value is NaN for a row of which any of these is not finite.
    """
    logp, logq = both_normalised(zp, zq, vocab_shards)
    with torch.enable_grad():
        total = generator_sum(record, logp, logq, vocab_shards).detach().requires_grad_()
        value = record.finish(total)
        (slope,) = torch.autograd.grad(value, total, weight)
    value, is_valid = value.detach(), value.detach().isfinite()
    u = logp - logq
    in_p = in_q = None
    if needs[0]:
        in_p, mean = side_gradient(record.from_p, logp, u, slope, vocab_shards)
        is_valid &= mean.isfinite()
    if needs[1]:
        in_q, mean = side_gradient(record.from_q, logq, u.neg_(), slope, vocab_shards)
        is_valid &= mean.isfinite()
    return torch.where(is_valid, value, torch.nan), in_p, in_q


def side_gradient(
    side: Side, log_mass: Tensor, log_ratio: Tensor, slope: Tensor, vocab_shards: LocalVocab
) -> tuple[Tensor, Tensor]:
    """``slope mass (s - E s)``, and ``E s``."""
    mass, score = log_mass.exp(), side.score(log_ratio)
    (mean,) = vocab_shards.all_reduce_sum((mass * score).sum(-1))
    return mass.mul_(score - mean[:, None]).mul_(slope[:, None]), mean


def reference_gradient_rows(
    record: Divergence,
    zp: Float[Tensor, "rows vocab"],
    zq: Float[Tensor, "rows vocab"],
    weight: Float[Tensor, " rows"],
    vocab_shards: LocalVocab = LOCAL_VOCAB,
) -> tuple[Tensor, Tensor, Tensor]:
    """The value of each row, and the gradients of ``weight D``, by the reference and autograd, for all logits."""
    with torch.enable_grad():
        leaves = [z.detach().requires_grad_() for z in (zp, zq)]
        value = divergence_of_logits(record, leaves[0], leaves[1], vocab_shards)
        in_p, in_q = torch.autograd.grad(value, leaves, weight)
    return value.detach(), in_p, in_q
