"""What is computed from the logits of a few rows, in float64: divergences with their gradients, and statistics.

In float64 the textbook's formulas lose no digit that float32 logits have: an error of the normalisers of 1e-16 nats
is that of the result. So there is one formula for near and far distributions, and one for a rank with all words and for
ranks that share them, which exchange the largest logits, the masses, and each sum over the words.

A row is *finite* if all logits are. Of any other row, a function returns a column that is not finite either; then the
functions named ``any_`` compute it, whose zeros and infinities the generators of kleash.divergences define. They are
slower.
"""

from math import log
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kleash.divergences import Divergence
from kleash.divergences.functions import contributions
from kleash.divergences.table import DIVERGENCES, Side, weighted_generator
from kleash.linear.types import TokenStatistics, TokenTerms
from kleash.linear.vocab_shards import LocalVocab

KL = DIVERGENCES["kl"]
BLOCK = 256
"""Logits of a block: the largest logits are searched among the maxima of blocks first, since argmax is slow."""


class Distributions(NamedTuple):
    """Two distributions of some rows over this rank's words, in float64."""

    logp: Float[Tensor, "rows vocab"]
    logq: Float[Tensor, "rows vocab"]
    p: Float[Tensor, "rows vocab"]
    q: Float[Tensor, "rows vocab"]
    log_sum_p: Float[Tensor, "rows 1"]
    """Log-sum-exp of p's logits over the whole vocabulary."""
    log_sum_q: Float[Tensor, "rows 1"]


class TermRows(NamedTuple):
    """The terms of some rows, and the log-sum-exps of their logits; columns in float64."""

    token_logp: Float[Tensor, "rows 1"]
    token_logq: Float[Tensor, "rows 1"]
    kl: Float[Tensor, "rows 1"]
    entropy: Float[Tensor, "rows 1"]
    """Entropy of p."""
    log_sum_p: Float[Tensor, "rows 1"]
    log_sum_q: Float[Tensor, "rows 1"]


def largest(z: Float[Tensor, "rows vocab"]) -> Float[Tensor, "rows 1"]:
    """The largest logit of each row; minus infinity on a rank without words."""
    return z.amax(-1, keepdim=True) if z.shape[-1] else z.new_full((len(z), 1), -torch.inf)


def nan_unless_finite(
    value: Float[Tensor, "rows 1"], zp: Tensor, zq: Tensor, vocab_shards: LocalVocab
) -> Float[Tensor, "rows 1"]:
    """The value, or NaN where the sum of a row's logits is not finite, for values that are finite there."""
    (total,) = vocab_shards.all_reduce_sum(zp.sum(-1, keepdim=True) + zq.sum(-1, keepdim=True))
    return torch.where(total.isfinite(), value, torch.nan)


def log_sum_exps(zp: Tensor, zq: Tensor, vocab_shards: LocalVocab) -> tuple[Tensor, Tensor]:
    """The log-sum-exp of both models' logits over the whole vocabulary, as columns in float64."""
    tops = vocab_shards.all_reduce_max(largest(zp).double(), largest(zq).double())
    tops = tuple(torch.where(top.isfinite(), top, 0.0) for top in tops)
    masses = ((z - top).exp_().sum(-1, keepdim=True) for z, top in zip((zp, zq), tops, strict=True))
    sum_p, sum_q = (
        top + mass.log() for top, mass in zip(tops, vocab_shards.all_reduce_sum(*masses), strict=True)
    )
    return sum_p, sum_q


def distributions(zp: Tensor, zq: Tensor, vocab_shards: LocalVocab) -> Distributions:
    """Both distributions of rows of finite logits."""
    tops = vocab_shards.all_reduce_max(largest(zp).double(), largest(zq).double())
    logs = [z - top for z, top in zip((zp, zq), tops, strict=True)]
    masses = [x.exp() for x in logs]
    totals = vocab_shards.all_reduce_sum(*(mass.sum(-1, keepdim=True) for mass in masses))
    log_totals = [total.log() for total in totals]
    logp, logq = (x.sub_(total) for x, total in zip(logs, log_totals, strict=True))
    p, q = (mass.div_(total) for mass, total in zip(masses, totals, strict=True))
    return Distributions(
        logp, logq, p, q, *(top + total for top, total in zip(tops, log_totals, strict=True))
    )


