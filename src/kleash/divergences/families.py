"""The KL divergence, and the families with a parameter that it belongs to."""

from math import inf, log, log1p

import torch
from torch import Tensor

from kleash.arguments import validated
from kleash.divergences.generator import phi, psi
from kleash.divergences.record import Divergence, Elementwise, Side, unchanged
from kleash.errors import OptionError

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


def log_mix(share: float, rest: float, v: Tensor) -> Tensor:
    """``log(rest + share exp(v))`` to a few roundings for every ``v``, without overflow.

    ``rest`` is ``1 - share``, given apart because that difference is rounded where ``share`` is close to 1.
    """
    near = v <= 1
    low, high = torch.where(near, v, 0.0), torch.where(near, 1.0, v)
    return torch.where(near, _log_mix_below(share, rest, low), high + _log_mix_below(rest, share, -high))


def _log_mix_below(share: float, rest: float, v: Tensor) -> Tensor:
    """The same for ``v`` up to 1: by its distance from 1, unless hardly anything is left of that."""
    if share <= 0.5:
        return torch.log1p(share * torch.expm1(v))
    near = v > -1
    close, far = torch.where(near, v, 0.0), torch.where(near, -1.0, v)
    little = torch.full_like(v, log(rest) if rest else -inf)
    return torch.where(
        near, torch.log1p(share * torch.expm1(close)), torch.logaddexp(far + log(share), little)
    )


@validated
def skew_kl_record(mix: float) -> Divergence:
    """KL(p || mix p + (1 - mix) q), for ``mix`` from 0 (KL) to 1 (nothing).

    Raises:
        OptionError: if ``mix`` is outside [0, 1].
    """
    _require_share("mix", mix)
    return _skew(mix, 1 - mix)


def _skew(mix: float, rest: float) -> Divergence:
    """``rest`` is ``1 - mix``."""
    if mix == 0:
        return KL
    if rest == 0:
        nothing = Side(of=torch.zeros_like, score=torch.zeros_like, alone=0.0)
        return Divergence(from_p=nothing, from_q=nothing)

    def p_over_m(u: Tensor) -> Tensor:
        return -log_mix(rest, mix, -u)

    def from_q(v: Tensor) -> Tensor:
        return torch.exp(log_mix(mix, rest, -v)) * psi(log_mix(rest, mix, v))

    return Divergence(
        from_p=Side(
            of=lambda u: phi(p_over_m(u)),
            score=lambda u: p_over_m(u) - mix * torch.expm1(p_over_m(u)),
            alone=-rest - (log1p(-rest) if rest < 0.5 else log(mix)),
        ),
        from_q=Side(of=from_q, score=lambda v: -rest * torch.expm1(-log_mix(rest, mix, v)), alone=rest),
    )


@validated
def jensen_shannon_record(weight: float, normalised: bool = False) -> Divergence:
    """weight KL(p || m) + (1 - weight) KL(q || m), ``m = weight p + (1 - weight) q``.

    ``normalised`` divides by ``weight (1 - weight)``; the limits are KL(p || q) at 0 and KL(q || p) at 1.

    Raises:
        OptionError: if ``weight`` is outside [0, 1].
    """
    _require_share("weight", weight)
    rest = 1 - weight
    if normalised and 0 in (weight, rest):
        return KL.swapped if weight else KL
    if 0 in (weight, rest):
        return skew_kl_record(1.0)
    parts = (1 / rest, 1 / weight) if normalised else (weight, rest)
    return weighted_sum(_skew(weight, rest), _skew(rest, weight).swapped, parts)


def _require_share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise OptionError(f"{name} is {value}; it is a share, from 0 to 1")


@validated
def alpha_record(alpha: float) -> Divergence:
    """(sum p^alpha q^(1 - alpha) - 1) / (alpha (alpha - 1)), with its limits at 0 and 1.

    Raises:
        OptionError: if ``alpha`` is not finite.
    """
    if not -inf < alpha < inf:
        raise OptionError(f"alpha is {alpha}; give a finite number")
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
