"""Matching expected values and gradients with known quantities: itself, a multiple or a shift."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import fmean
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

TOLERANCE = 1e-3
"""Relative; a function may compute in float32, and no two quantities agree so closely on every pair."""

NEGLIGIBLE = 1e-5
"""A smaller multiple counts as zero: a function may compute in float32."""

MODERATE_PAIRS = ("near", "peaked", "flat")
"""The pairs on which no log ratio is large."""

MAX_STANDARD_ERRORS = 8.0
"""By how many standard errors the mean of a random function may differ."""

Relation = Literal["itself", "multiple", "shifted"]


@dataclass(frozen=True, kw_only=True)
class QuantityMatch:
    """A known quantity that an expected value or gradient was matched with."""

    quantity: str
    """Its label."""
    relation: Relation
    factor: float = 1.0
    """The multiple, or for "shifted" the constant that is added."""
    everywhere: bool = True
    """False if it matches only on the pairs without large log ratios."""

    def __str__(self) -> str:
        """The label with the factor or the constant."""
        if self.relation == "itself":
            return self.quantity
        if self.relation == "shifted":
            return f"{self.quantity} {'+' if self.factor > 0 else '-'} {abs(self.factor):.4g}"
        is_sum = " + " in self.quantity or " - " in self.quantity
        multiple = "-" if abs(self.factor + 1) < TOLERANCE else f"{self.factor:.4g} x "
        return multiple + (f"({self.quantity})" if is_sum else self.quantity)


def is_close(
    values: Sequence[float],
    expected: Sequence[float],
    errors: Sequence[float] | None = None,
    rounding: float = 1e-6,
) -> bool:
    """Whether all values are as expected, up to rounding and their standard errors."""
    return all(
        abs(value - target) <= TOLERANCE * abs(target) + rounding + MAX_STANDARD_ERRORS * error
        for value, target, error in zip(values, expected, errors or [0.0] * len(values), strict=True)
    )


def match_values(
    values: Sequence[float],
    candidates: Mapping[str, Sequence[float]],
    pairs: Sequence[str],
    claimed: str,
    errors: Sequence[float] | None = None,
) -> QuantityMatch | None:
    """The candidate that has these values on every pair, or else on the moderate pairs.

    Args:
        values: the expected value on each pair.
        candidates: label -> the quantity on each pair.
        pairs: the names of the pairs.
        claimed: the label that is tried first.
        errors: standard errors of ``values``.
    """
    errors = errors or [0.0] * len(values)
    ordered = {claimed: candidates[claimed], **candidates}
    moderate = [i for i, pair in enumerate(pairs) if pair in MODERATE_PAIRS]
    relations: tuple[Relation, ...] = ("itself", "shifted", "multiple")
    for indices, everywhere in ((list(range(len(pairs))), True), (moderate, False)):
        for relation in relations:
            for quantity, expected in ordered.items():
                factor = _relation_factor(
                    relation,
                    [values[i] for i in indices],
                    [expected[i] for i in indices],
                    [errors[i] for i in indices],
                )
                if factor is not None:
                    return QuantityMatch(
                        quantity=quantity, relation=relation, factor=factor, everywhere=everywhere
                    )
    return None


def _relation_factor(
    relation: Relation, values: Sequence[float], expected: Sequence[float], errors: Sequence[float]
) -> float | None:
    """The factor or shift by which ``values`` follow from ``expected``; None if they do not."""
    if not all(map(isfinite, values)):
        return None
    if relation == "itself":
        return 1.0 if is_close(values, expected, errors) else None
    pairs = list(zip(values, expected, strict=True))
    if relation == "shifted":
        shift = fmean(value - target for value, target in pairs)
        return shift if is_close(values, [target + shift for target in expected], errors) else None
    if not all(abs(target) > 1e-6 for target in expected):
        return None
    weights = [
        1 / (TOLERANCE + error / abs(target)) ** 2 for (_, target), error in zip(pairs, errors, strict=True)
    ]
    factor = sum(w * value / target for (value, target), w in zip(pairs, weights, strict=True)) / sum(weights)
    multiples = [factor * target for target in expected]
    rounding = 1e-6 * min(1.0, abs(factor))
    return factor if abs(factor) > NEGLIGIBLE and is_close(values, multiples, errors, rounding) else None


def match_gradients(
    gradients: Mapping[str, Tensor],
    candidates: Mapping[str, Mapping[str, Tensor]],
    claimed: str,
    errors: Mapping[str, float] | None = None,
) -> QuantityMatch | None:
    """The candidate whose gradient this is on every pair, or a multiple of it; "zero" if it vanishes.

    Args:
        gradients: pair -> expected gradient.
        candidates: label -> pair -> gradient.
        claimed: the label that is tried first.
        errors: pair -> standard error of the gradient, as a norm.
    """
    ordered = {claimed: candidates[claimed], **candidates}
    for pairs, everywhere in ((tuple(gradients), True), (MODERATE_PAIRS, False)):
        gradient = torch.stack([gradients[pair].flatten() for pair in pairs])
        if not bool(gradient.isfinite().all()):
            continue
        noise = [MAX_STANDARD_ERRORS * (errors or {}).get(pair, 0.0) for pair in pairs]
        slack = torch.tensor(noise, dtype=torch.float64)
        targets = {
            label: torch.stack([target[pair].flatten() for pair in pairs])
            for label, target in ordered.items()
        }
        norms = targets[claimed].norm(dim=-1)
        if bool((gradient.norm(dim=-1) < NEGLIGIBLE * norms + torch.minimum(slack, norms / 4)).all()):
            return QuantityMatch(quantity="zero", relation="itself", everywhere=everywhere)
        factors = {label: _common_factor(gradient, target, slack) for label, target in targets.items()}
        multiples = {label: factor for label, factor in factors.items() if factor is not None}
        for label, factor in multiples.items():
            relative_noise = (slack / targets[label].norm(dim=-1)).min().item()
            if abs(factor - 1) <= TOLERANCE + relative_noise:
                return QuantityMatch(quantity=label, relation="itself", factor=factor, everywhere=everywhere)
        if multiples:
            label, factor = next(iter(multiples.items()))
            return QuantityMatch(quantity=label, relation="multiple", factor=factor, everywhere=everywhere)
    return None


def _common_factor(
    gradients: Float[Tensor, "pairs entries"], expected: Float[Tensor, "pairs entries"], noise: Tensor
) -> float | None:
    """The factor between gradients and expected ones if it is the same for all pairs, up to their noise."""
    norms = expected.norm(dim=-1)
    factors = (gradients * expected).sum(-1) / norms.square()
    rests = (gradients - factors.unsqueeze(-1) * expected).norm(dim=-1)
    if not bool((rests <= TOLERANCE * gradients.norm(dim=-1) + noise).all()):  # also if a norm is 0
        return None
    tolerances = TOLERANCE + noise / norms
    weights = tolerances**-2
    mean = (factors * weights).sum() / weights.sum()
    agree = (factors - mean).abs() <= tolerances * torch.maximum(mean.abs(), tolerances)
    return mean.item() if bool(agree.all()) and abs(mean) > NEGLIGIBLE else None


def cosine_similarity(gradient: Tensor, target: Tensor) -> float:
    """The cosine between two gradients; NaN if either is zero, or the first only rounding error."""
    product = (gradient.norm() * target.norm()).item()
    if not product or gradient.norm() < 1e-6 * target.norm():
        return float("nan")
    return (gradient * target).sum().item() / product
