"""The fast version of KL(p || q): it computes the masses of p only, and uses q's logits as a difference from p's.

With ``r = zq - zp - x`` where ``x = E_p[zq - zp]``, and ``y = E_p expm1(r) = E_p phi(-r) + E_p r``,

    log p - log q = log1p(y) - r          KL(p || q) = log1p(y) - E_p r
    gradient in zp: p (E_p r - r)          gradient in zq: q - p = p (expm1(r) - y) / (1 + y)

``E_p r`` is 0 but for the rounding of ``x``, and is computed. The rounding of the logits gives a pair of true
distributions near the exact pair, where KL is nearly stationary: its effect is of second order.
Nothing overflows or loses digits as long as r is at most FAR on every token; a row beyond that is NaN here, and
``row_statistics`` computes it. A KL below FAINT, which could be the rounding of ``x``, is minus infinity here, and
``kl_of_near_rows`` computes it; the gradients are right in such rows too.

Uncompiled, every operation works on rows that stay in the cache and writes to a given buffer.
"""

from math import factorial
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from kleash.divergences import phi
from kleash.linear.impl.row_statistics import LOG2_E, Buffers, polynomial, unless_small
from kleash.linear.vocab_shards import LOCAL_VOCAB, LocalVocab

FAR = 40.0
"""The largest r that is computed here, in nats: a mass of p that underflows then adds less than 1e-16."""
FAINT = {torch.float32: 1e-12, torch.float64: 1e-24}
"""KL in nats below which the difference of two numbers has no digits left, and the sum of phi is taken instead."""
PHI = tuple(1 / factorial(n) for n in range(2, 18))
"""Coefficients of phi(-r)/r^2 in powers of r."""
NUM_BUFFERS = 5
NO_BUFFERS: Buffers = (None,) * NUM_BUFFERS


class Moments(NamedTuple):
    """Masses and residuals of some rows; the numbers are columns."""

    top: Float[Tensor, "rows 1"]
    """p's largest logit."""
    total: Float[Tensor, "rows 1"]
    """The sum of ``mass``."""
    shift: Float[Tensor, "rows 1"]
    """x."""
    largest_residual: Float[Tensor, "rows 1"]
    """The largest r on this rank."""
    mass: Float[Tensor, "rows vocab"]
    """exp(zp - top)."""
    residual: Float[Tensor, "rows vocab"]
    """r."""


def moments(
    zp: Tensor, zq: Tensor, buffers: Buffers, q_is_delta: bool, vocab_shards: LocalVocab = LOCAL_VOCAB
) -> Moments:
    """The moments of rows of logits; if ``q_is_delta``, ``zq`` is their difference from ``zp``."""
    difference = zq if q_is_delta else torch.sub(zq, zp, out=buffers[0])
    (top,) = vocab_shards.all_reduce_max(zp.amax(-1, keepdim=True))
    mass = torch.add(top * -LOG2_E, zp, alpha=LOG2_E, out=buffers[1]).exp2_()
    moment = torch.mul(mass, difference, out=buffers[2]).sum(-1, keepdim=True)
    total, moment = vocab_shards.all_reduce_sum(mass.sum(-1, keepdim=True), moment)
    shift = moment / total
    residual = torch.sub(difference, shift, out=buffers[0])
    return Moments(top, total, shift, residual.amax(-1, keepdim=True), mass, residual)


def kl_if_reliable(
    kl: Float[Tensor, "rows 1"], largest_residual: Float[Tensor, "rows 1"]
) -> Float[Tensor, " rows"]:
    """KL where it is accurate, else NaN (far rows) or minus infinity (nearly equal rows).

    If no residual is positive, the two distributions are the same, and KL is 0.
    """
    same = (largest_residual == 0) & (kl == 0)
    kl = torch.where(largest_residual <= FAR, kl, torch.nan)
    return torch.where((kl < FAINT[kl.dtype]) & ~same, -torch.inf, kl)[:, 0]


def kl_of_near_rows(
    zp: Tensor, zq: Tensor, q_is_delta: bool, vocab_shards: LocalVocab = LOCAL_VOCAB
) -> Float[Tensor, " rows"]:
    """KL(p || q) of rows where p and q nearly agree, as a sum of terms that are never negative."""
    x = moments(zp, zq, NO_BUFFERS, q_is_delta, vocab_shards)
    (y,) = vocab_shards.all_reduce_sum((torch.expm1(x.residual) * x.mass).sum(-1, keepdim=True))
    (kl,) = vocab_shards.all_reduce_sum(
        phi(torch.log1p(y / x.total) - x.residual).mul_(x.mass).sum(-1, keepdim=True)
    )
    return (kl / x.total)[:, 0]


