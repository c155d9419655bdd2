"""What a divergence is made of: the same generator seen from either side."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

Elementwise: TypeAlias = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Side:
    """A divergence per unit of one side's mass, by how far that side is ahead on a token.

    ``gap`` is that side's log-probability minus the other's, in nats. Each token is counted from
    the side that gives it more mass, so ``of`` is only ever asked for ``gap >= 0``.
    """

    of: Elementwise
    """``exp(-growth gap) f(gap)`` for ``gap >= 0``: bounded by a polynomial, 0 at 0, never negative."""
    score: Elementwise
    """``f + f'`` for every ``gap``: the weight of ``mass * grad log mass`` in the gradient."""
    alone: float
    """What a unit of this side's mass adds where the other side has none."""
    growth: float = 0.0
    """The exponent by which ``f`` grows; kept apart so that it meets a small mass in logarithms."""


def unchanged(total: Tensor) -> Tensor:
    """The sum itself: what all but one divergence make of it."""
    return total


def square_root(total: Tensor) -> Tensor:
    """The root, with gradient 0 at 0, where a distance has a kink and no second derivative: NaN there."""
    apart = total > 0
    # At 0, x^1.5 has the value and the slope that are wanted, and a slope of that which is not finite.
    return torch.where(apart, torch.where(apart, total, 1.0).sqrt(), torch.where(apart, 1.0, total).pow(1.5))


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """``D(p || q) = finish(E_p f(u))``, ``u = log p - log q``, with ``f >= 0`` and ``f(0) = 0``."""

    from_p: Side
    """Per unit of ``p``'s mass: ``f(u)``."""
    from_q: Side
    """Per unit of ``q``'s mass: ``exp(-v) f(-v)``, ``v = log q - log p``."""
    finish: Elementwise = unchanged
    """What is made of the sum."""

    def of(self, u: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
        """The generator f(u), for every log ratio."""
        ahead, behind = torch.relu(u), torch.where(u > 0, 0.0, -u)  # as ``parts``, for an infinite u, too
        return weigh(self.from_p, 0.0, ahead) + weigh(self.from_q, behind, behind)

    def score(self, u: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
        """``f + f'``: the weight of ``p grad log p``, in sampled surrogates and in logits."""
        return self.from_p.score(u)

    @property
    def where_q_is_zero(self) -> float:
        """What a unit of ``p``'s mass adds where ``q`` has none."""
        return self.from_p.alone

    @property
    def where_p_is_zero(self) -> float:
        """What a unit of ``q``'s mass adds where ``p`` has none."""
        return self.from_q.alone

    @property
    def swapped(self) -> "Divergence":
        """The same with its arguments exchanged: D(q || p)."""
        return replace(self, from_p=self.from_q, from_q=self.from_p)


def parts(u: Float[Tensor, "*any"]) -> tuple[Float[Tensor, "*any"], Float[Tensor, "*any"]]:
    """max(u, 0) and max(-u, 0) of finite u, of which one alone has a derivative, at u = 0 the second.

    Two clamps would both have one at 0, or neither, by torch's version: second derivatives of what is counted
    from both sides would be doubled, or 0, wherever two log-probabilities are equal.
    """
    ahead = torch.relu(u)
    return ahead, ahead - u


def weigh(side: Side, log_mass: Tensor | float, gap: Tensor) -> Tensor:
    """``mass * f(gap)`` for ``gap >= 0``, overflowing only where the product does."""
    exponent = log_mass + side.growth * gap if side.growth else log_mass + torch.zeros_like(gap)
    return torch.exp(exponent) * side.of(gap)
