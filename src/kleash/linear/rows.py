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
from kleash.linear.types import TokenTerms
from kleash.linear.vocab_shards import VocabShards

KL = DIVERGENCES["kl"]
BLOCK = 256
"""Logits of a block: the largest logits are searched among the maxima of blocks first, since argmax is slow."""


class Masses(NamedTuple):
    """Both models' logits minus the largest ones, and the exponentials of these, over this rank's words; in float64.

    A probability is ``mass / total``. ``top`` and ``total`` are over the whole vocabulary.
    """

    below_p: Float[Tensor, "rows vocab"]
    below_q: Float[Tensor, "rows vocab"]
    mass_p: Float[Tensor, "rows vocab"]
    mass_q: Float[Tensor, "rows vocab"]
    top_p: Float[Tensor, "rows 1"]
    top_q: Float[Tensor, "rows 1"]
    total_p: Float[Tensor, "rows 1"]
    total_q: Float[Tensor, "rows 1"]


class TermRows(NamedTuple):
    """The terms of some rows, and the log-sum-exps of their logits; columns in float64."""

    token_logp: Float[Tensor, "rows 1"]
    token_logq: Float[Tensor, "rows 1"]
    kl: Float[Tensor, "rows 1"]
    entropy: Float[Tensor, "rows 1"]
    """Entropy of p."""
    log_sum_p: Float[Tensor, "rows 1"]
    log_sum_q: Float[Tensor, "rows 1"]


class StatisticRows(NamedTuple):
    """What the statistics of some rows need sums over the words for; columns in float64, as in TokenStatistics."""

    token_logp: Float[Tensor, "rows 1"]
    token_logq: Float[Tensor, "rows 1"]
    kl_pq: Float[Tensor, "rows 1"]
    kl_qp: Float[Tensor, "rows 1"]
    jensen_shannon: Float[Tensor, "rows 1"]
    total_variation: Float[Tensor, "rows 1"]
    entropy_p: Float[Tensor, "rows 1"]
    entropy_q: Float[Tensor, "rows 1"]
    log_sum_p: Float[Tensor, "rows 1"]
    log_sum_q: Float[Tensor, "rows 1"]


def largest(z: Float[Tensor, "rows vocab"]) -> Float[Tensor, "rows 1"]:
    """The largest logit of each row; minus infinity on a rank without words."""
    return z.amax(-1, keepdim=True) if z.shape[-1] else z.new_full((len(z), 1), -torch.inf)


def nan_unless_finite(
    value: Float[Tensor, "rows 1"], zp: Tensor, zq: Tensor, vocab_shards: VocabShards
) -> Float[Tensor, "rows 1"]:
    """The value, or NaN where the sum of a row's logits is not finite, for values that are finite there."""
    (total,) = vocab_shards.all_reduce_sum(zp.sum(-1, keepdim=True) + zq.sum(-1, keepdim=True))
    return torch.where(total.isfinite(), value, torch.nan)


def minus(z: Float[Tensor, "rows vocab"], column: Float[Tensor, "rows 1"]) -> Float[Tensor, "rows vocab"]:
    """The difference as a new tensor in float64; torch takes ten times as long for one of two dtypes."""
    return z.to(torch.float64, copy=True).sub_(column)


def logs_and_sums(
    zp: Tensor, zq: Tensor, vocab_shards: VocabShards
) -> tuple[list[Float[Tensor, "rows vocab"]], tuple[Float[Tensor, "rows 1"], ...]]:
    """Both models' log-probabilities of any rows, and the log-sum-exps that were taken off the logits; in float64."""
    tops = vocab_shards.all_reduce_max(largest(zp).double(), largest(zq).double())
    tops = tuple(torch.where(top.isfinite(), top, 0.0) for top in tops)
    masses = (minus(z, top).exp_().sum(-1, keepdim=True) for z, top in zip((zp, zq), tops, strict=True))
    sums = tuple(
        top + mass.log() for top, mass in zip(tops, vocab_shards.all_reduce_sum(*masses), strict=True)
    )
    return [minus(z, total) for z, total in zip((zp, zq), sums, strict=True)], sums