def phi_of_residual(x: Moments, buffers: Buffers) -> Float[Tensor, "rows vocab"]:
    """phi(-r) = expm1(r) - r, by its series where |r| is small, so that nothing cancels; never negative.

    It is the sum of two parts of which one is 0, since ``torch.where`` takes as long as everything else.
    """
    terms = 14 if x.residual.dtype == torch.float64 else 6
    rest = unless_small(x.residual, buffers[2])
    near = torch.sub(x.residual, rest, out=buffers[3])
    value = polynomial(near, PHI[:terms], buffers[4]).mul_(near)
    return value.add_(expm1_far(rest, buffers[3]).sub_(rest))


def expm1_far(rest: Float[Tensor, "rows vocab"], out: Tensor | None) -> Float[Tensor, "rows vocab"]:
    """expm1 of numbers that are 0 or far from 0, so that nothing cancels; uncompiled by exp2, which is faster."""
    if torch.compiler.is_compiling():
        return torch.expm1(rest)
    return torch.mul(rest, LOG2_E, out=out).exp2_().sub_(1.0)


class KLTerms(NamedTuple):
    """KL and the means over p that it follows from, computed in float64."""

    kl: Float[Tensor, " rows"]
    """``kl_if_reliable``."""
    residual_mean: Float[Tensor, "rows 1"]
    """E_p r."""
    excess: Float[Tensor, "rows 1"]
    """y."""


def kl_terms(x: Moments, phi_sum: Float[Tensor, "rows 1"], residual_sum: Float[Tensor, "rows 1"]) -> KLTerms:
    """KL and its terms from the sums of ``mass phi(-r)`` and ``mass r``."""
    total = x.total.double()
    residual_mean = residual_sum.double() / total
    excess = (phi_sum.double() + residual_sum.double()) / total
    kl = (torch.log1p(excess) - residual_mean).to(x.total.dtype)
    return KLTerms(kl_if_reliable(kl, x.largest_residual), residual_mean.to(kl.dtype), excess.to(kl.dtype))


def kl_rows(
    zp: Float[Tensor, "rows vocab"],
    zq: Float[Tensor, "rows vocab"],
    buffers: Buffers = NO_BUFFERS,
    *,
    q_is_delta: bool = False,
    vocab_shards: LocalVocab = LOCAL_VOCAB,
) -> tuple[Tensor]:
    """KL(p || q) of each row, as a tuple of one tensor; not finite for rows that cannot be computed here."""
    x = moments(zp, zq, buffers, q_is_delta, vocab_shards)
    phi_sum = phi_of_residual(x, buffers).mul_(x.mass).sum(-1, keepdim=True)
    residual_sum = x.residual.mul_(x.mass).sum(-1, keepdim=True)
    return (kl_terms(x, *vocab_shards.all_reduce_sum(phi_sum, residual_sum)).kl,)


def kl_gradient_rows(
    zp: Float[Tensor, "rows vocab"],
    zq: Float[Tensor, "rows vocab"],
    weight: Float[Tensor, " rows"],
    buffers: Buffers = NO_BUFFERS,
    *,
    q_is_delta: bool = False,
    needs: tuple[bool, bool] = (True, True),
    vocab_shards: LocalVocab = LOCAL_VOCAB,
) -> tuple[Tensor | None, ...]:
    """KL(p || q) of each row, and the gradients of ``weight KL`` in p's logits and q's, where needed."""
    x = moments(zp, zq, buffers, q_is_delta, vocab_shards)
    weighted_phi = phi_of_residual(x, buffers).mul_(x.mass)
    weighted_residual = x.residual.mul_(x.mass)
    sums = weighted_phi.sum(-1, keepdim=True), weighted_residual.sum(-1, keepdim=True)
    terms = kl_terms(x, *vocab_shards.all_reduce_sum(*sums))
    share = weight[:, None] / x.total
    in_p = in_q = None
    if needs[1]:
        in_q = (
            weighted_phi.add_(weighted_residual)
            .addcmul_(x.mass, -terms.excess)
            .mul_(share / (1 + terms.excess))
        )
    if needs[0]:
        in_p = weighted_residual.addcmul_(x.mass, -terms.residual_mean).mul_(-share)
    return terms.kl, in_p, in_q
