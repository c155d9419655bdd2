"""What value and gradient are: the quantities that they match, for one token and over responses of several."""

from dataclasses import dataclass, replace
from functools import cache
from math import isclose, nan
from typing import Literal, TypeGuard, get_args

import torch
from jaxtyping import Bool
from torch import Tensor

from kleash.auditing.audited_function import AuditedFunction
from kleash.auditing.checks.expectations import (
    Expectation,
    expectation,
    gradient_rows,
    matched_quantity,
    value_rows,
)
from kleash.auditing.checks.log_ratios import LogRatios, scan_log_ratios
from kleash.auditing.quantities import (
    BY_VOCABULARY,
    MAX_STANDARD_ERRORS,
    NEGLIGIBLE,
    TOLERANCE,
    QuantityMatch,
    ValueOrGradient,
    cosine_similarities,
    exact,
    is_quantity,
    known_quantities,
    label_of,
    quantity_of,
)
from kleash.auditing.toy_distributions import (
    SAMPLINGS,
    SEQUENCES,
    VOCAB_SIZE,
    ToyDistributions,
    toy_distributions,
)
from kleash.errors import KleashError
from kleash.estimators import ESTIMATORS
from kleash.store.audit import GradientRow, ValueRow

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
    cosines: tuple[float, ...] = (nan, nan)
    """Of a gradient, with that of level "token" and of level "sequence"."""

    @property
    def is_uniform(self) -> bool:
        """Whether the factor is the same at every position."""
        spread = max(self.factors, default=0.0) - min(self.factors, default=0.0)
        return spread < TOLERANCE * max(map(abs, self.factors), default=0.0)

    def times(self, of: str) -> str:
        """``of`` with the factors before it: "2 times …" if all are the same, "1, 2 and 3 times …" otherwise."""
        if self.is_uniform:
            return f"{self.factors[0]:.4g} times {of}"
        first, second, third = (f"{f:.3g}" if abs(f) > TOLERANCE else "0" for f in self.factors)
        return f"{first}, {second} and {third} times {of} at the first, the second and the third token"


@dataclass(frozen=True, kw_only=True)
class Matched:
    """What the expected value, or the expected gradient, of a function is."""

    claimed: str
    """The label of the claimed divergence."""
    on_policy: QuantityMatch | None
    """For one token; None for no known quantity, and for a gradient that does not exist."""
    off_policy: QuantityMatch | None
    positions: PositionMatch
    off_policy_level: Level
    """The level off-policy, if it is right for one token and takes the behaviour log-probabilities; "" otherwise."""

    @property
    def is_right(self) -> bool:
        """Whether on-policy it is the claimed divergence, or its gradient, on every pair of one token."""
        return is_quantity(self.on_policy, self.claimed)

    def __str__(self) -> str:
        """The quantity that it was matched with."""
        if self.on_policy is None:
            return "none of the table"
        of_one = LEVELS["neither"] if self.positions.level == "neither" else ""
        return f"{self.on_policy}{self.on_policy.restriction or of_one}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Evidence:
    """What the value and the gradient of a function are."""

    audited: AuditedFunction
    claimed: str
    """The label of the claimed divergence."""
    is_detached: bool
    """Whether it is no metric and no gradient reaches the policy."""
    value_rows: tuple[ValueRow, ...]
    gradient_rows: tuple[GradientRow, ...]
    value: Matched
    gradient: Matched
    log_ratios: LogRatios
    estimator_level: Level
    """Whether for several tokens its estimator is that of each, or of the response's summed log ratio."""


def gather_evidence(audited: AuditedFunction) -> Evidence:
    """Determine what the value and the gradient of a function are."""
    claimed, toys = label_of(audited.convention.claims), toy_distributions().values()
    expectations = tuple(expectation(audited, toy, sampling) for toy in toys for sampling in SAMPLINGS)
    of_one = [
        [e for e in expectations if e.sampling == sampling and e.toy.steps == 1] for sampling in SAMPLINGS
    ]
    on_policy, off_policy = (e for e in expectations if e.toy.steps > 1)
    matches = {
        of: [
            _by_vocabulary(matched_quantity(single, of, claimed), of, several)
            for single, several in zip(of_one, (on_policy, off_policy), strict=True)
        ]
        for of in get_args(ValueOrGradient)
    }
    log_ratios = scan_log_ratios(audited)

    def matched(of: ValueOrGradient, positions: PositionMatch) -> Matched:
        if str(matches[of][0]) == "zero":
            positions = _zero_by_position(on_policy, of, claimed)
        is_weighted = audited.convention.takes_behaviour and all(is_quantity(x, claimed) for x in matches[of])
        return Matched(
            claimed=claimed,
            on_policy=matches[of][0],
            off_policy=matches[of][1],
            positions=positions,
            off_policy_level=_level(off_policy, of, claimed)
            if is_weighted and positions.level != "neither"
            else "",
        )

    return Evidence(
        audited=audited,
        claimed=claimed,
        is_detached=audited.convention.place != "metric" and any(e.gradient is None for e in expectations),
        value_rows=value_rows(expectations, claimed),
        gradient_rows=gradient_rows(expectations, claimed),
        value=matched("value", _value_by_position(audited, on_policy, matches["value"][0])),
        gradient=matched("gradient", _gradient_by_position(on_policy, matches["gradient"][0])),
        log_ratios=log_ratios,
        estimator_level=_estimator_level(audited, log_ratios.estimator),
    )


