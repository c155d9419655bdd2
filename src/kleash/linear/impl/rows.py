"""The elementwise core: from the logits of a few tokens to their statistics.

Everything follows from ``d = log p - log q`` and ``t = tanh(d/2) = (p - q)/(p + q)``. With
``w = (p + q)/2``, half of the two masses together,

    KL(p || q) = sum w (t d + (d - 2t))        KL(q || p) = sum w (t d - (d - 2t))
    TV = sum w |t|                             JS = sum w (t d/2 + log(1 - t^2)/2)

``t d`` has no cancellation, ``d - 2t`` is of third order, and all factors are bounded or grow like
``d``: no overflow however far apart the two are, no lost digits however near. An error in the two
log-sum-exps enters KL at second order only. The terms are kleash.divergences.phi and its like in other
clothes: ``w (t d + d - 2t) = p phi(d)``.

Every operation works on rows that stay in the cache, in place wherever the tensor is its own.
"""

from collections.abc import Sequence
from fractions import Fraction
from math import log
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import hardshrink

LOG2_E = 1 / log(2)
SERIES_BELOW = 0.3
"""|d| from which on closed forms are used: below, they would cancel."""
SATURATED = 80.0
"""|d| from which on tanh(d/2) is +-1 in float64 too."""
TANH = (1, Fraction(-1, 3), Fraction(2, 15), Fraction(-17, 315), Fraction(62, 2835),
        Fraction(-1382, 155925), Fraction(21844, 6081075), Fraction(-929569, 638512875))  # fmt: skip
"""tanh x = x (1 - x^2/3 + 2 x^4/15 - ...)."""
ODD = tuple(float(c) for c in TANH[1:])
"""(tanh x - x)/x^3 in powers of x^2."""
EVEN = tuple(float(c * Fraction(2 * n + 1, 2 * n + 2)) for n, c in enumerate(TANH))
"""(x tanh x - log cosh x)/x^2 in powers of x^2."""
BLOCK = 256
"""Columns among which the largest is sought first."""


class Side(NamedTuple):
    """One distribution on some rows; the numbers are columns."""

    top: Float[Tensor, "rows 1"]
    """The largest logit."""
    mass: Float[Tensor, "rows vocab"]
    """exp(z - top)."""
    total: Float[Tensor, "rows 1"]
    """The sum of ``mass``."""


def side(z: Float[Tensor, "rows vocab"]) -> Side:
    """The masses of the tokens, which divided by their total are probabilities."""
    top = z.amax(-1, keepdim=True)
    mass = (z - top).mul_(LOG2_E).exp2_()
    return Side(top, mass, mass.sum(-1, keepdim=True))


def log_ratio(p: Side, q: Side, zp: Tensor, zq: Tensor) -> Float[Tensor, "rows vocab"]:
    """d = log p - log q."""
    shift = (p.top - q.top) + (p.total.log() - q.total.log())
    return (zp - zq).sub_(shift)


def half_masses(p: Side, q: Side) -> Float[Tensor, "rows vocab"]:
    """w = (p + q)/2."""
    return (p.mass * (0.5 / p.total)).addcmul_(q.mass, 0.5 / q.total)