def masses_of(zp: Tensor, zq: Tensor, vocab_shards: VocabShards) -> Masses:
    """The masses of rows of finite logits."""
    tops = vocab_shards.all_reduce_max(largest(zp).double(), largest(zq).double())
    below = [minus(z, top) for z, top in zip((zp, zq), tops, strict=True)]
    masses = [x.exp() for x in below]
    totals = vocab_shards.all_reduce_sum(*(mass.sum(-1, keepdim=True) for mass in masses))
    return Masses(*below, *masses, *tops, *totals)


def dot(a: Float[Tensor, "rows vocab"], b: Float[Tensor, "rows vocab"]) -> Float[Tensor, "rows 1"]:
    """The sum over this rank's words of the product, as a column."""
    return cast("Any", torch.linalg).vecdot(a, b)[:, None]


def kl_gradient_rows(
    zp: Tensor,
    zq: Tensor,
    weight: Float[Tensor, "rows 1"],
    vocab_shards: VocabShards,
    *,
    needs: tuple[bool, bool],
) -> tuple[Tensor | None, ...]:
    """KL(p || q) of rows of finite logits, and the gradients of ``weight KL`` in both logits, where needed.

    The KL is below 0 only by rounding, which is cut off. The gradients are ``weight p (u - KL)`` with
    ``u = log p - log q``, and ``weight (q - p)``.
    """
    x = masses_of(zp, zq, vocab_shards)
    ratio = x.below_p.sub_(x.below_q)
    (total,) = vocab_shards.all_reduce_sum(dot(x.mass_p, ratio))
    mean, weight_p = total / x.total_p, weight / x.total_p
    in_p = in_q = None
    if needs[1]:
        in_q = x.mass_q.mul_(weight / x.total_q).addcmul_(x.mass_p, weight_p, value=-1)
    if needs[0]:
        in_p = ratio.sub_(mean).mul_(x.mass_p).mul_(weight_p)
    return (mean + x.total_q.log() - x.total_p.log()).clamp(min=0), in_p, in_q


def generator_sum(
    record: Divergence, logp: Tensor, logq: Tensor, vocab_shards: VocabShards
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
    vocab_shards: VocabShards,
    *,
    needs: tuple[bool, bool],
) -> tuple[Tensor | None, ...]:
    """D(p || q) of rows of finite logits, and the gradients of ``weight D`` in both logits, where needed.

    With the record's scores, they are ``finish' p (s_p - E_p s_p)`` and ``finish' q (s_q - E_q s_q)``. The value is NaN
    where a score overflows, so that ``any_divergence_gradient_rows`` computes the row again.
    """
    (logp, logq), _ = logs_and_sums(zp, zq, vocab_shards)
    total = generator_sum(record, logp, logq, vocab_shards)
    value = nan_unless_finite(record.finish(total), zp, zq, vocab_shards)
    if not any(needs):
        return value, None, None
    slope = slope_of_finish(record, total, weight)
    in_p = in_q = None
    mean_score_p = mean_score_q = torch.zeros_like(total)
    if needs[0]:
        in_p, mean_score_p = side_gradient(record.from_p, logp, logq, slope, vocab_shards)
    if needs[1]:
        in_q, mean_score_q = side_gradient(record.from_q, logq, logp, slope, vocab_shards)
    return torch.where((mean_score_p + mean_score_q).isfinite(), value, torch.nan), in_p, in_q


def slope_of_finish(record: Divergence, total: Tensor, weight: Tensor) -> Tensor:
    """``weight`` times the derivative of a record's value in its sum."""
    with torch.enable_grad():
        leaf = total.detach().requires_grad_()
        return torch.autograd.grad(record.finish(leaf), leaf, weight)[0]