def dot(a: Float[Tensor, "rows vocab"], b: Float[Tensor, "rows vocab"]) -> Float[Tensor, "rows 1"]:
    """The sum over this rank's words of the product, as a column."""
    return cast("Any", torch.linalg).vecdot(a, b)[:, None]


def kl_rows(zp: Tensor, zq: Tensor, vocab_shards: LocalVocab) -> tuple[Tensor]:
    """KL(p || q) of rows of finite logits, as a tuple of one column; below 0 only by rounding, which is cut off."""
    x = distributions(zp, zq, vocab_shards)
    (kl,) = vocab_shards.all_reduce_sum(dot(x.p, x.logp - x.logq))
    return (kl.clamp(min=0),)


def kl_gradient_rows(
    zp: Tensor,
    zq: Tensor,
    weight: Float[Tensor, "rows 1"],
    vocab_shards: LocalVocab,
    *,
    needs: tuple[bool, bool],
) -> tuple[Tensor | None, ...]:
    """KL(p || q) of rows of finite logits, and the gradients of ``weight KL`` in both logits, where needed.

    They are ``weight p (u - KL)`` with ``u = log p - log q``, and ``weight (q - p)``.
    """
    x = distributions(zp, zq, vocab_shards)
    log_ratio = x.logp.sub_(x.logq)
    (kl,) = vocab_shards.all_reduce_sum(dot(x.p, log_ratio))
    kl = kl.clamp(min=0)
    in_q = x.q.sub_(x.p).mul_(weight) if needs[1] else None
    in_p = log_ratio.sub_(kl).mul_(x.p).mul_(weight) if needs[0] else None
    return kl, in_p, in_q


def divergence_rows(record: Divergence, zp: Tensor, zq: Tensor, vocab_shards: LocalVocab) -> tuple[Tensor]:
    """D(p || q) of rows of finite logits, as a tuple of one column."""
    sum_p, sum_q = log_sum_exps(zp, zq, vocab_shards)
    value = record.finish(generator_sum(record, zp - sum_p, zq - sum_q, vocab_shards))
    return (nan_unless_finite(value, zp, zq, vocab_shards),)


def generator_sum(
    record: Divergence, logp: Tensor, logq: Tensor, vocab_shards: LocalVocab
) -> Float[Tensor, "rows 1"]:
    """E_p f(u) of each row; each token's term comes from the side that gives it more mass."""
    u = logp - logq
    terms = weighted_generator(record.from_p, logp, u.clamp(min=0))
    terms.add_(weighted_generator(record.from_q, logq, u.neg_().clamp_(min=0)))
    return vocab_shards.all_reduce_sum(terms.sum(-1, keepdim=True))[0]


def divergence_gradient_rows(
    record: Divergence,
    zp: Tensor,
    zq: Tensor,
    weight: Float[Tensor, "rows 1"],
    vocab_shards: LocalVocab,
    *,
    needs: tuple[bool, bool],
) -> tuple[Tensor | None, ...]:
    """D(p || q) of rows of finite logits, and the gradients of ``weight D`` in both logits, where needed.

    With the record's scores, they are ``finish' p (s_p - E_p s_p)`` and ``finish' q (s_q - E_q s_q)``.
    """
    sum_p, sum_q = log_sum_exps(zp, zq, vocab_shards)
    logp, logq = zp - sum_p, zq - sum_q
    total = generator_sum(record, logp, logq, vocab_shards)
    value, slope = finish(record, total, weight)
    u = logp - logq
    in_p = side_gradient(record.from_p, logp, u, slope, vocab_shards) if needs[0] else None
    in_q = side_gradient(record.from_q, logq, u.neg(), slope, vocab_shards) if needs[1] else None
    return nan_unless_finite(value, zp, zq, vocab_shards), in_p, in_q


