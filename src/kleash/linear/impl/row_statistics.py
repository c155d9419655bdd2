"""Statistics, KL and KL's gradient of rows of logits, for logits however near or far, as long as they are finite.

Everything follows from ``d = log p - log q`` and ``t = tanh(d/2) = (p - q)/(p + q)``. With
``w = (p + q)/2``, half of the two masses together,

    KL(p || q) = sum w (t d + (d - 2t))        KL(q || p) = sum w (t d - (d - 2t))
    TV = sum w |t|                             JS = sum w (t d/2 + log(1 - t^2)/2)

``t d`` has no cancellation, ``d - 2t`` is of third order, and all factors are bounded or grow like ``d``: no overflow
for far distributions and no lost digits for near ones. An error in the two log-sum-exps enters KL at second order. The
terms are those of kleash.divergences.phi, written differently: ``w (t d + d - 2t) = p phi(d)``.

Every operation works on rows that stay in the cache and writes to a given buffer, since allocating memory for each
block takes longer than the arithmetic. Compiled, the same functions take no buffers, and the compiler fuses them.
"""

from collections.abc import Sequence
from fractions import Fraction
from math import log
from typing import Any, NamedTuple, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import hardshrink

from kleash.linear.types import StatisticsAndTop, TokenStatistics, TopTokens
from kleash.linear.vocab_shards import LOCAL_VOCAB, LocalVocab

Buffers: TypeAlias = Sequence[Tensor | None]
"""NUM_BUFFERS tensors of the logits' shape to write to, or as many None, to allocate."""
NUM_BUFFERS = 11
NO_BUFFERS: Buffers = (None,) * NUM_BUFFERS
LOG2_E = 1 / log(2)
SERIES_BELOW = 0.3
"""|d| above which closed forms are used; below, they would cancel, and series are used."""
SATURATED = 80.0
"""|d| above which tanh(d/2) is +-1 in float64 too."""
TANH = (1, Fraction(-1, 3), Fraction(2, 15), Fraction(-17, 315), Fraction(62, 2835),
        Fraction(-1382, 155925), Fraction(21844, 6081075), Fraction(-929569, 638512875))  # fmt: skip
"""tanh x = x (1 - x^2/3 + 2 x^4/15 - ...)."""
ODD = tuple(float(c / 2 ** (2 * n + 1)) for n, c in enumerate(TANH))[1:]
"""(tanh(d/2) - d/2)/d^3 in powers of d^2."""
EVEN = tuple(float(c * Fraction(2 * n + 1, 2 * n + 2) / 4 ** (n + 1)) for n, c in enumerate(TANH))
"""(d/2 tanh(d/2) - log cosh(d/2))/d^2 in powers of d^2."""
_hardshrink: Any = torch.ops.aten.hardshrink.out
BLOCK = 256
"""Columns of a block: the largest logit is searched among the maxima of blocks first."""
TOP_BLOCK = 64
"""Likewise for the few largest: shorter blocks leave fewer candidates for ``topk``, which is slow."""


class LogitStatistics(NamedTuple):
    """The unnormalised masses of one model's rows; the numbers are columns."""

    top: Float[Tensor, "rows 1"]
    """The largest logit."""
    mass: Float[Tensor, "rows vocab"]
    """exp(z - top)."""
    total: Float[Tensor, "rows 1"]
    """The sum of ``mass``."""


def exp_(x: Tensor) -> Tensor:
    """exp(x) in place; uncompiled by exp2, which torch computes on all cores in a third of the time."""
    return x.exp_() if torch.compiler.is_compiling() else x.mul_(LOG2_E).exp2_()


def softmax_sums(z: Float[Tensor, "rows vocab"], out: Tensor | None) -> LogitStatistics:
    """The masses of the tokens and their total; mass / total is the probability."""
    top = z.amax(-1, keepdim=True)
    mass = exp_(torch.sub(z, top, out=out))
    return LogitStatistics(top, mass, mass.sum(-1, keepdim=True))