def side_gradient(
    side: Side, log_mass: Tensor, log_mass_of_other: Tensor, slope: Tensor, vocab_shards: VocabShards
) -> tuple[Tensor, Tensor]:
    """``slope mass (s - E s)``, and ``E s``, which is not finite if the score of a word overflows."""
    mass, score = log_mass.exp(), side.score(log_mass - log_mass_of_other)
    (mean,) = vocab_shards.all_reduce_sum(dot(mass, score))
    return mass.mul_(score - mean).mul_(slope), mean


def any_divergence_gradient_rows(
    record: Divergence,
    zp: Tensor,
    zq: Tensor,
    weight: Float[Tensor, "rows 1"],
    vocab_shards: VocabShards,
    *,
    needs: tuple[bool, bool],
) -> tuple[Tensor | None, ...]:
    """D(p || q) of any rows, also of infinite or NaN logits, and the gradients of ``weight D`` where any is needed."""
    logs, _ = logs_and_sums(zp, zq, vocab_shards)
    if not any(needs):
        (total,) = vocab_shards.all_reduce_sum(contributions(record, *logs).sum(-1, keepdim=True))
        return record.finish(total), None, None
    with torch.enable_grad():
        terms = contributions(record, *(x.requires_grad_() for x in logs)).sum(-1, keepdim=True)
    (total,) = vocab_shards.all_reduce_sum(terms.detach())
    slope = slope_of_finish(record, total, weight)
    return record.finish(total), *through_normalisers(logs, terms, slope, vocab_shards)


def through_normalisers(
    logs: list[Tensor], outputs: Tensor, weight: Tensor, vocab_shards: VocabShards
) -> list[Tensor]:
    """The gradients in both logits of a function of log-probabilities on this rank: ``g - p E g``, g by autograd."""
    slopes = torch.autograd.grad(outputs, logs, weight, allow_unused=True, materialize_grads=True)
    sums = vocab_shards.all_reduce_sum(*(g.sum(-1, keepdim=True) for g in slopes))
    return [g - x.detach().exp() * total for g, x, total in zip(slopes, logs, sums, strict=True)]


def term_rows(
    zp: Tensor, zq: Tensor, tokens: Int[Tensor, " rows"], vocab_shards: VocabShards
) -> tuple[Tensor, ...]:
    """The fields of TermRows for rows of finite logits."""
    x = masses_of(zp, zq, vocab_shards)
    log_p, log_q = x.total_p.log(), x.total_q.log()
    picked = [vocab_shards.gather_local(below, tokens) for below in (x.below_p, x.below_q)]
    below = dot(x.mass_p, x.below_p)
    ratio = dot(x.mass_p, x.below_p.sub_(x.below_q))
    token_p, token_q, below, ratio = vocab_shards.all_reduce_sum(*picked, below, ratio)
    kl = (ratio / x.total_p + log_q - log_p).clamp(min=0)
    entropy_p = log_p - below / x.total_p
    return token_p - log_p, token_q - log_q, kl, entropy_p, x.top_p + log_p, x.top_q + log_q


def any_term_rows(
    zp: Tensor, zq: Tensor, tokens: Int[Tensor, " rows"], vocab_shards: VocabShards
) -> tuple[Tensor, ...]:
    """The fields of TermRows for any rows."""
    (logp, logq), sums = logs_and_sums(zp, zq, vocab_shards)
    terms = local_terms(logp, logq, tokens, vocab_shards)
    return *vocab_shards.all_reduce_sum(*terms), *sums


