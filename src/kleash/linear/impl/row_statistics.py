"""The elementwise core: from the logits of a few tokens to their statistics.

Everything follows from ``d = log p - log q`` and ``t = tanh(d/2) = (p - q)/(p + q)``. With
``w = (p + q)/2``, half of the two masses together,

    KL(p || q) = sum w (t d + (d - 2t))        KL(q || p) = sum w (t d - (d - 2t))
    TV = sum w |t|                             JS = sum w (t d/2 + log(1 - t^2)/2)

``t d`` has no cancellation, ``d - 2t`` is of third order, and all factors are bounded or grow like
``d``: no overflow however far apart the two are, no lost digits however near. An error in the two
log-sum-exps enters KL at second order only. The terms are kleash.divergences.phi and its like in other
clothes: ``w (t d + d - 2t) = p phi(d)``.

Every operation works on rows that stay in the cache and writes where it is told to: memory that is
allocated anew for each block costs more than the arithmetic. Compiled, the same functions are told
nothing and fuse.
"""

from collections.abc import Sequence
from fractions import Fraction
from math import log
from typing import Any, NamedTuple, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import hardshrink

from kleash.linear.impl.vocab_shards import LOCAL_VOCAB, LocalVocab
from kleash.linear.statistics import StatisticsAndTop, TokenStatistics, TopTokens

Buffers: TypeAlias = Sequence[Tensor | None]
"""NUM_BUFFERS tensors shaped like the logits, to write into; or None that often, to leave it to the compiler."""
NUM_BUFFERS = 11
NO_BUFFERS: Buffers = (None,) * NUM_BUFFERS
LOG2_E = 1 / log(2)
SERIES_BELOW = 0.3
"""|d| from which on closed forms are used: below, they would cancel."""
SATURATED = 80.0
"""|d| from which on tanh(d/2) is +-1 in float64 too."""
TANH = (1, Fraction(-1, 3), Fraction(2, 15), Fraction(-17, 315), Fraction(62, 2835),
        Fraction(-1382, 155925), Fraction(21844, 6081075), Fraction(-929569, 638512875))  # fmt: skip
"""tanh x = x (1 - x^2/3 + 2 x^4/15 - ...)."""
ODD = tuple(float(c / 2 ** (2 * n + 1)) for n, c in enumerate(TANH))[1:]
"""(tanh(d/2) - d/2)/d^3 in powers of d^2."""
EVEN = tuple(float(c * Fraction(2 * n + 1, 2 * n + 2) / 4 ** (n + 1)) for n, c in enumerate(TANH))
"""(d/2 tanh(d/2) - log cosh(d/2))/d^2 in powers of d^2."""
_hardshrink: Any = torch.ops.aten.hardshrink.out
BLOCK = 256
"""Columns among which the largest is sought first."""


class LogitStatistics(NamedTuple):
    """One distribution on some rows; the numbers are columns."""

    top: Float[Tensor, "rows 1"]
    """The largest logit."""
    mass: Float[Tensor, "rows vocab"]
    """exp(z - top)."""
    total: Float[Tensor, "rows 1"]
    """The sum of ``mass``."""


def exp_(x: Tensor) -> Tensor:
    """exp(x) in place; uncompiled by way of exp2, which torch runs on all cores in a third of the time."""
    return x.exp_() if torch.compiler.is_compiling() else x.mul_(LOG2_E).exp2_()


def side(z: Float[Tensor, "rows vocab"], out: Tensor | None) -> LogitStatistics:
    """The masses of the tokens, which divided by their total are probabilities."""
    top = z.amax(-1, keepdim=True)
    mass = exp_(torch.sub(z, top, out=out))
    return LogitStatistics(top, mass, mass.sum(-1, keepdim=True))


def both_sides(
    zp: Tensor, zq: Tensor, room: Buffers, across: LocalVocab
) -> tuple[LogitStatistics, LogitStatistics]:
    """``side`` of p's logits and of q's, of all words on whatever rank."""
    tops = across.all_reduce_max(zp.amax(-1, keepdim=True), zq.amax(-1, keepdim=True))
    masses = [exp_(torch.sub(z, top, out=out)) for z, top, out in zip((zp, zq), tops, room, strict=True)]
    totals = across.all_reduce_sum(*(mass.sum(-1, keepdim=True) for mass in masses))
    return LogitStatistics(tops[0], masses[0], totals[0]), LogitStatistics(tops[1], masses[1], totals[1])


