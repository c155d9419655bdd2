"""Makes the audit record from the evidence: rows of plain values, and sentences."""

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from math import isnan, nan
from typing import Any, Literal, TypeVar

import torch

from kleash.auditing.audited_function import AuditedFunction
from kleash.auditing.conventions import Convention
from kleash.auditing.findings.calls import CHECK_LABELS, describe_impurity, purity_findings
from kleash.auditing.findings.extremes import describe_extreme, describe_padding
from kleash.auditing.findings.log_ratios import unclamped_range
from kleash.auditing.findings.verdict import all_findings, verdict_sentences, with_remedies
from kleash.auditing.probes.evidence import Evidence
from kleash.auditing.probes.extreme_inputs import ExtremeResult, NanResult
from kleash.auditing.probes.log_ratio_scan import curve_rows
from kleash.auditing.probes.padding import BatchMean, PaddingResult
from kleash.auditing.probes.purity import Purity, PurityResult
from kleash.store.audit import (
    AccuracyRow,
    Audit,
    CallRow,
    CurveRow,
    EdgeRow,
    Finding,
    GradientRow,
    MaskRow,
    ValueRow,
    ZoneRow,
)
from kleash.version import __version__

Row = TypeVar("Row", ValueRow, GradientRow, ZoneRow, EdgeRow, MaskRow, AccuracyRow, CurveRow)

BATCH_MEANS: Mapping[BatchMean, str] = {
    "tokens": "Over a batch it takes the mean over all unmasked tokens.",
    "responses": "Over a batch it takes the mean of the responses' means.",
    "neither": "Over a batch it takes neither the mean over all tokens nor the mean of the responses' means.",
}


def audit_record(evidence: Evidence) -> Audit:
    """The audit with findings, verdict and rows.

    Raises:
        CannotRunError, ShapeError: if a probe that findings make fails.
    """
    audited = evidence.audited
    findings = all_findings(evidence)
    curve, right_value_is = curve_rows(audited, evidence.scan.curve, evidence.estimator)
    return replace(
        audit_without_numbers(audited, findings=findings, verdict=verdict_sentences(evidence, findings)),
        value=_describe_match(evidence, "value"),
        gradient=_describe_match(evidence, "gradient"),
        estimator=evidence.estimator,
        values=with_one_nan(evidence.expectations.value_rows()),
        gradients=with_one_nan(evidence.expectations.gradient_rows),
        zones=with_one_nan(evidence.scan.zones + evidence.truncated_ratios),
        edges=with_one_nan(
            (*map(_extreme_row, evidence.extremes), *map(_nan_input_row, evidence.nan_inputs))
        ),
        masks=with_one_nan(tuple(map(_padding_row, evidence.padding))),
        accuracy=with_one_nan(evidence.accuracy),
        value_range=_range_of_match(evidence, "value"),
        gradient_range=_range_of_match(evidence, "gradient"),
        value_level=evidence.value_positions.level,
        gradient_level=evidence.gradient_positions.level,
        estimator_level=evidence.estimator_level,
        calls=tuple(map(_call_row, evidence.purity)),
        curve=with_one_nan(curve),
        right_value_is=right_value_is,
        notes=(BATCH_MEANS[evidence.batch_mean],) if evidence.batch_mean else (),
    )


def audit_of_failing_calls(audited: AuditedFunction, purity: Purity, error: str) -> Audit:
    """The audit of a function whose state makes later calls fail: its findings about purity only."""
    findings = with_remedies(purity_findings(purity.results), audited.convention)
    sentences = [finding.sentence for finding in findings]
    return replace(
        audit_without_numbers(
            audited, findings=findings, verdict=(*sentences, f"Nothing else could be determined: {error}.")
        ),
        calls=tuple(map(_call_row, purity.results)),
    )


def audit_of_refusal(audited: AuditedFunction, error: str) -> Audit:
    """The audit of a function that raises on every call."""
    finding = Finding(kind="cannot_be_called", severity="wrong", sentence=error)
    audit = audit_without_numbers(
        audited, findings=with_remedies([finding], audited.convention), verdict=(error,)
    )
    return replace(audit, versions={"kleash": __version__, "torch": torch.__version__})


def audit_without_numbers(
    audited: AuditedFunction, *, findings: Sequence[Finding], verdict: Sequence[str]
) -> Audit:
    """An audit that has findings and a verdict only."""
    convention: Convention = audited.convention
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


def with_one_nan(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """The rows with every NaN replaced by ``math.nan``, so that equal audits compare as equal."""

    def replace_nan(row: Row) -> Row:
        nans = {name: nan for name, value in vars(row).items() if isinstance(value, float) and isnan(value)}
        return replace(row, **nans)

    return tuple(replace_nan(row) for row in rows)


def _extreme_row(result: ExtremeResult) -> EdgeRow:
    return EdgeRow(
        case=result.case.name,
        exact=result.exact,
        value=result.value,
        gradient=result.gradient,
        problem=describe_extreme(result),
        defect=result.defect or "",
    )


def _nan_input_row(result: NanResult) -> EdgeRow:
    return EdgeRow(
        case=f"{result.field} is NaN at an unmasked token",
        exact=nan,
        value=result.value,
        gradient=nan,
        problem="a NaN in the input becomes a number" if result.is_hidden else "",
        defect="hidden_nan" if result.is_hidden else "",
    )


def _padding_row(result: PaddingResult) -> MaskRow:
    return MaskRow(
        case=result.fill.name,
        value_change=result.value_change,
        gradient_change=result.gradient_change,
        problem=describe_padding(result),
        defect=result.defect or "",
    )


def _call_row(result: PurityResult) -> CallRow:
    return CallRow(
        case=CHECK_LABELS[result.check],
        problem=describe_impurity(result),
        defect=result.impurity or "",
    )


def _describe_match(evidence: Evidence, of: Literal["value", "gradient"]) -> str:
    """The quantity that the value, or the gradient, was matched with."""
    if of == "gradient" and (not evidence.needs_gradient or evidence.is_detached):
        return "none" if evidence.needs_gradient else ""
    is_value = of == "value"
    match = (evidence.value_matches if is_value else evidence.gradient_matches)["on-policy"]
    if match is None:
        return "none of the table"
    if not match.everywhere:
        return f"{match}, where no log ratio is large"
    positions = evidence.value_positions if is_value else evidence.gradient_positions
    return f"{match} for one token" if positions.level == "neither" else str(match)


def _range_of_match(evidence: Evidence, of: Literal["value", "gradient"]) -> str:
    """The range of log ratios for which ``_describe_match`` is true, if it is clamped."""
    matches = evidence.value_matches if of == "value" else evidence.gradient_matches
    return unclamped_range(evidence, of) if evidence.is_claimed(matches["on-policy"]) else ""


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