def _by_vocabulary(
    match: QuantityMatch | None, of: ValueOrGradient, several: Expectation
) -> QuantityMatch | None:
    """The match, or that of the quantity divided by the size of the vocabulary, if only this holds for another size.

    Responses of several tokens have a vocabulary of another size than single tokens.
    """
    if (
        match is None
        or match.relation != "multiple"
        or match.quantity + BY_VOCABULARY not in known_quantities()
    ):
        return match
    factor = match.factor * VOCAB_SIZE
    divided = replace(
        match,
        quantity=match.quantity + BY_VOCABULARY,
        factor=factor,
        relation="itself" if isclose(factor, 1, rel_tol=TOLERANCE) else "multiple",
    )
    levels = [_level(several, of, each.quantity, each.factor) for each in (match, divided)]
    return divided if levels[0] == "neither" and levels[1] in ("token", "both") else match


def _level_of(measured: Tensor, by_token: Tensor, by_sequence: Tensor, error: float = 0.0) -> Level:
    """The levels at which ``measured`` is the quantity, within the tolerance and its standard ``error``."""
    is_token, is_sequence = (
        bool((measured - target).norm() <= TOLERANCE * target.norm() + MAX_STANDARD_ERRORS * error)
        for target in (by_token, by_sequence)
    )
    if is_token:
        return "both" if is_sequence else "token"
    return "sequence" if is_sequence else "neither"


def _level(expected: Expectation, of: ValueOrGradient, label: str, factor: float = 1.0) -> Level:
    """The level at which value or gradient of a response are ``factor`` times a quantity, or its gradient.

    Off-policy, a gradient token by token is one along the prefixes of the policy or of the behaviour.
    """
    measured, error = expected.measured(of)
    if measured is None:
        return ""
    for sampling in dict.fromkeys(
        (expected.sampling, "on-policy" if of == "gradient" else expected.sampling)
    ):
        levels = exact(of, expected.toy, sampling, label)
        level = _level_of(measured / factor, levels["token"], levels["sequence"], error / abs(factor))
        if level != "neither":
            return level
    return "neither"


def _zero_by_position(expected: Expectation, of: ValueOrGradient, claimed: str) -> PositionMatch:
    """Compare the value or gradient of a response, which for one token is zero, with the claimed one."""
    measured, error = expected.measured(of)
    targets = torch.stack([*exact(of, expected.toy, expected.sampling, claimed).values()])
    if measured is None or measured.norm() <= NEGLIGIBLE * targets.norm() + MAX_STANDARD_ERRORS * error:
        return PositionMatch(level="")
    cosines = cosine_similarities(measured.flatten(), targets.reshape(len(targets), -1)).tolist()
    return PositionMatch(level="neither", cosines=tuple(cosines))