def polynomial(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    """``coefficients[0] + coefficients[1] x + ...``."""
    total = x * coefficients[-1]
    for c in coefficients[-2:0:-1]:
        total.add_(c).mul_(x)
    return total.add_(coefficients[0])


class Tanh(NamedTuple):
    """t = tanh(d/2), and what is left of d beyond 2t, without cancellation."""

    t: Float[Tensor, "rows vocab"]
    rest: Float[Tensor, "rows vocab"]
    """d - 2t, to a relative error of roundings."""
    far: Float[Tensor, "rows vocab"]
    """d where it is too large for the series, else 0; made finite by saturation."""
    decay: Float[Tensor, "rows vocab"]
    """exp(-far)."""
    square: Float[Tensor, "rows vocab"]
    """(d/2)^2 where the series are used, else 0."""


def tanh_half(d: Float[Tensor, "rows vocab"]) -> Tanh:
    """t and its companions, each the sum of a part for small and a part for large |d|.

    A sum of two parts of which one is 0, and not ``torch.where``, which costs as much as all else.
    """
    terms = 7 if d.dtype == torch.float64 else 3
    far = hardshrink(d, SERIES_BELOW)
    half = (d - far).mul_(0.5)
    square = half * half
    beyond = polynomial(square, ODD[:terms]).mul_(square).mul_(half)
    bounded = far.clamp(-SATURATED, SATURATED)
    decay = (bounded * -LOG2_E).exp2_()
    t = (1 - decay).div_(decay + 1)
    rest = far.sub_(t, alpha=2).sub_(beyond, alpha=2)
    return Tanh(t.add_(half).add_(beyond), rest, bounded, decay, square)


def kl_rows(zp: Float[Tensor, "rows vocab"], zq: Float[Tensor, "rows vocab"]) -> tuple[Tensor]:
    """KL(p || q) of each row, alone in its tuple; not finite where a logit or the KL is not."""
    p, q = side(zp), side(zq)
    d = log_ratio(p, q, zp, zq)
    near = tanh_half(d)
    return (near.t.mul_(d).add_(near.rest).mul_(half_masses(p, q)).sum(-1),)


def jensen_shannon_terms(x: Tanh) -> Float[Tensor, "rows vocab"]:
    """(t d + log(1 - t^2))/2."""
    terms = 8 if x.t.dtype == torch.float64 else 4
    series = polynomial(x.square, EVEN[:terms]).mul_(x.square)
    closed = (x.far * x.decay).div_(x.decay + 1).add_((x.decay - 1).mul_(0.5).log1p_())
    return series.sub_(closed)


def largest(z: Float[Tensor, "rows vocab"]) -> Int[Tensor, " rows"]:
    """The index of the first largest logit: of its block first, then within the block."""
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


def entropy_rows(z: Float[Tensor, "rows vocab"], one: Side) -> Float[Tensor, " rows"]:
    """-sum p log p."""
    below = (one.top - z).mul_(one.mass).sum(-1, keepdim=True)
    return (one.total.log() + below / one.total)[:, 0]


def statistics_rows(
    zp: Float[Tensor, "rows vocab"], zq: Float[Tensor, "rows vocab"], tokens: Int[Tensor, " rows"]
) -> tuple[Tensor, ...]:
    """The fields of TokenStatistics for each row, in one pass; the divergences as in ``kl_rows``."""
    p, q = side(zp), side(zq)
    column = tokens[:, None]
    token_zq = zq.gather(-1, column)
    token_logp = (zp.gather(-1, column) - p.top - p.total.log())[:, 0]
    token_logq = (token_zq - q.top - q.total.log())[:, 0]
    entropies = entropy_rows(zp, p), entropy_rows(zq, q)
    rank = torch.gt(zq, token_zq).sum(-1)
    w = half_masses(p, q)
    tops = largest(zp), largest(zq), 1 / p.total[:, 0], 1 / q.total[:, 0]
    d = log_ratio(p, q, zp, zq)
    del p, q
    near = tanh_half(d)
    jensen_shannon = jensen_shannon_terms(near).mul_(w).sum(-1)
    total_variation = (near.t.abs()).mul_(w).sum(-1)
    even = near.t.mul_(d)
    kl_pq = (even + near.rest).mul_(w).sum(-1)
    kl_qp = even.sub_(near.rest).mul_(w).sum(-1)
    return (token_logp, token_logq, kl_pq, kl_qp, jensen_shannon, total_variation, *entropies, *tops, rank)


def gradient_rows(
    zp: Float[Tensor, "rows vocab"], zq: Float[Tensor, "rows vocab"], weight: Float[Tensor, " rows"]
) -> tuple[Tensor, ...]:
    """KL(p || q) of each row, and the gradients of ``weight KL`` in both logits.

    weight p (d - KL) and weight (q - p), the latter as -2 w t: no difference of two softmaxes.
    """
    p, q = side(zp), side(zq)
    d = log_ratio(p, q, zp, zq)
    w = half_masses(p, q)
    near = tanh_half(d)
    kl = (near.t * d).add_(near.rest).mul_(w).sum(-1)
    in_p = d.sub_(kl[:, None]).mul_(p.mass).mul_((weight / p.total[:, 0])[:, None])
    in_q = near.t.mul_(w).mul_(-2 * weight[:, None])
    return kl, in_p, in_q
