"""Which known quantity some numbers are."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import fmean
from typing import Literal

from torch import Tensor

TOLERANCE = 1e-3
"""Relative; a function may compute in float32, and no two quantities agree so well in every world."""

NOTHING = 1e-5
"""A multiple as small as this is zero: a function may compute in float32."""

MODEST = ("near", "peaked", "flat")
"""The pairs on which no log ratio is large."""

How = Literal["itself", "negative", "multiple", "shifted"]


@dataclass(frozen=True, kw_only=True)
class Name:
    """A quantity that was recognised."""

    quantity: str
    """Its label."""
    how: How
    factor: float = 1.0
    """The multiple, or for "shifted" the constant that is added."""
    everywhere: bool = True
    """False where it was recognised only on pairs without large log ratios."""

    def __str__(self) -> str:
        """The quantity with its factor or its constant."""
        if self.how == "itself":
            return self.quantity
        if self.how == "negative":
            return f"-{_bracketed(self.quantity)}"
        if self.how == "multiple":
            return f"{self.factor:.4g} x {_bracketed(self.quantity)}"
        return f"{self.quantity} {'+' if self.factor > 0 else '-'} {abs(self.factor):.4g}"


def _bracketed(quantity: str) -> str:
    return f"({quantity})" if " + " in quantity or " - " in quantity else quantity


NOISE = 8.0
"""How many standard errors a random function's mean may be off."""


def close(
    found: Sequence[float],
    right: Sequence[float],
    errors: Sequence[float] | None = None,
    rounding: float = 1e-6,
) -> bool:
    """Whether all numbers agree but for rounding, and for their standard errors where they have some."""
    return all(
        abs(one - other) <= TOLERANCE * abs(other) + rounding + NOISE * error
        for one, other, error in zip(found, right, errors or [0.0] * len(found), strict=True)
    )


def name_values(
    found: Sequence[float],
    candidates: Mapping[str, Sequence[float]],
    worlds: Sequence[str],
    claimed: str,
    errors: Sequence[float] | None = None,
) -> Name | None:
    """The candidate that has these values in every world; failing that, on the modest pairs."""
    errors = errors or [0.0] * len(found)
    ordered = {claimed: candidates[claimed], **candidates}
    modest = [i for i, world in enumerate(worlds) if world in MODEST]
    for chosen, everywhere in ((list(range(len(worlds))), True), (modest, False)):
        for how in ("itself", "negative", "shifted", "multiple"):
            for quantity, right in ordered.items():
                factor = _factor(
                    how, [found[i] for i in chosen], [right[i] for i in chosen], [errors[i] for i in chosen]
                )
                if factor is not None:
                    return Name(quantity=quantity, how=how, factor=factor, everywhere=everywhere)
    return None


def _factor(
    how: How, found: Sequence[float], right: Sequence[float], errors: Sequence[float]
) -> float | None:
    """What turns ``right`` into ``found`` in this way, if anything does."""
    if not all(map(isfinite, found)):
        return None
    if how == "itself":
        return 1.0 if close(found, right, errors) else None
    if how == "negative":
        return -1.0 if any(right) and close([-value for value in found], right, errors) else None
    pairs = list(zip(found, right, strict=True))
    if how == "shifted":
        shift = fmean(one - other for one, other in pairs)
        return shift if close(found, [other + shift for other in right], errors) else None
    if not all(abs(other) > 1e-6 for other in right):
        return None
    weights = [
        1 / (TOLERANCE + error / abs(other)) ** 2 for (_, other), error in zip(pairs, errors, strict=True)
    ]
    factor = sum(w * one / other for (one, other), w in zip(pairs, weights, strict=True)) / sum(weights)
    multiples = [factor * other for other in right]
    rounding = 1e-6 * min(1.0, abs(factor))
    return factor if abs(factor) > NOTHING and close(found, multiples, errors, rounding) else None


def name_gradients(
    found: Mapping[str, Tensor],
    candidates: Mapping[str, Mapping[str, Tensor]],
    claimed: str,
    errors: Mapping[str, float] | None = None,
) -> Name | None:
    """The candidate whose gradient this is in every world, or a multiple of it; "zero" if it vanishes.

    ``found`` is by world, ``candidates`` by label and then by world.
    """
    ordered = {claimed: candidates[claimed], **candidates}
    slack = {world: NOISE * (errors or {}).get(world, 0.0) for world in found}
    for chosen, everywhere in ((tuple(found), True), (MODEST, False)):
        if not all(bool(found[world].isfinite().all()) for world in chosen):
            continue
        sizes = {world: ordered[claimed][world].norm() for world in chosen}
        if all(found[w].norm() < NOTHING * sizes[w] + min(slack[w], sizes[w] / 4) for w in chosen):
            return Name(quantity="zero", how="itself", everywhere=everywhere)
        for exactly in (True, False):
            for quantity, right in ordered.items():
                noise = [slack[w] for w in chosen]
                factor = _multiple([found[w] for w in chosen], [right[w] for w in chosen], noise)
                if factor is None:
                    continue
                sizes = [right[w].norm().item() for w in chosen]
                loose = min(n / size for n, size in zip(noise, sizes, strict=True))
                if exactly and abs(factor - 1) > TOLERANCE + loose:
                    continue
                how: How = "itself" if exactly else "negative" if abs(factor + 1) < TOLERANCE else "multiple"
                return Name(quantity=quantity, how=how, factor=factor, everywhere=everywhere)
    return None


def _multiple(found: Iterable[Tensor], right: Iterable[Tensor], noise: Iterable[float]) -> float | None:
    """The factor between the two, if there is one for all; found may be off by as much as its noise."""
    factors: list[float] = []
    allowed: list[float] = []
    for one, other, off in zip(found, right, noise, strict=True):
        size = other.norm()
        if size == 0:
            return None
        factor = ((one * other).sum() / size.square()).item()
        if (one - factor * other).norm() > TOLERANCE * one.norm() + off:
            return None
        factors.append(factor)
        allowed.append(TOLERANCE + off / size.item())
    weights = [1 / slack**2 for slack in allowed]
    mean = sum(f * w for f, w in zip(factors, weights, strict=True)) / sum(weights)
    near = all(abs(f - mean) <= a * max(abs(mean), a) for f, a in zip(factors, allowed, strict=True))
    return mean if near and abs(mean) > NOTHING else None


def cosine(one: Tensor, other: Tensor) -> float:
    """Between two gradients; NaN where either is zero, or so small that it is only rounding."""
    sizes = (one.norm() * other.norm()).item()
    if not sizes or one.norm() < 1e-6 * other.norm():
        return float("nan")
    return (one * other).sum().item() / sizes
