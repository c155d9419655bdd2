"""Responses of several tokens: whether value, gradient and estimator are those of each token or of whole responses."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, TypeGuard

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from kleash.auditing.audited_function import AuditedFunction
from kleash.auditing.checks.expectations import Expectation, expectation
from kleash.auditing.matching import MAX_STANDARD_ERRORS, TOLERANCE, QuantityMatch, cosine_similarity
from kleash.auditing.quantities import (
    exact_values,
    known_quantities,
    prefix_probabilities,
    sequence_gradient,
    token_gradient,
)
from kleash.auditing.toy_distributions import SEQUENCES, ToyDistributions, toy_distributions
from kleash.errors import KleashError
from kleash.estimators import ESTIMATORS

Level = Literal["", "token", "sequence", "both", "neither"]

LEVELS: dict[Level, str] = {
    "": "",
    "token": " token by token",
    "sequence": " between whole responses",
    "both": " token by token and between whole responses",
    "neither": " for one token",
}
"""The levels of a value or gradient in words."""


@dataclass(frozen=True, kw_only=True)
class PositionMatch:
    """The level at which a value or gradient is, for responses of three tokens, the quantity that it is for one.

    ``level`` is "token" for the sum over the tokens along sampled prefixes, "sequence" for the quantity of the
    distributions over whole responses; "" if it is already for one token no multiple of a known quantity.
    """

    level: Level
    factors: tuple[float, ...] = ()
    """For "neither": by which factor it is too large at each position; () if there is no such factor."""
    factors_of: Literal["", "token", "sequence"] = ""
    """The level that the factors refer to."""
    token_cosine: float = float("nan")
    """Of a gradient, with that of level "token"."""
    sequence_cosine: float = float("nan")

    @property
    def is_uniform(self) -> bool:
        """Whether the factor is the same at every position."""
        spread = max(self.factors, default=0.0) - min(self.factors, default=0.0)
        return bool(self.factors) and spread <= TOLERANCE * max(map(abs, self.factors))

    def times(self, of: str) -> str:
        """``of`` with the factors before it: "2 times …" if all are the same, "1, 2 and 3 times …" otherwise."""
        if self.is_uniform:
            return f"{self.factors[0]:.4g} times {of}"
        first, second, third = (f"{f:.3g}" if abs(f) > TOLERANCE else "0" for f in self.factors)
        return f"{first}, {second} and {third} times {of} at the first, the second and the third token"


def match_value_by_position(
    audited: AuditedFunction, e: Expectation, match: QuantityMatch | None
) -> PositionMatch:
    """Compare the expected value of a response with the quantity that it is for one token."""
    if not _has_levels(match):
        return PositionMatch(level="")
    exact = _exact_by_position(e.toy, match)
    slack = MAX_STANDARD_ERRORS * e.mean_error

    def is_expected(value: float) -> bool:
        return abs(e.mean - value) <= TOLERANCE * abs(value) + slack

    sequence_value = match.factor * exact_values(e.toy, "on-policy", match.quantity)["sequence"]
    level = _level(is_expected(sum(exact)), is_expected(sequence_value))
    factors = _value_factors(audited, e, match, exact)
    tolerance = TOLERANCE + slack / min(map(abs, exact))
    gives_each = audited.convention.gives in ("token", "vocabulary") and audited.convention.place == "metric"
    if level != "neither" and not (gives_each and any(abs(factor - 1) > tolerance for factor in factors)):
        return PositionMatch(level=level)
    neither = PositionMatch(level="neither", factors=factors, factors_of="token")
    if not neither.is_uniform or is_expected(factors[0] * sum(exact)):
        return neither
    if is_expected(factors[0] * sequence_value):
        return replace(neither, factors_of="sequence")
    return PositionMatch(level="neither")  # a factor of each token alone, and another of several


def match_gradient_by_position(e: Expectation, match: QuantityMatch | None) -> PositionMatch:
    """Compare the expected gradient of a response with the quantity whose gradient it is for one token."""
    if e.gradient is None or not _has_levels(match) or not match.everywhere:
        return PositionMatch(level="")
    by_token = match.factor * token_gradient(SEQUENCES, "on-policy", match.quantity)
    by_sequence = match.factor * sequence_gradient(SEQUENCES, match.quantity)
    slack = MAX_STANDARD_ERRORS * e.gradient_error
    is_token, is_sequence = (
        bool((e.gradient - target).norm() <= TOLERANCE * target.norm() + slack)
        for target in (by_token, by_sequence)
    )
    if is_token or is_sequence:
        return PositionMatch(level=_level(is_token, is_sequence))
    neither = PositionMatch(
        level="neither",
        token_cosine=cosine_similarity(e.gradient, by_token),
        sequence_cosine=cosine_similarity(e.gradient, by_sequence),
    )
    if factors := _gradient_factors(e, e.gradient, by_token):
        return replace(neither, factors=factors, factors_of="token")
    if factors := _gradient_factors(e, e.gradient, by_sequence):
        return replace(neither, factors=factors, factors_of="sequence")
    return neither


def estimator_level(audited: AuditedFunction, name: str) -> Level:
    """Whether a function that is this estimator for one token is, for several, that of each or of the summed log ratio.

    A constant factor, such as that of a mean, is of either level. "" without an estimator.
    """
    if not name:
        return ""
    toy = toy_distributions()[SEQUENCES]
    near = replace(toy, logits_q=toy.logits_p + (toy.logits_q - toy.logits_p) / 4)  # below every clamp
    inputs = near.inputs(near.logits_p.clone().requires_grad_(), "on-policy")
    values = audited.values(inputs).detach().double()
    log_ratios = (inputs.token_logp - inputs.token_logq).detach()

    def is_estimator_of(log_ratios: Tensor) -> bool:
        expected = ESTIMATORS[name].of(log_ratios)
        is_alike = values.shape == expected.shape
        computed, target = (values, expected) if is_alike else (values.sum(-1), expected.sum(-1))
        factor = (computed * target).sum() / target.square().sum()
        return bool((computed - factor * target).norm() <= TOLERANCE * computed.norm())

    return _level(is_estimator_of(log_ratios), is_estimator_of(log_ratios.sum(-1, keepdim=True)))


def _has_levels(match: QuantityMatch | None) -> TypeGuard[QuantityMatch]:
    """Whether the matched quantity can be compared with that of three tokens, each of another vocabulary."""
    if match is None or match.relation == "shifted" or match.quantity == "zero":
        return False
    return known_quantities()[match.quantity].kind != "truncated"


def _level(is_token: bool, is_sequence: bool) -> Level:
    if is_token:
        return "both" if is_sequence else "token"
    return "sequence" if is_sequence else "neither"


def _exact_by_position(toy: ToyDistributions, match: QuantityMatch) -> list[float]:
    """The expected value of the matched quantity at each position."""
    function = known_quantities()[match.quantity].function
    by_prefix = function(toy.logits_p.log_softmax(-1), toy.logits_q.log_softmax(-1))
    expected = by_prefix * prefix_probabilities(toy, "on-policy")
    return [match.factor * expected[_has_length(toy, step)].sum().item() for step in range(toy.steps)]


def _has_length(toy: ToyDistributions, length: int) -> Bool[Tensor, " prefixes"]:
    """The prefixes of this many tokens."""
    is_chosen = torch.zeros(len(toy.logits_p), dtype=torch.bool)
    is_chosen[toy.prefix_rows[:, length].unique()] = True
    return is_chosen


def _value_factors(
    audited: AuditedFunction, e: Expectation, match: QuantityMatch, exact: Sequence[float]
) -> tuple[float, ...]:
    """The expected value over the exact one at each position; () if that cannot be determined."""
    if e.values.shape[1] == e.toy.steps > 1:
        means = (e.probabilities.unsqueeze(-1) * e.values).sum(0).tolist()
    else:  # one number per response: let p and q differ at one position only
        toys = single_position_distributions()
        try:
            means = [expectation(audited, toy, "on-policy").mean for toy in toys]
        except KleashError:  # the function refuses p = q
            return ()
        exact = [_exact_by_position(toy, match)[step] for step, toy in enumerate(toys)]
    if any(value == 0 for value in exact):
        return ()
    factors = tuple(mean / value for mean, value in zip(means, exact, strict=True))
    return factors if all(abs(factor) < 1e6 for factor in factors) else ()


@cache
def single_position_distributions() -> tuple[ToyDistributions, ...]:
    """The distributions over three tokens, with q = p except at the first, the second or the third position."""
    toy = toy_distributions()[SEQUENCES]
    return tuple(
        replace(toy, logits_q=torch.where(_has_length(toy, step).unsqueeze(-1), toy.logits_q, toy.logits_p))
        for step in range(toy.steps)
    )


def _gradient_factors(
    e: Expectation, gradient: Tensor, target: Float64[Tensor, "prefixes vocab"]
) -> tuple[float, ...]:
    """The gradient over the target at each position; () if it is no multiple of it."""
    factors: list[float] = []
    for step in range(e.toy.steps):
        rows = _has_length(e.toy, step)
        part, target_part = gradient[rows], target[rows]
        factor = ((part * target_part).sum() / target_part.square().sum()).item()
        error = (part - factor * target_part).norm()
        if error > TOLERANCE * target_part.norm() + MAX_STANDARD_ERRORS * e.gradient_error:
            return ()
        factors.append(factor)
    return tuple(factors)