def both_softmax_sums(
    zp: Tensor, zq: Tensor, buffers: Buffers, vocab_shards: LocalVocab
) -> tuple[LogitStatistics, LogitStatistics]:
    """``softmax_sums`` of both models, with maxima and totals over all ranks."""
    tops = vocab_shards.all_reduce_max(zp.amax(-1, keepdim=True), zq.amax(-1, keepdim=True))
    masses = [exp_(torch.sub(z, top, out=out)) for z, top, out in zip((zp, zq), tops, buffers, strict=True)]
    totals = vocab_shards.all_reduce_sum(*(mass.sum(-1, keepdim=True) for mass in masses))
    return LogitStatistics(tops[0], masses[0], totals[0]), LogitStatistics(tops[1], masses[1], totals[1])


def log_ratio(
    p: LogitStatistics, q: LogitStatistics, zp: Tensor, zq: Tensor, out: Tensor | None
) -> Float[Tensor, "rows vocab"]:
    """d = log p - log q."""
    shift = (p.top - q.top) + (p.total / q.total).log()
    return torch.sub(zp, zq, out=out).sub_(shift)


def half_masses(p: LogitStatistics, q: LogitStatistics, out: Tensor | None) -> Float[Tensor, "rows vocab"]:
    """w = (p + q)/2; ``out`` may be the memory of p's masses."""
    return torch.mul(p.mass, 0.5 / p.total, out=out).addcmul_(q.mass, 0.5 / q.total)


def polynomial(x: Tensor, coefficients: Sequence[float], out: Tensor | None) -> Tensor:
    """``coefficients[0] x + coefficients[1] x^2 + ...``."""
    total = torch.mul(x, coefficients[-1], out=out)
    for c in coefficients[-2::-1]:
        total.add_(c).mul_(x)
    return total


def unless_small(d: Tensor, out: Tensor | None) -> Tensor:
    """d where |d| > SERIES_BELOW, else 0; NaN stays NaN."""
    return hardshrink(d, SERIES_BELOW) if out is None else _hardshrink(d, SERIES_BELOW, out=out)


class Tanh(NamedTuple):
    """t = tanh(d/2), d - 2t without cancellation, and the parts that they are computed from."""

    t: Float[Tensor, "rows vocab"]
    rest: Float[Tensor, "rows vocab"]
    """d - 2t, accurate to a few roundings."""
    square: Float[Tensor, "rows vocab"]
    """d^2 where the series are used, else 0."""
    far: Float[Tensor, "rows vocab"]
    """d where it is too large for the series, clamped to +-SATURATED, else 0."""
    decay: Float[Tensor, "rows vocab"]
    """exp(-far)."""
    above: Float[Tensor, "rows vocab"]
    """1 + decay."""


def tanh_half(d: Float[Tensor, "rows vocab"], buffers: Buffers) -> Tanh:
    """The fields of ``Tanh``, each the sum of a part for small and a part for large |d|.

    One of the two parts is 0. A sum is used since ``torch.where`` takes as long as everything else.
    """
    terms = 7 if d.dtype == torch.float64 else 3
    rest = unless_small(d, buffers[0])
    near = torch.sub(d, rest, out=buffers[1])
    square = torch.mul(near, near, out=buffers[2])
    beyond = polynomial(square, ODD[:terms], buffers[3]).mul_(near)
    far = torch.clamp(rest, -SATURATED, SATURATED, out=buffers[4])
    decay = exp_(torch.neg(far, out=buffers[5]))
    above = torch.add(decay, 1, out=buffers[6])
    t = torch.neg(decay, out=buffers[7]).add_(1).div_(above)
    rest.sub_(t, alpha=2).sub_(beyond, alpha=2)
    t.add_(near, alpha=0.5).add_(beyond)
    return Tanh(t, rest, square, far, decay, above)