def finish(record: Divergence, total: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """A record's value from its sum, and ``weight`` times its derivative."""
    with torch.enable_grad():
        leaf = total.detach().requires_grad_()
        value = record.finish(leaf)
        (slope,) = torch.autograd.grad(value, leaf, weight)
    return value.detach(), slope


def side_gradient(
    side: Side, log_mass: Tensor, log_ratio: Tensor, slope: Tensor, vocab_shards: LocalVocab
) -> Tensor:
    """``slope mass (s - E s)``."""
    mass, score = log_mass.exp(), side.score(log_ratio)
    (mean,) = vocab_shards.all_reduce_sum(dot(mass, score))
    return mass.mul_(score - mean).mul_(slope)


def any_divergence_rows(
    record: Divergence, zp: Tensor, zq: Tensor, vocab_shards: LocalVocab
) -> tuple[Tensor]:
    """D(p || q) of rows whose logits may be infinite or NaN, as a tuple of one column.

    ``divergence_rows`` is for finite logits only.
    """
    sum_p, sum_q = log_sum_exps(zp, zq, vocab_shards)
    terms = contributions(record, zp - sum_p, zq - sum_q).sum(-1, keepdim=True)
    return (record.finish(vocab_shards.all_reduce_sum(terms)[0]),)


def any_divergence_gradient_rows(
    record: Divergence,
    zp: Tensor,
    zq: Tensor,
    weight: Float[Tensor, "rows 1"],
    vocab_shards: LocalVocab,
) -> tuple[Tensor, ...]:
    """D(p || q) of any rows, and the gradients of ``weight D`` in both logits."""
    sum_p, sum_q = log_sum_exps(zp, zq, vocab_shards)
    with torch.enable_grad():
        logs = [(z - total).requires_grad_() for z, total in ((zp, sum_p), (zq, sum_q))]
        terms = contributions(record, *logs).sum(-1, keepdim=True)
    (total,) = vocab_shards.all_reduce_sum(terms.detach())
    value, slope = finish(record, total, weight)
    return value, *through_normalisers(logs, terms, slope, vocab_shards)


def through_normalisers(
    logs: list[Tensor], outputs: Tensor, weight: Tensor, vocab_shards: LocalVocab
) -> list[Tensor]:
    """The gradients in both logits of a function of log-probabilities on this rank: ``g - p E g``, g by autograd."""
    slopes = torch.autograd.grad(outputs, logs, weight, allow_unused=True, materialize_grads=True)
    sums = vocab_shards.all_reduce_sum(*(g.sum(-1, keepdim=True) for g in slopes))
    return [g - x.detach().exp() * total for g, x, total in zip(slopes, logs, sums, strict=True)]


def term_rows(
    zp: Tensor, zq: Tensor, tokens: Int[Tensor, " rows"], vocab_shards: LocalVocab
) -> tuple[Tensor, ...]:
    """The fields of TermRows for rows of finite logits."""
    sum_p, sum_q = log_sum_exps(zp, zq, vocab_shards)
    logp, logq = zp - sum_p, zq - sum_q
    picked = vocab_shards.gather_local(logp, tokens), vocab_shards.gather_local(logq, tokens)
    p = logp.exp()
    sums = *picked, dot(p, logq.neg_().add_(logp)), dot(p, logp).neg()
    token_logp, token_logq, kl, entropies = vocab_shards.all_reduce_sum(*sums)
    return token_logp, token_logq, kl.clamp(min=0), entropies, sum_p, sum_q


def any_term_rows(
    zp: Tensor, zq: Tensor, tokens: Int[Tensor, " rows"], vocab_shards: LocalVocab
) -> tuple[Tensor, ...]:
    """The fields of TermRows for any rows."""
    sum_p, sum_q = log_sum_exps(zp, zq, vocab_shards)
    terms = local_terms(zp - sum_p, zq - sum_q, tokens, vocab_shards)
    return *vocab_shards.all_reduce_sum(*terms), sum_p, sum_q


def local_terms(logp: Tensor, logq: Tensor, tokens: Tensor, vocab_shards: LocalVocab) -> TokenTerms:
    """This rank's part of the terms of any rows, as columns."""
    kl = contributions(KL, logp, logq).sum(-1, keepdim=True)
    picked = vocab_shards.gather_local(logp, tokens), vocab_shards.gather_local(logq, tokens)
    return TokenTerms(*picked, kl, entropy(logp))


def objective_gradient_rows(
    zp: Tensor,
    zq: Tensor,
    tokens: Int[Tensor, " rows"],
    known: TermRows,
    c: TokenTerms,
    vocab_shards: LocalVocab,
    *,
    needs: tuple[bool, bool],
) -> tuple[Tensor | None, ...]:
    """The KL of rows of finite logits, and the gradients of ``sum of c term`` in both, where needed. In p's logits

        c_logp (1_x - p) + c_kl p (u - KL) - c_entropy p (log p + H),    u = log p - log q

    and in q's ``c_logq (1_x - q) + c_kl (q - p)``.
    """
    logp = zp - known.log_sum_p
    p, in_p, in_q = logp.exp(), None, None
    if needs[0]:
        in_p = zq.double().neg().add_(known.log_sum_q).add_(logp).sub_(known.kl).mul_(c.kl)
        in_p.sub_(logp.add_(known.entropy).mul_(c.entropy)).sub_(c.token_logp).mul_(p)
        in_p = vocab_shards.scatter_add_local_(in_p, tokens, c.token_logp)
    if needs[1]:
        q = (zq - known.log_sum_q).exp_()
        in_q = (q * (c.kl - c.token_logq)).sub_(p.mul_(c.kl))
        in_q = vocab_shards.scatter_add_local_(in_q, tokens, c.token_logq)
    return nan_unless_finite(known.kl, zp, zq, vocab_shards), in_p, in_q


def any_objective_gradient_rows(
    zp: Tensor, zq: Tensor, tokens: Int[Tensor, " rows"], c: TokenTerms, vocab_shards: LocalVocab
) -> tuple[Tensor, ...]:
    """The gradients of ``sum of c term`` in both logits of any rows; a term with coefficient 0 is not read."""
    sum_p, sum_q = log_sum_exps(zp, zq, vocab_shards)
    with torch.enable_grad():
        logs = [(z - total).requires_grad_() for z, total in ((zp, sum_p), (zq, sum_q))]
        total = weighted_terms(local_terms(logs[0], logs[1], tokens, vocab_shards), c)
    return tuple(through_normalisers(logs, total, torch.ones_like(total), vocab_shards))


def entropy(logp: Float[Tensor, "rows vocab"]) -> Float[Tensor, "rows 1"]:
    """This rank's part of the entropy of any rows."""
    return (logp.exp() * torch.where(logp == -torch.inf, 0.0, logp)).sum(-1, keepdim=True).neg()


def weighted_terms(terms: TokenTerms, coefficients: TokenTerms) -> Tensor:
    """Each token's sum of coefficient times term; a term with coefficient 0 is not read, even if it is NaN."""
    parts = [torch.where(c != 0, x, 0.0) * c for x, c in zip(terms, coefficients, strict=True)]
    return torch.stack(parts).sum(0)


def statistics_rows(
    zp: Tensor, zq: Tensor, tokens: Int[Tensor, " rows"], vocab_shards: LocalVocab
) -> tuple[Tensor, ...]:
    """The fields of TokenStatistics, as columns, for rows of finite logits."""
    x = distributions(zp, zq, vocab_shards)
    picked = [vocab_shards.gather_local(log_mass, tokens) for log_mass in (x.logp, x.logq)]
    entropies = dot(x.p, x.logp).neg(), dot(x.q, x.logq).neg()
    log_ratio = x.logp.sub_(x.logq)
    kls = dot(x.p, log_ratio), dot(x.q, log_ratio).neg()
    total_variation = (x.p - x.q).abs_().sum(-1, keepdim=True).mul_(0.5)
    both = x.p.add_(x.q)
    # The logarithm of a positive float64 is above -746, and that of 0 is multiplied by 0.
    mixture = dot(both, both.log().clamp_(min=-800).sub_(log(2)))
    jensen_shannon = (entropies[0] + entropies[1] + mixture) / -2
    sums = *picked, *kls, jensen_shannon, total_variation, *entropies
    return finished_statistics(zp, zq, tokens, sums, (x.log_sum_p, x.log_sum_q), vocab_shards)


def any_statistics_rows(
    zp: Tensor, zq: Tensor, tokens: Int[Tensor, " rows"], vocab_shards: LocalVocab
) -> tuple[Tensor, ...]:
    """The fields of TokenStatistics, as columns, for any rows."""
    sum_p, sum_q = log_sum_exps(zp, zq, vocab_shards)
    logp, logq = zp - sum_p, zq - sum_q
    p, q = logp.exp(), logq.exp()
    entropies = entropy(logp), entropy(logq)
    mixture = torch.xlogy(p + q, (p + q) / 2).sum(-1, keepdim=True)
    sums = (
        vocab_shards.gather_local(logp, tokens),
        vocab_shards.gather_local(logq, tokens),
        contributions(KL, logp, logq).sum(-1, keepdim=True),
        contributions(KL, logq, logp).sum(-1, keepdim=True),
        (entropies[0] + entropies[1] + mixture) / -2,
        (p - q).abs().sum(-1, keepdim=True) / 2,
        *entropies,
    )
    return finished_statistics(zp, zq, tokens, sums, (sum_p, sum_q), vocab_shards)


def finished_statistics(
    zp: Tensor,
    zq: Tensor,
    tokens: Tensor,
    sums: tuple[Tensor, ...],
    log_sums: tuple[Tensor, Tensor],
    vocab_shards: LocalVocab,
) -> tuple[Tensor, ...]:
    """The fields of TokenStatistics from this rank's sums over its words, and the likeliest words and ranks.

    The sums are the fields of TokenStatistics up to the entropies. Jensen-Shannon is 0 where the total variation is.
    Divergences are below 0 only by rounding, which is cut off.
    """
    tops = [vocab_shards.largest(*top_rows(z, 1)) for z in (zp, zq)]
    (token_zq,) = vocab_shards.all_reduce_sum(vocab_shards.gather_local(zq, tokens))
    greater = torch.gt(zq, token_zq).sum(-1, keepdim=True).double()
    logp, logq, kl_pq, kl_qp, jensen_shannon, distance, entropy_p, entropy_q, rank = (
        vocab_shards.all_reduce_sum(*sums, greater)
    )
    top_p, top_q = ((top - log_sum).exp_() for (top, _), log_sum in zip(tops, log_sums, strict=True))
    values = TokenStatistics(
        token_logp=logp,
        token_logq=logq,
        kl_pq=kl_pq.clamp(min=0),
        kl_qp=kl_qp.clamp(min=0),
        jensen_shannon=torch.where(distance == 0, 0.0, jensen_shannon.clamp(min=0)),
        total_variation=distance,
        entropy_p=entropy_p,
        entropy_q=entropy_q,
        top1_p=tops[0][1],
        top1_q=tops[1][1],
        top1_probability_p=top_p,
        top1_probability_q=top_q,
        rank_q=rank.to(torch.int64),
    )
    return tuple(values)


def top_rows(
    z: Float[Tensor, "rows vocab"], top: int
) -> tuple[Float[Tensor, "rows top"], Int[Tensor, "rows top"]]:
    """The ``top`` largest logits of each row, largest first, and their ids; the first of several that are equal.

    They are searched within the blocks with the largest maxima, which contain all of them. Where this rank has fewer
    words, the rest are minus infinity.
    """
    vocab_size = z.shape[-1]
    if vocab_size < top:
        missing = top - vocab_size
        values, ids = top_rows(z, vocab_size) if vocab_size else (z, torch.empty_like(z, dtype=torch.int64))
        values, ids = (torch.nn.functional.pad(x, (0, missing)) for x in (values, ids))
        values[:, vocab_size:] = -torch.inf
        return values, ids
    whole = vocab_size // BLOCK * BLOCK
    if torch.compiler.is_compiling() or whole < 2 * top * BLOCK:
        return first_largest(z, top)
    maxima = z[:, :whole].reshape(len(z), whole // BLOCK, BLOCK).amax(-1)
    blocks = first_largest(maxima, top)[1].sort(-1).values
    ids = (blocks[:, :, None] * BLOCK + torch.arange(BLOCK, device=z.device)).flatten(1)
    ids = torch.cat([ids, torch.arange(whole, vocab_size, device=z.device).expand(len(z), -1)], -1)
    values, places = first_largest(z.gather(-1, ids), top)
    return values, ids.gather(-1, places)


def first_largest(z: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """The ``top`` largest numbers of each row and their places; of equal ones a single largest is the first."""
    if top == 1:
        place = z.argmax(-1, keepdim=True)
        return z.gather(-1, place), place
    topmost = z.topk(top, -1)
    return topmost.values, topmost.indices
