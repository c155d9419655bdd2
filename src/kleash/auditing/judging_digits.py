"""Findings about precision."""

import torch

from kleash.auditing.evidence import Evidence
from kleash.records.audit import AccuracyRow, Finding, Severity

LOW = ("bfloat16", "float16")
LOST = 1e-2
"""A relative error in float32 from which on digits that matter are lost."""
ROUNDING = 1e-4
"""More than any computation in float32 need lose, however little care is taken."""
ONE_ROUNDING = 2.0**-8 * 1.5
"""What is left of a right result that was rounded to bfloat16 on its way out."""


def digit_findings(evidence: Evidence) -> list[Finding]:
    """Digits lost in float32 to cancellation, and in bfloat16 to computing in it."""
    return [*_cancellation(evidence), *_in_float32(evidence), *_low_precision(evidence)]


def _cancellation(evidence: Evidence) -> list[Finding]:
    lost = [
        row
        for row in evidence.accuracy
        if row.dtype == "float32" and row.relative_error > max(LOST, 10 * row.forced)
    ]
    if not lost or _in_float32(evidence):
        return []
    first = max(lost, key=lambda row: row.kl)
    sentence = (
        f"In float32 it cancels: at a KL of {first.kl:.0e} nats {first.relative_error:.2g} of the value is "
        f"rounding error, and with care {first.forced:.1g}."
    )
    return [Finding(kind="cancellation", severity="note", sentence=sentence, where="float32, near")]


def _in_float32(evidence: Evidence) -> list[Finding]:
    """What float32 inputs lose where nothing cancels: it computes in less."""
    if not evidence.error_in_float32 > ROUNDING:
        return []
    sentence = (
        f"For float32 inputs it computes in less than float32: on the far pair its value is "
        f"{evidence.error_in_float32:.2g} of itself away from that of the same numbers in float64."
    )
    return [Finding(kind="low_precision", severity="wrong", sentence=sentence, where="float32")]


def _low_precision(evidence: Evidence) -> list[Finding]:
    lost = [row for row in evidence.accuracy if row.dtype in LOW and _too_much(row)]
    if not lost or _in_float32(evidence):
        return []
    in_bfloat16 = [row for row in lost if row.dtype == "bfloat16"]
    worst = max(in_bfloat16 or lost, key=lambda row: row.relative_error)
    only_returned = evidence.returned_dtype == torch.bfloat16 and worst.relative_error <= ONE_ROUNDING
    severity: Severity = "note" if only_returned else "fragile"
    in_it = evidence.returned_dtype == torch.bfloat16
    how = "it computes in bfloat16" if in_it else "it computes before it upcasts"
    how = "it returns bfloat16" if only_returned else how
    sentence = (
        f"For {worst.dtype} inputs {how}: at a KL of {worst.kl:.2g} nats {worst.relative_error:.2g} of the value is "
        f"rounding error, where {worst.forced:.1g} is forced."
    )
    return [Finding(kind="low_precision", severity=severity, sentence=sentence, where=worst.dtype)]


def _too_much(row: AccuracyRow) -> bool:
    """NaN has its own finding, from the edges."""
    return row.relative_error > max(ROUNDING, 10 * row.forced)
