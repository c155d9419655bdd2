"""The results of all probes of one function, which findings are derived from."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor

from kleash.auditing.audited_function import AuditedFunction
from kleash.auditing.inputs import AuditInputs
from kleash.auditing.matching import QuantityMatch
from kleash.auditing.probes.accuracy import (
    dtype_for_bfloat16,
    float32_error,
    matching_estimator,
    probe_precision,
)
from kleash.auditing.probes.batches import BatchResult, probe_batches
from kleash.auditing.probes.expectations import Expectation, Expectations, compute_expectations
from kleash.auditing.probes.extreme_inputs import (
    ExtremeResult,
    NanResult,
    probe_extreme_inputs,
    probe_nan_inputs,
)
from kleash.auditing.probes.importance_ratios import truncated_ratio_zones
from kleash.auditing.probes.log_ratio_scan import ScanResult, scan_log_ratios
from kleash.auditing.probes.padding import BatchMean, PaddingResult, probe_batch_mean, probe_padding
from kleash.auditing.probes.purity import Purity, PurityResult, probe_final_call
from kleash.auditing.probes.token_positions import (
    Level,
    PositionMatch,
    estimator_level,
    match_gradient_by_position,
    match_value_by_position,
)
from kleash.auditing.quantities import divergence_label
from kleash.auditing.toy_distributions import SAMPLINGS, Sampling
from kleash.errors import KleashError
from kleash.store.audit import AccuracyRow, ZoneRow

Matches: TypeAlias = dict[Sampling, QuantityMatch | None]


@dataclass(frozen=True, kw_only=True, eq=False)
class Evidence:
    """The results of all probes."""

    audited: AuditedFunction
    expectations: Expectations
    value_matches: Matches
    gradient_matches: Matches
    estimator: str
    """The estimator that it computes for one sampled token, or ""."""
    estimator_level: Level
    """Whether for several tokens it is that of each, or of the response's summed log ratio."""
    scan: ScanResult
    extremes: tuple[ExtremeResult, ...]
    padding: tuple[PaddingResult, ...]
    accuracy: tuple[AccuracyRow, ...]
    float32_error: float
    """The relative error in float32 where nothing cancels."""
    dtype_for_bfloat16: torch.dtype | None
    """The dtype of the result for bfloat16 inputs."""
    match_of_probabilities: QuantityMatch | None
    """The quantity that its value is if it is given probabilities; only tried if it matches none otherwise."""
    batch_mean: BatchMean | None
    purity: tuple[PurityResult, ...]
    is_random: bool
    value_positions: PositionMatch
    gradient_positions: PositionMatch
    batches: BatchResult
    nan_inputs: tuple[NanResult, ...]
    truncated_ratios: tuple[ZoneRow, ...]

    @property
    def claimed(self) -> str:
        """The label of the claimed divergence."""
        return divergence_label(self.audited.convention.claims)

    @property
    def needs_gradient(self) -> bool:
        """Whether a function in its place contributes a gradient: not a metric."""
        return self.audited.convention.place != "metric"

    @property
    def is_detached(self) -> bool:
        """Whether it needs a gradient and none reaches the policy."""
        return self.needs_gradient and any(e.gradient is None for e in self.expectations.entries)

    @property
    def applies_own_weights(self) -> bool:
        """Whether the function itself must correct for off-policy samples; the trainer weights a plain reward."""
        return self.audited.convention.place == "loss" or self.audited.convention.takes_behaviour

    @cached_property
    def value_is_right(self) -> bool:
        """Whether on-policy its expected value is the claimed divergence on every pair."""
        return self.is_claimed(self.value_matches["on-policy"])

    @cached_property
    def gradient_is_right(self) -> bool:
        """Whether on-policy its expected gradient is that of the claimed divergence on every pair."""
        return self.is_claimed(self.gradient_matches["on-policy"])

    @property
    def is_claimed_at_moderate_ratios(self) -> bool:
        """Whether on-policy its expected value is the claimed divergence at least where no log ratio is large."""
        return is_quantity(self.value_matches["on-policy"], self.claimed)

    def is_claimed(self, match: QuantityMatch | None) -> bool:
        """Whether the match is the claimed divergence itself, on every pair."""
        return is_quantity(match, self.claimed, everywhere=True)

    def one_token(self, sampling: Sampling) -> list[Expectation]:
        """The expectations over a single token."""
        return self.expectations.one_token(sampling)


