"""The f-divergences: their generators, the families with a parameter, and the table of names."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import inf, log, log1p
from types import MappingProxyType
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from kleash.arguments import validated
from kleash.divergences.generator import phi, psi
from kleash.errors import OptionError
from kleash.registry import look_up, require_share

Elementwise: TypeAlias = Callable[[Tensor], Tensor]
LARGEST_GAP = 1e30
"""Larger gaps have the same contribution; an infinite one would be multiplied by 0."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """The generator of a divergence per unit of one distribution's mass.

    ``gap`` is the log-probability of a token under this distribution minus that under the other, in nats. Each token
    is evaluated from the side that gives it more mass, so ``of`` is called with ``gap >= 0`` only. In the fields, f is
    this side's generator: ``f(u)`` for ``Divergence.from_p``, ``exp(-v) f(-v)`` for ``from_q``.
    """

    of: Elementwise
    """``exp(-growth gap) f(gap)`` for ``gap >= 0``: bounded by a polynomial, 0 at 0, never negative."""
    score: Elementwise
    """``f + f'`` for every ``gap``, also below 0: the weight of ``mass * grad log mass`` in the gradient."""
    limit: float
    """Contribution per unit of mass where the other distribution is zero: the limit of f for an infinite gap."""
    growth: float = 0.0
    """The exponent of f's growth, applied in logarithms, so that f times a small mass does not overflow."""


def identity(total: Tensor) -> Tensor:
    """Return the sum unchanged: the ``finish`` of every divergence but the Hellinger distance."""
    return total