def local_terms(logp: Tensor, logq: Tensor, tokens: Tensor, vocab_shards: VocabShards) -> TokenTerms:
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
    vocab_shards: VocabShards,
    *,
    needs: tuple[bool, bool],
) -> tuple[Tensor | None, ...]:
    """The KL of rows of finite logits, and the gradients of ``sum of c term`` in both, where needed. In p's logits

        c_logp (1_x - p) + c_kl p (u - KL) - c_entropy p (log p + H),    u = log p - log q

    and in q's ``c_logq (1_x - q) + c_kl (q - p)``.
    """
    logp = minus(zp, known.log_sum_p)
    p, in_p, in_q = logp.exp(), None, None
    if needs[0]:
        in_p = minus(zq, known.log_sum_q).neg_().add_(logp).sub_(known.kl).mul_(c.kl)
        in_p.sub_(logp.add_(known.entropy).mul_(c.entropy)).sub_(c.token_logp).mul_(p)
        in_p = vocab_shards.scatter_add_local_(in_p, tokens, c.token_logp)
    if needs[1]:
        q = minus(zq, known.log_sum_q).exp_()
        in_q = (q * (c.kl - c.token_logq)).sub_(p.mul_(c.kl))
        in_q = vocab_shards.scatter_add_local_(in_q, tokens, c.token_logq)
    return nan_unless_finite(known.kl, zp, zq, vocab_shards), in_p, in_q


def any_objective_gradient_rows(
    zp: Tensor,
    zq: Tensor,
    tokens: Int[Tensor, " rows"],
    known: TermRows,
    c: TokenTerms,
    vocab_shards: VocabShards,
) -> tuple[Tensor, ...]:
    """The KL, and the gradients of ``sum of c term`` in both logits of any rows.

    A term of coefficient 0 is not read, even if it is NaN.
    """
    (logp, logq), _ = logs_and_sums(zp, zq, vocab_shards)
    with torch.enable_grad():
        terms = local_terms(logp.requires_grad_(), logq.requires_grad_(), tokens, vocab_shards)
        total = torch.stack([torch.where(k != 0, x, 0.0) * k for x, k in zip(terms, c, strict=True)]).sum(0)
    return known.kl, *through_normalisers([logp, logq], total, torch.ones_like(total), vocab_shards)


def entropy(logp: Float[Tensor, "rows vocab"]) -> Float[Tensor, "rows 1"]:
    """This rank's part of the entropy of any rows."""
    return (logp.exp() * torch.where(logp == -torch.inf, 0.0, logp)).sum(-1, keepdim=True).neg()


def statistics_sums(
    zp: Tensor, zq: Tensor, tokens: Int[Tensor, " rows"], vocab_shards: VocabShards
) -> tuple[Tensor, ...]:
    """What ``finished_statistics`` makes the fields of StatisticRows of, as columns, for rows of finite logits."""
    x = masses_of(zp, zq, vocab_shards)
    picked = [vocab_shards.gather_local(below, tokens) for below in (x.below_p, x.below_q)]
    entropies = dot(x.mass_p, x.below_p), dot(x.mass_q, x.below_q)
    ratio = x.below_p.sub_(x.below_q)
    kls = dot(x.mass_p, ratio), dot(x.mass_q, ratio)
    mass_q = x.mass_q.mul_(x.total_p / x.total_q)
    distance = torch.sub(x.mass_p, mass_q, out=x.below_q).abs_().sum(-1, keepdim=True)
    both = x.mass_p.add_(mass_q)
    # The logarithm of a positive float64 is above -746, and that of 0 is multiplied by 0.
    mixture = dot(both, torch.log(both, out=ratio).clamp_(min=-800))
    sums = vocab_shards.all_reduce_sum(*picked, *entropies, *kls, distance, mixture)
    return *sums, x.top_p, x.top_q, x.total_p, x.total_q


def finished_statistics(*sums: Float[Tensor, "rows 1"]) -> StatisticRows:
    """The statistics of rows of finite logits, for many rows at once, from the columns of ``statistics_sums``.

    Divergences are below 0 only by rounding, which is cut off.
    """
    token_p, token_q, sum_p, sum_q, ratio_p, ratio_q, distance, mixture, top_p, top_q, total_p, total_q = sums
    log_p, log_q = total_p.log(), total_q.log()
    entropy_p, entropy_q = log_p - sum_p / total_p, log_q - sum_q / total_q
    mixture = mixture / total_p - 2 * (log_p + log(2))
    return StatisticRows(
        token_logp=token_p - log_p,
        token_logq=token_q - log_q,
        kl_pq=(ratio_p / total_p + log_q - log_p).clamp(min=0),
        kl_qp=(log_p - log_q - ratio_q / total_q).clamp(min=0),
        jensen_shannon=cut_rounding((entropy_p + entropy_q + mixture) / -2, distance),
        total_variation=distance / total_p / 2,
        entropy_p=entropy_p,
        entropy_q=entropy_q,
        log_sum_p=top_p + log_p,
        log_sum_q=top_q + log_q,
    )