def is_quantity(match: QuantityMatch | None, label: str, *, everywhere: bool = False) -> bool:
    """Whether the match is this quantity itself, neither scaled nor shifted; with ``everywhere``, on every pair."""
    if match is None or (match.quantity, match.relation) != (label, "itself"):
        return False
    return match.everywhere or not everywhere


REPEATS = 12
"""Calls that are averaged in each evaluation of a random function."""


def gather_evidence(audited: AuditedFunction, purity: Purity) -> Evidence:
    """Run every probe; those that compare calls with each other only on functions that are not random."""
    if purity.is_random:
        audited = replace(audited, repeats=REPEATS)
    is_deterministic = not purity.is_random
    is_stateless = is_deterministic and not purity.has_state
    expectations = compute_expectations(audited)
    value_matches, gradient_matches = match_expectations(expectations, audited.convention.place != "metric")
    value, gradient = value_matches["on-policy"], gradient_matches["on-policy"]
    value_is_claimed = is_quantity(value, expectations.claimed_label)
    estimator = matching_estimator(audited)
    padding = probe_padding(audited) if is_deterministic else ()
    evidence = Evidence(
        audited=audited,
        expectations=expectations,
        value_matches=value_matches,
        gradient_matches=gradient_matches,
        estimator=estimator,
        estimator_level=estimator_level(audited, estimator),
        scan=scan_log_ratios(audited),
        extremes=probe_extreme_inputs(audited),
        padding=padding,
        accuracy=probe_precision(audited, estimator, value_is_claimed) if is_deterministic else (),
        float32_error=float32_error(audited) if is_stateless else 0.0,
        dtype_for_bfloat16=dtype_for_bfloat16(audited),
        match_of_probabilities=_match_of_probabilities(audited) if value is None else None,
        batch_mean=probe_batch_mean(audited) if is_deterministic else None,
        purity=(),
        is_random=purity.is_random,
        value_positions=match_value_by_position(audited, expectations, value),
        gradient_positions=match_gradient_by_position(expectations, gradient),
        batches=probe_batches(
            audited, ignores_padding=not any(result.defect is not None for result in padding[:1])
        )
        if is_stateless
        else BatchResult(),
        nan_inputs=probe_nan_inputs(audited) if is_stateless else (),
        truncated_ratios=truncated_ratio_zones(audited),
    )
    final = probe_final_call(replace(audited, repeats=1), purity)
    return replace(evidence, purity=(*purity.results, final))


def match_expectations(expectations: Expectations, needs_gradient: bool) -> tuple[Matches, Matches]:
    """The quantities that the expected values and, if they matter, the expected gradients are."""
    values: Matches = {sampling: expectations.matched_value(sampling) for sampling in SAMPLINGS}
    gradients: Matches = {
        sampling: expectations.matched_gradient(sampling) if needs_gradient else None
        for sampling in SAMPLINGS
    }
    return values, gradients


LOG_PROBABILITY_FIELDS = ("token_logp", "token_logq", "behaviour_logp", "logp", "logq")


def _match_of_probabilities(audited: AuditedFunction) -> QuantityMatch | None:
    """The quantity that the value is if every log-probability is replaced by its probability."""
    call = audited.convention.call

    def call_with_probabilities(function: Callable[..., Any], inputs: AuditInputs) -> Tensor:
        probabilities = {name: getattr(inputs, name).exp() for name in LOG_PROBABILITY_FIELDS}
        return call(function, replace(inputs, **probabilities))

    convention = replace(audited.convention, call=call_with_probabilities)
    try:
        match = compute_expectations(replace(audited, convention=convention)).matched_value()
    except KleashError:
        return None
    return match if match is not None and match.quantity != "zero" else None