def log_ratio(
    p: LogitStatistics, q: LogitStatistics, zp: Tensor, zq: Tensor, out: Tensor | None
) -> Float[Tensor, "rows vocab"]:
    """d = log p - log q."""
    shift = (p.top - q.top) + (p.total / q.total).log()
    return torch.sub(zp, zq, out=out).sub_(shift)


def half_masses(p: LogitStatistics, q: LogitStatistics, out: Tensor | None) -> Float[Tensor, "rows vocab"]:
    """w = (p + q)/2; ``out`` may be where the masses of p are."""
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
    """t = tanh(d/2), and what is left of d beyond 2t, without cancellation."""

    t: Float[Tensor, "rows vocab"]
    rest: Float[Tensor, "rows vocab"]
    """d - 2t, to a relative error of roundings."""
    square: Float[Tensor, "rows vocab"]
    """d^2 where the series are used, else 0."""
    far: Float[Tensor, "rows vocab"]
    """d where it is too large for them, else 0; made finite by saturation."""
    decay: Float[Tensor, "rows vocab"]
    """exp(-far)."""
    above: Float[Tensor, "rows vocab"]
    """1 + decay."""


def tanh_half(d: Float[Tensor, "rows vocab"], room: Buffers) -> Tanh:
    """t and its companions, each the sum of a part for small and a part for large |d|.

    A sum of two parts of which one is 0, and not ``torch.where``, which costs as much as all else.
    """
    terms = 7 if d.dtype == torch.float64 else 3
    rest = unless_small(d, room[0])
    near = torch.sub(d, rest, out=room[1])
    square = torch.mul(near, near, out=room[2])
    beyond = polynomial(square, ODD[:terms], room[3]).mul_(near)
    far = torch.clamp(rest, -SATURATED, SATURATED, out=room[4])
    decay = exp_(torch.neg(far, out=room[5]))
    above = torch.add(decay, 1, out=room[6])
    t = torch.neg(decay, out=room[7]).add_(1).div_(above)
    rest.sub_(t, alpha=2).sub_(beyond, alpha=2)
    t.add_(near, alpha=0.5).add_(beyond)
    return Tanh(t, rest, square, far, decay, above)


def kl_rows(
    zp: Float[Tensor, "rows vocab"],
    zq: Float[Tensor, "rows vocab"],
    room: Buffers = NO_BUFFERS,
    across: LocalVocab = LOCAL_VOCAB,
) -> tuple[Tensor, ...]:
    """KL(p || q) of each row, alone in its tuple; not finite where a logit or the KL is not."""
    p, q = both_sides(zp, zq, room[:2], across)
    d = log_ratio(p, q, zp, zq, room[2])
    w = half_masses(p, q, room[0])
    x = tanh_half(d, (room[1], *room[3:10]))
    return across.all_reduce_sum(x.t.mul_(d).add_(x.rest).mul_(w).sum(-1))


def jensen_shannon_terms_(x: Tanh) -> Float[Tensor, "rows vocab"]:
    """(t d + log(1 - t^2))/2, where ``above`` was; far and decay are taken to pieces."""
    terms = 8 if x.t.dtype == torch.float64 else 4
    closed = x.far.mul_(x.decay).div_(x.above).add_(x.decay.sub_(1).mul_(0.5).log1p_())
    return polynomial(x.square, EVEN[:terms], x.above).sub_(closed)