def kl_rows(
    zp: Float[Tensor, "rows vocab"],
    zq: Float[Tensor, "rows vocab"],
    buffers: Buffers = NO_BUFFERS,
    vocab_shards: LocalVocab = LOCAL_VOCAB,
) -> tuple[Tensor, ...]:
    """KL(p || q) of each row, as a tuple of one tensor; not finite where a logit or the KL is not."""
    p, q = both_softmax_sums(zp, zq, buffers[:2], vocab_shards)
    d = log_ratio(p, q, zp, zq, buffers[2])
    w = half_masses(p, q, buffers[0])
    x = tanh_half(d, (buffers[1], *buffers[3:10]))
    return vocab_shards.all_reduce_sum(x.t.mul_(d).add_(x.rest).mul_(w).sum(-1))


def jensen_shannon_terms_(x: Tanh) -> Float[Tensor, "rows vocab"]:
    """(t d + log(1 - t^2))/2, in the memory of ``above``; overwrites ``far`` and ``decay``."""
    terms = 8 if x.t.dtype == torch.float64 else 4
    closed = x.far.mul_(x.decay).div_(x.above).add_(x.decay.sub_(1).mul_(0.5).log1p_())
    return polynomial(x.square, EVEN[:terms], x.above).sub_(closed)


def largest(z: Float[Tensor, "rows vocab"]) -> Int[Tensor, " rows"]:
    """The index of the first largest logit; uncompiled, the block is found first, then the index within it."""
    if torch.compiler.is_compiling():
        return z.argmax(-1)
    whole = z.shape[-1] // BLOCK * BLOCK
    if whole < 2 * BLOCK:
        return z.argmax(-1)
    blocks = z[:, :whole].reshape(len(z), -1, BLOCK)
    block = blocks.amax(-1).argmax(-1)
    within = blocks[torch.arange(len(z), device=z.device), block].argmax(-1)
    best = block * BLOCK + within
    if whole == z.shape[-1]:
        return best
    tail = z[:, whole:].argmax(-1) + whole
    better = z.gather(-1, tail[:, None]) > z.gather(-1, best[:, None])
    return torch.where(better[:, 0], tail, best)


