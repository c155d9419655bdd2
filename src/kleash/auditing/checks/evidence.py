"""What value and gradient are, on which the findings about them depend: matches, levels, and the scan."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from torch import Tensor

from kleash.auditing.audited_function import AuditedFunction
from kleash.auditing.checks.expectations import (
    Expectation,
    compute_expectations,
    gradient_rows,
    matched_gradient,
    matched_value,
    several_tokens,
)
from kleash.auditing.checks.levels import (
    Level,
    PositionMatch,
    estimator_level,
    match_gradient_by_position,
    match_value_by_position,
)
from kleash.auditing.checks.log_ratios import LogRatios, scan_log_ratios
from kleash.auditing.inputs import AuditInputs
from kleash.auditing.matching import QuantityMatch
from kleash.auditing.quantities import divergence_label
from kleash.auditing.toy_distributions import SAMPLINGS, Sampling
from kleash.errors import KleashError
from kleash.store.audit import GradientRow

Matches: TypeAlias = dict[Sampling, QuantityMatch | None]


@dataclass(frozen=True, kw_only=True, eq=False)
class Evidence:
    """What the value and the gradient of a function are."""

    audited: AuditedFunction
    claimed: str
    """The label of the claimed divergence."""
    expectations: tuple[Expectation, ...]
    gradient_rows: tuple[GradientRow, ...]
    value_matches: Matches
    gradient_matches: Matches
    """None for a metric."""
    match_of_probabilities: QuantityMatch | None
    """The quantity that its value is if it is given probabilities; only tried if it matches none otherwise."""
    value_positions: PositionMatch
    gradient_positions: PositionMatch
    log_ratios: LogRatios
    estimator_level: Level
    """Whether for several tokens its estimator is that of each, or of the response's summed log ratio."""

    @property
    def is_detached(self) -> bool:
        """Whether it is no metric and no gradient reaches the policy."""
        is_metric = self.audited.convention.place == "metric"
        return not is_metric and any(e.gradient is None for e in self.expectations)

    @property
    def value_is_right(self) -> bool:
        """Whether on-policy its expected value is the claimed divergence on every pair."""
        return is_quantity(self.value_matches["on-policy"], self.claimed)

    @property
    def gradient_is_right(self) -> bool:
        """Whether on-policy its expected gradient is that of the claimed divergence on every pair."""
        return is_quantity(self.gradient_matches["on-policy"], self.claimed)


def is_quantity(match: QuantityMatch | None, label: str, *, everywhere: bool = True) -> bool:
    """Whether the match is this quantity itself, neither scaled nor shifted; with ``everywhere``, on every pair."""
    if match is None or (match.quantity, match.relation) != (label, "itself"):
        return False
    return match.everywhere or not everywhere


def gather_evidence(audited: AuditedFunction) -> Evidence:
    """Determine what the value and the gradient of a function are."""
    claimed, expectations = divergence_label(audited.convention.claims), compute_expectations(audited)
    value_matches: Matches = {s: matched_value(expectations, claimed, s) for s in SAMPLINGS}
    gradient_matches: Matches = {s: matched_gradient(expectations, claimed, s) for s in SAMPLINGS}
    value, gradient = value_matches["on-policy"], gradient_matches["on-policy"]
    several = several_tokens(expectations, "on-policy")
    log_ratios = scan_log_ratios(audited)
    return Evidence(
        audited=audited,
        claimed=claimed,
        expectations=expectations,
        gradient_rows=gradient_rows(expectations),
        value_matches=value_matches,
        gradient_matches=gradient_matches,
        match_of_probabilities=_match_of_probabilities(audited, claimed) if value is None else None,
        value_positions=match_value_by_position(audited, several, value),
        gradient_positions=match_gradient_by_position(several, gradient),
        log_ratios=log_ratios,
        estimator_level=estimator_level(audited, log_ratios.estimator),
    )


LOG_PROBABILITY_FIELDS = ("token_logp", "token_logq", "behaviour_logp", "logp", "logq")


def _match_of_probabilities(audited: AuditedFunction, claimed: str) -> QuantityMatch | None:
    """The quantity that the value is if every log-probability is replaced by its probability."""
    call = audited.convention.call

    def call_with_probabilities(function: Callable[..., Any], inputs: AuditInputs) -> Tensor:
        probabilities = {name: getattr(inputs, name).exp() for name in LOG_PROBABILITY_FIELDS}
        return call(function, replace(inputs, **probabilities))

    convention = replace(audited.convention, call=call_with_probabilities)
    try:
        match = matched_value(compute_expectations(replace(audited, convention=convention)), claimed)
    except KleashError:
        return None
    return match if match is not None and match.quantity != "zero" else None