def largest(z: Float[Tensor, "rows vocab"]) -> Int[Tensor, " rows"]:
    """The index of the first largest logit; uncompiled, of its block first, then within the block."""
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
    """The largest logits of each row, largest first, and their ids; at most as many as there are.

    The blocks with the largest maxima first, then within them: each of the largest logits is in one of these.
    """
    words = z.shape[-1]
    whole, top = words // BLOCK * BLOCK, min(top, words)
    if whole < 2 * top * BLOCK:
        found = z.topk(top, -1)
        return found.values, found.indices
    blocks = z[:, :whole].reshape(len(z), whole // BLOCK, BLOCK)
    best = blocks.amax(-1).topk(top, -1).indices
    ids = (best[:, :, None] * BLOCK + torch.arange(BLOCK, device=z.device)).flatten(1)
    ids = torch.cat([ids, torch.arange(whole, words, device=z.device).expand(len(z), -1)], -1)
    found = z.gather(-1, ids).topk(top, -1)
    return found.values, ids.gather(-1, found.indices)


def with_top(found: TokenStatistics, p: tuple[Tensor, Tensor], q: tuple[Tensor, Tensor]) -> StatisticsAndTop:
    """The statistics with the likeliest tokens, whose largest logits and ids are given for both models."""
    tops = (
        TopTokens(ids, (z - z[:, :1]).exp() * likeliest[:, None])
        for (z, ids), likeliest in ((p, found.top1_probability_p), (q, found.top1_probability_q))
    )
    return StatisticsAndTop(found, *tops)


def beneath(
    z: Float[Tensor, "rows vocab"], one: LogitStatistics, out: Tensor | None
) -> Float[Tensor, "rows 1"]:
    """The sum of the masses times how far below the largest logit they are: of it, the entropy is made."""
    return torch.sub(one.top, z, out=out).mul_(one.mass).sum(-1, keepdim=True)


def statistics_rows(
    zp: Float[Tensor, "rows vocab"],
    zq: Float[Tensor, "rows vocab"],
    tokens: Int[Tensor, " rows"],
    room: Buffers = NO_BUFFERS,
    across: LocalVocab = LOCAL_VOCAB,
) -> tuple[Tensor, ...]:
    """The fields of TokenStatistics for each row, in one pass; the divergences as in ``kl_rows``."""
    p, q = both_sides(zp, zq, room[:2], across)
    below = beneath(zp, p, room[2]), beneath(zq, q, room[2])
    token_zp, token_zq, *below = across.all_reduce_sum(
        across.gather_local(zp, tokens), across.gather_local(zq, tokens), *below
    )
    token_logp = (token_zp - p.top - p.total.log())[:, 0]
    token_logq = (token_zq - q.top - q.total.log())[:, 0]
    entropies = [(x.total.log() + b / x.total)[:, 0] for x, b in zip((p, q), below, strict=True)]
    likeliest = across.argmax((zp, zq), (largest(zp), largest(zq)), (p.top, q.top))
    tops = *likeliest, 1 / p.total[:, 0], 1 / q.total[:, 0]
    rank = greater(zq, token_zq, room[2])
    d = log_ratio(p, q, zp, zq, room[2])
    w = half_masses(p, q, room[0])
    x = tanh_half(d, (room[1], *room[3:10]))
    jensen_shannon = jensen_shannon_terms_(x).mul_(w).sum(-1)
    total_variation = torch.abs(x.t, out=x.far).mul_(w).sum(-1)
    even = x.t.mul_(d)
    kl_qp = torch.sub(even, x.rest, out=x.far).mul_(w).sum(-1)
    kl_pq = even.add_(x.rest).mul_(w).sum(-1)
    *divergences, rank = across.all_reduce_sum(kl_pq, kl_qp, jensen_shannon, total_variation, rank)
    return (token_logp, token_logq, *divergences, *entropies, *tops, rank)


def greater(
    z: Float[Tensor, "rows vocab"], than: Float[Tensor, "rows 1"], out: Tensor | None
) -> Int[Tensor, " rows"]:
    """How many logits of each row are greater; a count in float32 is exact below 2^24."""
    return torch.gt(z, than, out=out).sum(-1).to(torch.int64)


def gradient_rows(
    zp: Float[Tensor, "rows vocab"],
    zq: Float[Tensor, "rows vocab"],
    weight: Float[Tensor, " rows"],
    room: Buffers = NO_BUFFERS,
    across: LocalVocab = LOCAL_VOCAB,
) -> tuple[Tensor, ...]:
    """KL(p || q) of each row, and the gradients of ``weight KL`` in both logits.

    weight p (d - KL) and weight (q - p), the latter as -2 w t: no difference of two softmaxes.
    """
    p, q = both_sides(zp, zq, room[:2], across)
    d = log_ratio(p, q, zp, zq, room[2])
    w = half_masses(p, q, room[10])
    x = tanh_half(d, (room[1], *room[3:10]))
    (kl,) = across.all_reduce_sum(torch.mul(x.t, d, out=x.far).add_(x.rest).mul_(w).sum(-1))
    in_q = x.t.mul_(w).mul_(-2 * weight[:, None])
    in_p = d.sub_(kl[:, None]).mul_(p.mass).mul_((weight / p.total[:, 0])[:, None])
    return kl, in_p, in_q
