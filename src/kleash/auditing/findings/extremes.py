"""Findings on extreme inputs and on padding."""

from collections.abc import Sequence
from typing import NamedTuple

from kleash.auditing.probes.evidence import Evidence
from kleash.auditing.probes.extreme_inputs import ExtremeDefect, ExtremeResult
from kleash.auditing.probes.padding import PaddingResult
from kleash.store.audit import Finding, Severity


class DefectFinding(NamedTuple):
    """The finding that a defect on an extreme input is reported as."""

    kind: str
    statement: str
    severity: Severity
    """If no ordinary input shows it."""
    concerns_infinity: bool
    """Whether it is reported only for a function that computes the claimed divergence."""


DEFECT_FINDINGS: dict[ExtremeDefect, DefectFinding] = {
    "nan_value": DefectFinding("nan_value", "Its value is NaN", "fragile", False),
    "nan_for_infinity": DefectFinding(
        "nan_value", "Its value is NaN, and the divergence infinite,", "note", False
    ),
    "infinite_value": DefectFinding("infinite_value", "Its value is infinite", "fragile", True),
    "finite_for_infinity": DefectFinding(
        "infinite_missed", "Its value is finite, though the divergence is infinite,", "note", True
    ),
    "nan_gradient": DefectFinding("nan_gradient", "Its gradient is NaN", "fragile", False),
    "infinite_gradient": DefectFinding("nan_gradient", "Its gradient is infinite", "fragile", False),
}
"""The defects that are reported once for all inputs that show them."""


def extreme_findings(evidence: Evidence) -> list[Finding]:
    """Findings on the extreme inputs: one per defect, or per input for wrong values and errors."""
    findings: list[Finding] = []
    for defect, report in DEFECT_FINDINGS.items():
        results = [result for result in evidence.extremes if result.defect == defect]
        if results and (evidence.is_claimed_at_moderate_ratios or not report.concerns_infinity):
            is_ordinary = any(result.case.is_ordinary for result in results)
            names = [result.case.name for result in results]
            findings.append(
                Finding(
                    kind=report.kind,
                    severity="wrong" if report.severity == "fragile" and is_ordinary else report.severity,
                    sentence=f"{report.statement} where {' and where '.join(names)}.",
                    where="; ".join(names),
                )
            )
    for result in evidence.extremes:
        if (
            result.defect == "inexact_value"
            and evidence.is_claimed_at_moderate_ratios
            and not evidence.is_random
        ):
            findings.append(
                Finding(
                    kind="biased_value",
                    severity="wrong" if result.case.is_ordinary else "fragile",
                    sentence=f"Its {describe_extreme(result)}, where {result.case.name}.",
                    where=result.case.name,
                )
            )
        elif result.defect == "error":
            findings.append(
                Finding(
                    kind="cannot_be_called",
                    severity="note",
                    sentence=f"It cannot be called where {result.case.name}: {result.error}.",
                    where=result.case.name,
                )
            )
    return findings


def describe_extreme(result: ExtremeResult) -> str:
    """The defect on an extreme input in words; "" without a defect."""
    match result.defect:
        case None:
            return ""
        case "nan_value":
            return "value is NaN"
        case "nan_for_infinity":
            return "value is NaN where the divergence is infinite"
        case "finite_for_infinity":
            return "value is finite where the divergence is infinite"
        case "infinite_value":
            return "value is infinite where the divergence is finite"
        case "nan_gradient":
            return "gradient is NaN"
        case "infinite_gradient":
            return "gradient is infinite"
        case "inexact_value":
            return f"value is {result.value:.4g} where the divergence is {result.exact:.4g}"
        case "error":
            return result.error


def padding_findings(evidence: Evidence) -> list[Finding]:
    """Findings about the effect of masked positions on the result: one per kind."""
    by_kind: dict[str, list[PaddingResult]] = {}
    for result in evidence.padding:
        kind = _padding_kind(result)
        if kind:
            by_kind.setdefault(kind, []).append(result)
    return [
        Finding(
            kind=kind,
            severity=_padding_severity(kind, results),
            sentence=_PADDING_SENTENCES[kind].format(cases=_padding_cases(results)),
            where=_padding_cases(results),
        )
        for kind, results in by_kind.items()
    ]


_PADDING_SENTENCES = {
    "padding_in_denominator": "Its mean counts the masked positions in the denominator.",
    "nan_from_padding": "Masked positions make the result NaN or infinite if they hold: {cases}.",
    "padding_counts": "Masked positions change the result if they hold: {cases}.",
    "cannot_be_called": "It cannot be called with padding: {cases}.",
}


def _padding_kind(result: PaddingResult) -> str:
    """The kind of the finding about a padding result; "" without a defect."""
    match result.defect:
        case None:
            return ""
        case "denominator":
            return "padding_in_denominator"
        case "nonfinite_value" | "nonfinite_gradient":
            return "nan_from_padding"
        case "value_change" | "gradient_change":
            return "padding_counts"
        case "error":
            return "cannot_be_called"


def _padding_severity(kind: str, results: Sequence[PaddingResult]) -> Severity:
    """Wrong if ordinary padding changes the result, fragile if only unusual padding does."""
    if kind == "cannot_be_called":
        return "note"
    is_ordinary = any(result.fill.is_ordinary for result in results)
    return "wrong" if kind != "nan_from_padding" and is_ordinary else "fragile"


def _padding_cases(results: Sequence[PaddingResult]) -> str:
    """The padding with its effects, in words."""

    def describe(result: PaddingResult) -> str:
        match result.defect:
            case "nonfinite_value":
                return f"{result.fill.name} (value)"
            case "nonfinite_gradient":
                return f"{result.fill.name} (gradient)"
            case "value_change" | "gradient_change":
                return f"{result.fill.name} ({describe_padding(result)})"
            case "error":
                return f"{result.fill.name}: {result.error}"
            case _:
                return result.fill.name

    return ", ".join(map(describe, results))


def describe_padding(result: PaddingResult) -> str:
    """The effect of padding on the result in words; "" without an effect."""
    match result.defect:
        case None:
            return ""
        case "denominator":
            return "the mean counts the padding in its denominator"
        case "nonfinite_value":
            return "the value becomes NaN or infinite"
        case "nonfinite_gradient":
            return "the gradient becomes NaN or infinite"
        case "value_change":
            return f"the value changes by {result.value_change:.3g}"
        case "gradient_change":
            return f"the gradient changes by {result.gradient_change:.3g}"
        case "error":
            return result.error