def square_root(total: Tensor) -> Tensor:
    """Square root with gradient 0 at 0, where a distance has a kink; the second derivative at 0 is NaN."""
    positive = total > 0
    # At 0, x^1.5 has value 0 and slope 0, and its second derivative is not finite.
    return torch.where(
        positive, torch.where(positive, total, 1.0).sqrt(), torch.where(positive, 1.0, total).pow(1.5)
    )


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """``D(p || q) = finish(E_p f(u))``, ``u = log p - log q``, with ``f >= 0`` and ``f(0) = 0``."""

    from_p: Side
    """Per unit of ``p``'s mass: ``f(u)``."""
    from_q: Side
    """Per unit of ``q``'s mass: ``exp(-v) f(-v)``, ``v = log q - log p``."""
    finish: Elementwise = identity
    """Function of the sum over the vocabulary."""

    def of(self, u: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
        """The generator f(u) per unit of ``p``'s mass, for every log ratio u = log p - log q."""
        # As positive_and_negative_part, but also for an infinite u.
        ahead, behind = torch.relu(u), torch.where(u > 0, 0.0, -u)
        return weighted_generator(self.from_p, torch.zeros_like(u), ahead) + weighted_generator(
            self.from_q, behind, behind
        )

    def score(self, u: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
        """``f + f'``: the weight of ``p grad log p``, in sampled surrogates and in logits."""
        return self.from_p.score(u)

    @property
    def where_q_is_zero(self) -> float:
        """Contribution per unit of ``p``'s mass where ``q`` is zero."""
        return self.from_p.limit

    @property
    def where_p_is_zero(self) -> float:
        """Contribution per unit of ``q``'s mass where ``p`` is zero."""
        return self.from_q.limit

    @property
    def swapped(self) -> "Divergence":
        """The divergence with its arguments exchanged: D(q || p)."""
        return replace(self, from_p=self.from_q, from_q=self.from_p)


def positive_and_negative_part(
    u: Float[Tensor, "*any"],
) -> tuple[Float[Tensor, "*any"], Float[Tensor, "*any"]]:
    """max(u, 0) and max(-u, 0) of finite u; at u = 0 only the second has a derivative.

    With two clamps both or neither would have one at 0, depending on torch's version: second derivatives of a sum over
    both sides would be doubled, or 0, wherever two log-probabilities are equal.
    """
    positive = torch.relu(u)
    return positive, positive - u


def weighted_generator(side: Side, log_mass: Tensor, gap: Tensor) -> Tensor:
    """``mass * f(gap)`` for ``gap >= 0``; overflows only where the product does."""
    exponent = log_mass + side.growth * gap if side.growth else log_mass
    return torch.exp(exponent) * side.of(gap)


KL = Divergence(
    from_p=Side(of=phi, score=identity, limit=inf),
    from_q=Side(of=psi, score=lambda v: -torch.expm1(-v), limit=1.0),
)


def weighted_sum(first: Divergence, second: Divergence, weights: tuple[float, float]) -> Divergence:
    """The weighted sum of two divergences with growth 0 on both sides and no ``finish``."""
    a, b = weights

    def sum_of_sides(first: Side, second: Side) -> Side:
        return Side(
            of=lambda gap: a * first.of(gap) + b * second.of(gap),
            score=lambda gap: a * first.score(gap) + b * second.score(gap),
            limit=a * first.limit + b * second.limit,
        )

    return Divergence(
        from_p=sum_of_sides(first.from_p, second.from_p), from_q=sum_of_sides(first.from_q, second.from_q)
    )


def log_mixture(share: float, rest: float, v: Tensor) -> Tensor:
    """``log(rest + share exp(v))`` to a few roundings for every ``v``, without overflow.

    ``rest`` is ``1 - share``; it is an argument because that difference is rounded if ``share`` is close to 1.
    """
    small = v <= 1
    low, high = torch.where(small, v, 0.0), torch.where(small, 1.0, v)
    return torch.where(
        small, _log_mixture_up_to_one(share, rest, low), high + _log_mixture_up_to_one(rest, share, -high)
    )


def _log_mixture_up_to_one(share: float, rest: float, v: Tensor) -> Tensor:
    """``log_mixture`` for ``v`` up to 1: log1p of the distance from 1, or logaddexp where that is close to -1.

    ``share + rest`` is 1. Both arguments of ``where`` are kept harmless, since both are differentiated.
    """
    if share <= 0.5:
        return torch.log1p(share * torch.expm1(v))
    near = v > -1
    close, far = torch.where(near, v, 0.0), torch.where(near, -1.0, v)
    log_rest = torch.full_like(v, log(rest) if rest else -inf)
    return torch.where(
        near, torch.log1p(share * torch.expm1(close)), torch.logaddexp(far + log(share), log_rest)
    )


@validated
def skew_kl_record(mix: float) -> Divergence:
    """KL(p || mix p + (1 - mix) q), for ``mix`` from 0 (the KL) to 1 (zero).

    Raises:
        OptionError: if ``mix`` is outside [0, 1].
    """
    require_share(mix=mix)
    return _skew_kl(mix, 1 - mix)


def _skew_kl(mix: float, rest: float) -> Divergence:
    """``skew_kl_record``; ``rest`` is ``1 - mix``, an argument because the difference would be rounded."""
    if mix == 0:
        return KL
    if rest == 0:
        zero = Side(of=torch.zeros_like, score=torch.zeros_like, limit=0.0)
        return Divergence(from_p=zero, from_q=zero)

    # m is the mixture; u = log p - log q, v = -u
    def log_p_over_mixture(u: Tensor) -> Tensor:
        return -log_mixture(rest, mix, -u)

    def from_q(v: Tensor) -> Tensor:  # m/q psi(log m/p)
        return torch.exp(log_mixture(mix, rest, -v)) * psi(log_mixture(rest, mix, v))

    return Divergence(
        from_p=Side(
            of=lambda u: phi(log_p_over_mixture(u)),
            score=lambda u: log_p_over_mixture(u) - mix * torch.expm1(log_p_over_mixture(u)),
            limit=-rest - (log1p(-rest) if rest < 0.5 else log(mix)),
        ),
        from_q=Side(of=from_q, score=lambda v: -rest * torch.expm1(-log_mixture(rest, mix, v)), limit=rest),
    )


@validated
def jensen_shannon_record(weight: float, normalised: bool = False) -> Divergence:
    """weight KL(p || m) + (1 - weight) KL(q || m), ``m = weight p + (1 - weight) q``.

    ``normalised`` divides by ``weight (1 - weight)``; the limits are KL(p || q) at 0 and KL(q || p) at 1.

    Raises:
        OptionError: if ``weight`` is outside [0, 1].
    """
    require_share(weight=weight)
    rest = 1 - weight
    if normalised and 0 in (weight, rest):
        return KL.swapped if weight else KL
    if 0 in (weight, rest):
        return skew_kl_record(1.0)
    weights = (1 / rest, 1 / weight) if normalised else (weight, rest)
    return weighted_sum(_skew_kl(weight, rest), _skew_kl(rest, weight).swapped, weights)


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
    """One side of the alpha divergence, of p with a = alpha, of q with a = 1 - alpha.

        f(gap) = (rest (exp(-gap) - 1) - (exp(-rest gap) - 1)) / (a rest),    rest = 1 - a

    ``rest`` is an argument because the difference would be rounded.
    """
    of = (
        _alpha_above_one(a, -rest)
        if rest < 0
        else _alpha_below_zero(-a)
        if a < 0
        else _alpha_between_zero_and_one(a, rest)
    )
    return Side(
        of=lambda gap: of(gap.clamp(max=LARGEST_GAP)),
        score=lambda u: torch.expm1(-rest * u) / -rest,
        limit=inf if rest < 0 else 1 / rest,
        growth=max(-rest, 0.0),
    )


def _alpha_above_one(a: float, growth: float) -> Elementwise:
    """``exp(-growth gap) f(gap)`` for a > 1 and growth = a - 1, as a sum of two terms that are never negative."""
    return lambda gap: (psi(growth * gap) + growth * torch.exp(-growth * gap) * phi(gap)) / (a * growth)


def _alpha_below_zero(b: float) -> Elementwise:
    """f for a = -b < 0, as a sum of two terms that are never negative."""
    return lambda gap: (torch.exp(-gap) * phi(b * gap) + b * psi(gap)) / (b * (1 + b))


def _alpha_between_zero_and_one(a: float, rest: float) -> Elementwise:
    """f for 0 < a < 1, a difference of terms that cancel for small gaps.

    Up to a gap of 1 it is computed from phi and psi, whose linear parts are cancelled already. Each has a form for
    ``a`` below 1/2 and one for ``rest`` up to 1/2, so that dividing by a small one loses no digits.
    """

    def of(gap: Tensor) -> Tensor:
        near = gap < 1
        close, far = torch.where(near, gap, 0.0), torch.where(near, 1.0, gap)
        if a < 0.5:
            near_value = a * psi(close) - torch.exp(-close) * phi(-a * close)
            far_value = torch.exp(-rest * far) * torch.expm1(-a * far) - a * torch.expm1(-far)
        else:
            near_value = rest * phi(close) - phi(rest * close)
            far_value = rest * torch.expm1(-far) - torch.expm1(-rest * far)
        return torch.where(near, near_value, far_value) / (a * rest)

    return of


DIVERGENCES: Mapping[str, Divergence] = MappingProxyType(
    {
        "kl": KL,
        "reverse_kl": KL.swapped,
        "jeffreys": weighted_sum(KL, KL.swapped, (1.0, 1.0)),
        "jensen_shannon": jensen_shannon_record(0.5),
        "chi_squared": Divergence(
            from_p=Side(
                of=lambda u: torch.expm1(-u).square(),
                score=lambda u: 2 * torch.expm1(u),
                limit=inf,
                growth=1.0,
            ),
            from_q=Side(
                of=lambda v: torch.expm1(-v).square(), score=lambda v: -torch.expm1(-2 * v), limit=1.0
            ),
        ),
        "total_variation": Divergence(
            from_p=Side(of=lambda u: torch.expm1(-u).abs() / 2, score=lambda u: u.sign() / 2, limit=0.5),
            from_q=Side(of=lambda v: torch.expm1(-v).abs() / 2, score=lambda v: v.sign() / 2, limit=0.5),
        ),
        "hellinger": Divergence(
            from_p=Side(
                of=lambda u: torch.expm1(-u / 2).square() / 2,
                score=lambda u: -torch.expm1(-u / 2) / 2,
                limit=0.5,
            ),
            from_q=Side(
                of=lambda v: torch.expm1(-v / 2).square() / 2,
                score=lambda v: -torch.expm1(-v / 2) / 2,
                limit=0.5,
            ),
            finish=square_root,
        ),
    }
)
"""Name -> record: exact functions, sampled surrogates, kernels and bounds are all derived from it.

Families with a parameter are functions that return records: ``*_record``.
"""
FAMILIES: Mapping[str, Callable[[float], Divergence]] = MappingProxyType(
    {
        "jensen_shannon": jensen_shannon_record,
        "skew_kl": skew_kl_record,
        "skew_reverse_kl": lambda mix: skew_kl_record(mix).swapped,
        "alpha": alpha_record,
    }
)
"""Name of a family of divergences -> the record of a parameter."""


def find_divergence(which: str | Divergence) -> Divergence:
    """The record of a name of ``DIVERGENCES``, or of a family with its parameter, ``jensen_shannon:0.1``; or itself.

    Raises:
        UnknownNameError: if there is no divergence, or family, of this name.
        OptionError: if the parameter is no number, or not one of the family.
    """
    if not isinstance(which, str) or ":" not in which:
        return look_up(DIVERGENCES, which, "divergence")
    family, _, parameter = which.partition(":")
    make = look_up(FAMILIES, family, "family of divergences")
    try:
        number = float(parameter)
    except ValueError as error:
        raise OptionError(f"the parameter of {which!r} is no number") from error
    return make(number)