def _value_by_position(
    audited: AuditedFunction, expected: Expectation, match: QuantityMatch | None
) -> PositionMatch:
    """Compare the expected value of a response with the quantity that it is for one token."""
    if not _has_levels(match):
        return PositionMatch(level="")
    if not match.everywhere:  # but where no log ratio is large
        expected = expectation(audited, near_responses(), expected.sampling)
    level = _level(expected, "value", match.quantity, match.factor)
    gives_each = audited.convention.place == "metric" and audited.convention.gives in ("token", "vocabulary")
    if level != "neither" and not gives_each:
        return PositionMatch(level=level)
    toys = single_position_distributions(expected.toy)
    exact_levels = [exact("value", toy, expected.sampling, match.quantity) for toy in toys]
    targets = [match.factor * levels["token"].item() for levels in exact_levels]
    try:
        means = expected.position_means.tolist()
        if level == "neither":
            means = [expectation(audited, toy, expected.sampling).mean for toy in toys]
        factors = tuple(mean / value for mean, value in zip(means, targets, strict=True))
    except (KleashError, ZeroDivisionError):  # the function refuses p = q, or the quantity is 0
        return PositionMatch(level=level)
    of_token = PositionMatch(level="neither", factors=factors, factors_of="token")
    if level != "neither":
        slack = TOLERANCE + MAX_STANDARD_ERRORS * expected.mean_error / min(map(abs, targets))
        return PositionMatch(level=level) if all(abs(f - 1) <= slack for f in factors) else of_token
    scaled: Level = "token"
    if of_token.is_uniform:
        scaled = _level(expected, "value", match.quantity, match.factor * factors[0])
    if scaled == "neither":  # a factor of each token alone, and another of several
        return PositionMatch(level=level)
    return replace(of_token, factors_of="sequence" if scaled == "sequence" else "token")


@cache
def near_responses() -> ToyDistributions:
    """The distributions over responses of three tokens, with q so close to p that no log ratio is large."""
    toy = toy_distributions()[SEQUENCES]
    return replace(toy, logits_q=toy.logits_p + (toy.logits_q - toy.logits_p) / 4)


@cache
def single_position_distributions(toy: ToyDistributions) -> tuple[ToyDistributions, ...]:
    """The distributions over three tokens, with q = p except at the first, the second or the third position."""
    return tuple(
        replace(toy, logits_q=torch.where(_has_length(toy, step).unsqueeze(-1), toy.logits_q, toy.logits_p))
        for step in range(toy.steps)
    )


def _gradient_by_position(expected: Expectation, match: QuantityMatch | None) -> PositionMatch:
    """Compare the expected gradient of a response with the quantity whose gradient it is for one token."""
    if expected.gradient is None or not _has_levels(match) or not match.everywhere:
        return PositionMatch(level="")
    level = _level(expected, "gradient", match.quantity, match.factor)
    if level != "neither":
        return PositionMatch(level=level)
    targets = [
        match.factor * of
        for of in exact("gradient", expected.toy, expected.sampling, match.quantity).values()
    ]
    of_token, of_sequence = (_gradient_factors(expected, expected.gradient, target) for target in targets)
    return PositionMatch(
        level=level,
        factors=of_token or of_sequence,
        factors_of="token" if of_token else "sequence" if of_sequence else "",
        cosines=tuple(
            cosine_similarities(expected.gradient.flatten(), torch.stack(targets).flatten(1)).tolist()
        ),
    )


def _gradient_factors(expected: Expectation, gradient: Tensor, target: Tensor) -> tuple[float, ...]:
    """The gradient over the target at each position; () if it is no multiple of it."""
    factors: list[float] = []
    for step in range(expected.toy.steps):
        rows = _has_length(expected.toy, step)
        part, target_part = gradient[rows], target[rows]
        factor = ((part * target_part).sum() / target_part.square().sum()).item()
        error = (part - factor * target_part).norm()
        if error > TOLERANCE * target_part.norm() + MAX_STANDARD_ERRORS * expected.gradient_error:
            return ()
        factors.append(factor)
    return tuple(factors)


def _has_length(toy: ToyDistributions, length: int) -> Bool[Tensor, " prefixes"]:
    """The prefixes of this many tokens."""
    return torch.isin(torch.arange(len(toy.logits_p)), toy.prefix_rows[:, length])


def _estimator_level(audited: AuditedFunction, name: str) -> Level:
    """Whether a function that is this estimator for one token is, for several, that of each or of the summed log ratio.

    A constant factor, such as that of a mean, is of either level. "" without an estimator.
    """
    if not name:
        return ""
    near = near_responses()
    inputs = near.inputs(near.logits_p.clone().requires_grad_(), "on-policy")
    totals = audited.values(inputs).detach().double().sum(-1)
    log_ratios = (inputs.token_logp - inputs.token_logq).detach()
    levels = (ESTIMATORS[name].of(u).sum(-1) for u in (log_ratios, log_ratios.sum(-1, keepdim=True)))
    by_token, by_sequence = (values / values.norm() for values in levels)
    return _level_of(totals / totals.norm(), by_token, by_sequence)


def _has_levels(match: QuantityMatch | None) -> TypeGuard[QuantityMatch]:
    """Whether the matched quantity can be compared with that of three tokens, each of another vocabulary."""
    if match is None or match.relation == "shifted" or match.quantity == "zero":
        return False
    return quantity_of(match.quantity).kind != "truncated"
