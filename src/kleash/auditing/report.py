"""Makes the audit record: runs all checks, orders their findings, and states the verdict."""

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from math import isnan, nan
from typing import Any, Literal, TypeVar

import torch

from kleash.auditing.audited_function import AuditedFunction
from kleash.auditing.checks.batches import batch_findings
from kleash.auditing.checks.evidence import Evidence, gather_evidence, is_quantity
from kleash.auditing.checks.expectations import value_rows
from kleash.auditing.checks.extreme_inputs import (
    extreme_findings,
    extreme_rows,
    nan_input_findings,
    nan_input_rows,
)
from kleash.auditing.checks.gradients import gradient_findings, gradient_sentence
from kleash.auditing.checks.importance_ratios import truncated_ratio_findings, truncated_ratio_zones
from kleash.auditing.checks.log_ratios import log_ratio_findings
from kleash.auditing.checks.padding import batch_mean, padding_findings, padding_rows
from kleash.auditing.checks.precision import accuracy_rows, float32_error, precision_findings
from kleash.auditing.checks.purity import Purity, check_final_call, purity_findings
from kleash.auditing.checks.values import off_policy_sentence, value_findings, value_sentence
from kleash.auditing.conventions import Convention
from kleash.auditing.finding_kinds import remedy_of
from kleash.store.audit import (
    FAULTS,
    AccuracyRow,
    Audit,
    CurveRow,
    EdgeRow,
    Finding,
    GradientRow,
    MaskRow,
    Severity,
    ValueRow,
    ZoneRow,
)
from kleash.version import __version__

Row = TypeVar("Row", ValueRow, GradientRow, ZoneRow, EdgeRow, MaskRow, AccuracyRow, CurveRow)

SEVERITY_ORDER: tuple[Severity, ...] = ("wrong", "fragile", "note")
NO_FAULT = "No fault was found."
REPEATS = 12
"""Calls that are averaged in each evaluation of a random function."""
BATCH_MEANS: Mapping[str, str] = {
    "tokens": "Over a batch it takes the mean over all unmasked tokens.",
    "responses": "Over a batch it takes the mean of the responses' means.",
    "neither": "Over a batch it takes neither the mean over all tokens nor the mean of the responses' means.",
}


def audit_record(audited: AuditedFunction, purity: Purity) -> Audit:
    """The audit of a function whose purity has been checked; a random one is averaged and has fewer checks.

    Raises:
        CannotRunError, ShapeError: if a call fails that all functions must allow.
    """
    is_random = purity.is_random
    audited = replace(audited, repeats=REPEATS if is_random else 1)
    evidence = gather_evidence(audited)
    log_ratios, convention = evidence.log_ratios, audited.convention
    is_claimed = is_quantity(evidence.value_matches["on-policy"], evidence.claimed, everywhere=False)
    accuracy = () if is_random else accuracy_rows(audited, log_ratios.estimator, is_claimed)
    edges, truncated = extreme_rows(audited), truncated_ratio_zones(audited)
    masks, mean_over = ((), "") if is_random else (padding_rows(audited), batch_mean(audited))
    is_late_credit = convention.place == "reward" and evidence.gradient_is_right
    nan_edges, of_batches, error = [], [], 0.0
    if not is_random and not purity.has_state:
        nan_edges, error = nan_input_rows(audited), float32_error(audited)
        of_batches = batch_findings(
            audited,
            ignores_padding=not (masks and masks[0].defect),
            is_right_between_tokens=is_late_credit and evidence.gradient_positions.level != "neither",
        )
    of_precision = precision_findings(audited, accuracy, error)
    calls = (*purity.rows, check_final_call(audited, purity))
    findings = with_remedies(
        [
            *purity_findings(calls),
            *of_batches,
            *nan_input_findings(nan_edges),
            *value_findings(evidence),
            *gradient_findings(evidence),
            *log_ratio_findings(log_ratios, is_claimed, evidence.gradient_is_right),
            *extreme_findings(edges, is_claimed=is_claimed, is_random=is_random),
            *truncated_ratio_findings(truncated),
            *padding_findings(masks),
            *of_precision,
        ],
        convention,
    )
    audit = audit_without_numbers(audited, findings, verdict_sentences(evidence, findings))
    return replace(
        _with_evidence(audit, evidence),
        zones=with_one_nan((*log_ratios.zones, *truncated)),
        edges=with_one_nan((*edges, *nan_edges)),
        masks=with_one_nan(masks),
        accuracy=with_one_nan(accuracy),
        calls=calls,
        notes=(BATCH_MEANS[mean_over],) if mean_over else (),
    )