def cut_rounding(jensen_shannon: Tensor, distance: Tensor) -> Tensor:
    """A Jensen-Shannon divergence without what rounding leaves: it is not below 0, and 0 at no ``distance``."""
    return torch.where(distance == 0, 0.0, jensen_shannon.clamp(min=0))


def any_statistics_rows(
    zp: Tensor, zq: Tensor, tokens: Int[Tensor, " rows"], vocab_shards: VocabShards
) -> tuple[Tensor, ...]:
    """The fields of StatisticRows for any rows."""
    (logp, logq), log_sums = logs_and_sums(zp, zq, vocab_shards)
    p, q = logp.exp(), logq.exp()
    middle = (p + q) / 2
    sums = vocab_shards.all_reduce_sum(
        vocab_shards.gather_local(logp, tokens),
        vocab_shards.gather_local(logq, tokens),
        contributions(KL, logp, logq).sum(-1, keepdim=True),
        contributions(KL, logq, logp).sum(-1, keepdim=True),
        2 * torch.xlogy(middle, middle).sum(-1, keepdim=True),
        (p - q).abs().sum(-1, keepdim=True) / 2,
        entropy(logp),
        entropy(logq),
    )
    token_logp, token_logq, kl_pq, kl_qp, mixture, distance, entropy_p, entropy_q = sums
    jensen_shannon = cut_rounding((entropy_p + entropy_q + mixture) / -2, distance)
    kls = kl_pq.clamp(min=0), kl_qp.clamp(min=0)
    return token_logp, token_logq, *kls, jensen_shannon, distance, entropy_p, entropy_q, *log_sums


def ranks_of(
    z: Float[Tensor, "rows vocab"], tokens: Int[Tensor, " rows"], vocab_shards: VocabShards
) -> Int[Tensor, "rows 1"]:
    """The number of words with a larger logit than the token's; 0 in a row of NaNs."""
    (token_z,) = vocab_shards.all_reduce_sum(vocab_shards.gather_local(z, tokens))
    # As numbers of the logits' dtype, since torch takes four times as long to make and sum booleans.
    greater = torch.gt(z, token_z, out=torch.empty_like(z)).sum(-1, keepdim=True)
    return vocab_shards.all_reduce_sum(greater.double())[0].to(torch.int64)


def top_rows(
    z: Float[Tensor, "rows vocab"], top: int
) -> tuple[Float[Tensor, "rows top"], Int[Tensor, "rows top"]]:
    """The ``top`` largest logits of each row, largest first, and their ids; of the largest, the first is listed first.

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
    if whole < 2 * top * BLOCK:
        return first_largest(z, top)
    maxima = z[:, :whole].reshape(len(z), whole // BLOCK, BLOCK).amax(-1)
    blocks = first_largest(maxima, top)[1].sort(-1).values
    ids = (blocks[:, :, None] * BLOCK + torch.arange(BLOCK, device=z.device)).flatten(1)
    ids = torch.cat([ids, torch.arange(whole, vocab_size, device=z.device).expand(len(z), -1)], -1)
    values, places = first_largest(z.gather(-1, ids), top)
    return values, ids.gather(-1, places)


def first_largest(z: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """The ``top`` largest numbers of each row and their places; of the largest, the first is listed first."""
    values, places = z.topk(top, -1)
    first = z.argmax(-1, keepdim=True)
    places = torch.where(places == first, places[:, :1], places)
    return values, torch.cat([first, places[:, 1:]], -1)
