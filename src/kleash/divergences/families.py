"""The KL divergence, and the families with a parameter that it belongs to."""

from math import inf, log

import torch
from torch import Tensor

from kleash.divergences.generator import phi, psi
from kleash.divergences.record import Divergence, Elementwise, Side, unchanged

KL = Divergence(
    from_p=Side(of=phi, score=unchanged, alone=inf),
    from_q=Side(of=psi, score=lambda v: -torch.expm1(-v), alone=1.0),
)


def weighted_sum(first: Divergence, second: Divergence, weights: tuple[float, float]) -> Divergence:
    """A weighted sum of two divergences that do not grow."""
    a, b = weights

    def side(one: Side, other: Side) -> Side:
        return Side(
            of=lambda gap: a * one.of(gap) + b * other.of(gap),
            score=lambda gap: a * one.score(gap) + b * other.score(gap),
            alone=a * one.alone + b * other.alone,
        )

    return Divergence(from_p=side(first.from_p, second.from_p), from_q=side(first.from_q, second.from_q))


def log_mix(share: float, v: Tensor) -> Tensor:
    """``log(1 - share + share exp(v))`` to a few roundings for every ``v``, without overflow."""
    if share in (0.0, 1.0):
        return share * v if share else torch.zeros_like(v)
    near = v <= 1
    low = torch.log1p(share * torch.expm1(torch.where(near, v, 0.0)))
    high = torch.where(near, 1.0, v)
    return torch.where(near, low, high + torch.log1p((1 - share) * torch.expm1(-high)))


def skew_kl_record(mix: float) -> Divergence:
    """KL(p || mix p + (1 - mix) q), for ``mix`` from 0 (KL) to 1 (nothing)."""
    if mix == 0:
        return KL
    if mix == 1:
        nothing = Side(of=torch.zeros_like, score=torch.zeros_like, alone=0.0)
        return Divergence(from_p=nothing, from_q=nothing)

    def p_over_m(u: Tensor) -> Tensor:
        return -log_mix(1 - mix, -u)

    def from_q(v: Tensor) -> Tensor:
        return torch.exp(log_mix(mix, -v)) * psi(log_mix(1 - mix, v))

    return Divergence(
        from_p=Side(
            of=lambda u: phi(p_over_m(u)),
            score=lambda u: p_over_m(u) - mix * torch.expm1(p_over_m(u)),
            alone=mix - 1 - log(mix),
        ),
        from_q=Side(of=from_q, score=lambda v: -(1 - mix) * torch.expm1(-log_mix(1 - mix, v)), alone=1 - mix),
    )


def jensen_shannon_record(weight: float, normalised: bool = False) -> Divergence:
    """weight KL(p || m) + (1 - weight) KL(q || m), ``m = weight p + (1 - weight) q``.

    ``normalised`` divides by ``weight (1 - weight)``; the limits are KL(p || q) at 0 and KL(q || p) at 1.
    """
    if normalised and weight in (0, 1):
        return KL.swapped if weight else KL
    if weight in (0, 1):
        return skew_kl_record(1.0)
    parts = (1 / (1 - weight), 1 / weight) if normalised else (weight, 1 - weight)
    return weighted_sum(skew_kl_record(weight), skew_kl_record(1 - weight).swapped, parts)


def alpha_record(alpha: float) -> Divergence:
    """(sum p^alpha q^(1 - alpha) - 1) / (alpha (alpha - 1)), with its limits at 0 and 1."""
    if alpha in (0, 1):
        return KL if alpha else KL.swapped
    return Divergence(from_p=_alpha_side(alpha, 1 - alpha), from_q=_alpha_side(1 - alpha, alpha))


def _alpha_side(a: float, rest: float) -> Side:
    """``rest`` is ``1 - a``, given apart because that difference is rounded where ``a`` is close to 1."""
    return Side(
        of=_alpha_above_one(a, -rest)
        if rest < 0
        else _alpha_below_zero(-a)
        if a < 0
        else _alpha_between(a, rest),
        score=lambda u: torch.expm1(-rest * u) / -rest,
        alone=inf if rest < 0 else 1 / rest,
        growth=max(-rest, 0.0),
    )


def _alpha_above_one(a: float, g: float) -> Elementwise:
    return lambda gap: (psi(g * gap) + g * torch.exp(-g * gap) * phi(gap)) / (a * g)


def _alpha_below_zero(b: float) -> Elementwise:
    return lambda gap: (torch.exp(-gap) * phi(b * gap) + b * psi(gap)) / (b * (1 + b))


def _alpha_between(a: float, rest: float) -> Elementwise:
    """0 < a < 1: a difference, so the form is chosen by where it would cancel."""

    def of(gap: Tensor) -> Tensor:
        near = gap < 1
        close, far = torch.where(near, gap, 0.0), torch.where(near, 1.0, gap)
        if a < 0.5:
            value = a * psi(close) - torch.exp(-close) * phi(-a * close)
            beyond = torch.exp(-rest * far) * torch.expm1(-a * far) - a * torch.expm1(-far)
        else:
            value = rest * phi(close) - phi(rest * close)
            beyond = rest * torch.expm1(-far) - torch.expm1(-rest * far)
        return torch.where(near, value, beyond) / (a * rest)

    return of