def top_rows(
    z: Float[Tensor, "rows vocab"], top: int
) -> tuple[Float[Tensor, "rows top"], Int[Tensor, "rows top"]]:
    """The largest logits of each row, largest first, and their ids; at most the vocabulary's size.

    They are searched within the blocks with the largest maxima, which contain all of them.
    """
    vocab_size = z.shape[-1]
    whole, top = vocab_size // TOP_BLOCK * TOP_BLOCK, min(top, vocab_size)
    if whole < 2 * top * TOP_BLOCK:
        largest = z.topk(top, -1)
        return largest.values, largest.indices
    blocks = z[:, :whole].reshape(len(z), whole // TOP_BLOCK, TOP_BLOCK)
    best = blocks.amax(-1).topk(top, -1).indices
    ids = (best[:, :, None] * TOP_BLOCK + torch.arange(TOP_BLOCK, device=z.device)).flatten(1)
    ids = torch.cat([ids, torch.arange(whole, vocab_size, device=z.device).expand(len(z), -1)], -1)
    largest = z.gather(-1, ids).topk(top, -1)
    return largest.values, ids.gather(-1, largest.indices)


def with_top(
    statistics: TokenStatistics, p: tuple[Tensor, Tensor], q: tuple[Tensor, Tensor]
) -> StatisticsAndTop:
    """The statistics with the likeliest tokens, from the largest logits of both models and their ids."""
    tops = (
        TopTokens(ids, (z - z[:, :1]).exp() * likeliest[:, None])
        for (z, ids), likeliest in (
            (p, statistics.top1_probability_p),
            (q, statistics.top1_probability_q),
        )
    )
    return StatisticsAndTop(statistics, *tops)


def sum_below_top(
    z: Float[Tensor, "rows vocab"], x: LogitStatistics, out: Tensor | None
) -> Float[Tensor, "rows 1"]:
    """The sum of ``mass (top - z)``; the entropy is ``log(total)`` plus this over the total."""
    return torch.sub(x.top, z, out=out).mul_(x.mass).sum(-1, keepdim=True)


def statistics_rows(
    zp: Float[Tensor, "rows vocab"],
    zq: Float[Tensor, "rows vocab"],
    tokens: Int[Tensor, " rows"],
    buffers: Buffers = NO_BUFFERS,
    vocab_shards: LocalVocab = LOCAL_VOCAB,
) -> tuple[Tensor, ...]:
    """The fields of TokenStatistics for each row, in one pass; not finite where ``kl_rows`` is not."""
    p, q = both_softmax_sums(zp, zq, buffers[:2], vocab_shards)
    below = sum_below_top(zp, p, buffers[2]), sum_below_top(zq, q, buffers[2])
    token_zp, token_zq, *below = vocab_shards.all_reduce_sum(
        vocab_shards.gather_local(zp, tokens), vocab_shards.gather_local(zq, tokens), *below
    )
    token_logp = (token_zp - p.top - p.total.log())[:, 0]
    token_logq = (token_zq - q.top - q.total.log())[:, 0]
    entropies = [(x.total.log() + b / x.total)[:, 0] for x, b in zip((p, q), below, strict=True)]
    likeliest = vocab_shards.argmax((zp, zq), (largest(zp), largest(zq)), (p.top, q.top))
    tops = *likeliest, 1 / p.total[:, 0], 1 / q.total[:, 0]
    rank = count_greater(zq, token_zq, buffers[2])
    d = log_ratio(p, q, zp, zq, buffers[2])
    w = half_masses(p, q, buffers[0])
    x = tanh_half(d, (buffers[1], *buffers[3:10]))
    jensen_shannon = jensen_shannon_terms_(x).mul_(w).sum(-1)
    total_variation = torch.abs(x.t, out=x.far).mul_(w).sum(-1)
    even = x.t.mul_(d)
    kl_qp = torch.sub(even, x.rest, out=x.far).mul_(w).sum(-1)
    kl_pq = even.add_(x.rest).mul_(w).sum(-1)
    *divergences, rank = vocab_shards.all_reduce_sum(kl_pq, kl_qp, jensen_shannon, total_variation, rank)
    return (token_logp, token_logq, *divergences, *entropies, *tops, rank)


def count_greater(
    z: Float[Tensor, "rows vocab"], than: Float[Tensor, "rows 1"], out: Tensor | None
) -> Int[Tensor, " rows"]:
    """The number of greater logits in each row; a count in float32 is exact below 2^24."""
    return torch.gt(z, than, out=out).sum(-1).to(torch.int64)


def gradient_rows(
    zp: Float[Tensor, "rows vocab"],
    zq: Float[Tensor, "rows vocab"],
    weight: Float[Tensor, " rows"],
    buffers: Buffers = NO_BUFFERS,
    vocab_shards: LocalVocab = LOCAL_VOCAB,
) -> tuple[Tensor, ...]:
    """KL(p || q) of each row, and the gradients of ``weight KL`` in both logits.

    They are ``weight p (d - KL)`` and ``weight (q - p)``; the latter as ``-2 weight w t``, so that nothing cancels.
    """
    p, q = both_softmax_sums(zp, zq, buffers[:2], vocab_shards)
    d = log_ratio(p, q, zp, zq, buffers[2])
    w = half_masses(p, q, buffers[10])
    x = tanh_half(d, (buffers[1], *buffers[3:10]))
    (kl,) = vocab_shards.all_reduce_sum(torch.mul(x.t, d, out=x.far).add_(x.rest).mul_(w).sum(-1))
    in_q = x.t.mul_(w).mul_(-2 * weight[:, None])
    in_p = d.sub_(kl[:, None]).mul_(p.mass).mul_((weight / p.total[:, 0])[:, None])
    return kl, in_p, in_q