def _with_evidence(audit: Audit, evidence: Evidence) -> Audit:
    """The audit with what the value and the gradient are."""
    log_ratios = evidence.log_ratios
    return replace(
        audit,
        value=_describe_match(evidence, "value"),
        gradient=_describe_match(evidence, "gradient"),
        estimator=log_ratios.estimator,
        values=with_one_nan(value_rows(evidence.expectations, evidence.claimed)),
        gradients=with_one_nan(evidence.gradient_rows),
        value_range=log_ratios.unclamped_range("value") if evidence.value_is_right else "",
        gradient_range=log_ratios.unclamped_range("gradient") if evidence.gradient_is_right else "",
        value_level=evidence.value_positions.level,
        gradient_level=evidence.gradient_positions.level,
        estimator_level=evidence.estimator_level,
        curve=with_one_nan(log_ratios.curve),
        right_value_is=log_ratios.right_value_is,
    )


def audit_of_failing_calls(audited: AuditedFunction, purity: Purity, error: str) -> Audit:
    """The audit of a function whose state makes later calls fail: its findings about purity only."""
    findings = with_remedies(purity_findings(purity.rows), audited.convention)
    verdict = (*(f.sentence for f in findings), f"Nothing else could be determined: {error}.")
    return replace(audit_without_numbers(audited, findings, verdict), calls=purity.rows)


def audit_of_refusal(audited: AuditedFunction, error: str) -> Audit:
    """The audit of a function that raises on every call."""
    finding = Finding(kind="cannot_be_called", severity="wrong", sentence=error)
    audit = audit_without_numbers(audited, with_remedies([finding], audited.convention), (error,))
    return replace(audit, versions={"kleash": __version__, "torch": torch.__version__})


def audit_without_numbers(
    audited: AuditedFunction, findings: Sequence[Finding], verdict: Sequence[str]
) -> Audit:
    """An audit that has findings and a verdict only."""
    convention = audited.convention
    return Audit(
        target=audited.name,
        convention=convention.name,
        summary=convention.summary,
        place=convention.place,
        claims=convention.claims,
        arguments={name: repr(value) for name, value in audited.arguments.items()},
        value="",
        gradient="",
        estimator="",
        verdict=tuple(verdict),
        findings=tuple(findings),
        values=(),
        gradients=(),
        zones=(),
        edges=(),
        masks=(),
        accuracy=(),
        versions=_versions(audited.function),
    )


def with_remedies(findings: Sequence[Finding], convention: Convention) -> tuple[Finding, ...]:
    """The findings about a function of this convention ordered by severity, each with a remedy."""
    sees, claims = convention.sees, convention.claims
    complete = [replace(f, remedy=f.remedy or remedy_of(f.kind, sees, claims)) for f in findings]
    return tuple(sorted(complete, key=lambda finding: SEVERITY_ORDER.index(finding.severity)))


def verdict_sentences(evidence: Evidence, findings: Sequence[Finding]) -> tuple[str, ...]:
    """The sentences of the verdict: about the value, the gradient, and all other findings."""
    sentences = [
        value_sentence(evidence),
        gradient_sentence(evidence),
        off_policy_sentence(evidence),
        *(finding.sentence for finding in findings),
        "" if any(finding.severity in FAULTS for finding in findings) else NO_FAULT,
    ]
    return tuple(dict.fromkeys(filter(None, sentences)))


def with_one_nan(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """The rows with every NaN replaced by ``math.nan``, so that equal audits compare as equal."""

    def replace_nan(row: Row) -> Row:
        nans = {name: nan for name, value in vars(row).items() if isinstance(value, float) and isnan(value)}
        return replace(row, **nans)

    return tuple(replace_nan(row) for row in rows)


def _describe_match(evidence: Evidence, of: Literal["value", "gradient"]) -> str:
    """The quantity that the value, or the gradient, was matched with."""
    matches, positions = evidence.value_matches, evidence.value_positions
    if of == "gradient":
        if evidence.audited.convention.place == "metric" or evidence.is_detached:
            return "none" if evidence.is_detached else ""
        matches, positions = evidence.gradient_matches, evidence.gradient_positions
    match = matches["on-policy"]
    if match is None:
        return "none of the table"
    if not match.everywhere:
        return f"{match}, where no log ratio is large"
    return f"{match} for one token" if positions.level == "neither" else str(match)


def function_name(function: Callable[..., Any]) -> str:
    """``module.function``, as far as it is known."""
    if isinstance(function, partial):
        return function_name(function.func)
    module = getattr(function, "__module__", None) or "?"
    return f"{module}.{getattr(function, '__qualname__', type(function).__name__)}"


def _versions(function: Callable[..., Any]) -> dict[str, str]:
    versions = {"kleash": __version__, "python": platform.python_version(), "torch": torch.__version__}
    package = function_name(function).partition(".")[0]
    try:
        return {package: version(package), **versions}
    except PackageNotFoundError:
        return versions
