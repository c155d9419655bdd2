"""Which known quantity some numbers are."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import fmean
from typing import Literal

from torch import Tensor

TOLERANCE = 1e-3
"""Relative; a function may compute in float32, and no two quantities agree so well in every world."""

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


def close(found: Sequence[float], right: Sequence[float]) -> bool:
    """Whether all numbers agree but for rounding."""
    return all(
        abs(one - other) <= TOLERANCE * abs(other) + 1e-6 for one, other in zip(found, right, strict=True)
    )


def name_values(
    found: Sequence[float], candidates: Mapping[str, Sequence[float]], worlds: Sequence[str], claimed: str
) -> Name | None:
    """The candidate that has these values in every world; failing that, on the modest pairs."""
    ordered = {claimed: candidates[claimed], **candidates}
    modest = [i for i, world in enumerate(worlds) if world in MODEST]
    for chosen, everywhere in ((list(range(len(worlds))), True), (modest, False)):
        for how in ("itself", "negative", "shifted", "multiple"):
            for quantity, right in ordered.items():
                factor = _factor(how, [found[i] for i in chosen], [right[i] for i in chosen])
                if factor is not None:
                    return Name(quantity=quantity, how=how, factor=factor, everywhere=everywhere)
    return None


def _factor(how: How, found: Sequence[float], right: Sequence[float]) -> float | None:
    """What turns ``right`` into ``found`` in this way, if anything does."""
    if not all(map(isfinite, found)):
        return None
    if how == "itself":
        return 1.0 if close(found, right) else None
    if how == "negative":
        return -1.0 if any(right) and close([-value for value in found], right) else None
    pairs = list(zip(found, right, strict=True))
    if how == "shifted":
        shift = fmean(one - other for one, other in pairs)
        return shift if close(found, [other + shift for other in right]) else None
    if not all(abs(other) > 1e-6 for other in right):
        return None
    factor = fmean(one / other for one, other in pairs)
    multiples = [factor * other for other in right]
    return factor if abs(factor) > TOLERANCE and close(found, multiples) else None


def name_gradients(
    found: Mapping[str, Tensor], candidates: Mapping[str, Mapping[str, Tensor]], claimed: str
) -> Name | None:
    """The candidate whose gradient this is in every world, or a multiple of it; "zero" if it vanishes.

    ``found`` is by world, ``candidates`` by label and then by world.
    """
    ordered = {claimed: candidates[claimed], **candidates}
    for chosen, everywhere in ((tuple(found), True), (MODEST, False)):
        if not all(bool(found[world].isfinite().all()) for world in chosen):
            continue
        if all(found[world].norm() < TOLERANCE * ordered[claimed][world].norm() for world in chosen):
            return Name(quantity="zero", how="itself", everywhere=everywhere)
        for exactly in (True, False):
            for quantity, right in ordered.items():
                factor = _multiple([found[w] for w in chosen], [right[w] for w in chosen])
                if factor is None or (exactly and abs(factor - 1) > TOLERANCE):
                    continue
                how: How = "itself" if exactly else "negative" if abs(factor + 1) < TOLERANCE else "multiple"
                return Name(quantity=quantity, how=how, factor=factor, everywhere=everywhere)
    return None


def _multiple(found: Iterable[Tensor], right: Iterable[Tensor]) -> float | None:
    """The factor between the two, if there is one for all."""
    factors: list[float] = []
    for one, other in zip(found, right, strict=True):
        size = other.norm()
        if size == 0:
            return None
        factor = ((one * other).sum() / size.square()).item()
        if (one - factor * other).norm() > TOLERANCE * one.norm():
            return None
        factors.append(factor)
    mean = sum(factors) / len(factors)
    near = all(abs(factor - mean) <= TOLERANCE * abs(mean) for factor in factors)
    return mean if near and abs(mean) > TOLERANCE else None


def cosine(one: Tensor, other: Tensor) -> float:
    """Between two gradients; NaN where either is zero, or so small that it is only rounding."""
    sizes = (one.norm() * other.norm()).item()
    if not sizes or one.norm() < 1e-6 * other.norm():
        return float("nan")
    return (one * other).sum().item() / sizes
