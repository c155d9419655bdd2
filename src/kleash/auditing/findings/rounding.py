"""Findings about precision: digits lost to cancellation or to low-precision arithmetic."""

import torch

from kleash.auditing.probes.evidence import Evidence
from kleash.store.audit import AccuracyRow, Finding, Severity

LOW_PRECISION = ("bfloat16", "float16")
CANCELLATION = 1e-2
"""Relative error in float32 above which cancellation is reported."""
ROUNDING = 1e-4
"""More than a computation in float32 needs to lose."""
BFLOAT16_ROUNDING = 2.0**-8 * 1.5
"""Relative error of a right result that is rounded to bfloat16 at the end."""


def rounding_findings(evidence: Evidence) -> list[Finding]:
    """Digits lost in float32 to cancellation, and by computing in bfloat16 or float16."""
    if evidence.float32_error > ROUNDING:
        return [_below_float32(evidence)]
    return [*_cancellation(evidence), *_low_precision(evidence)]


def _below_float32(evidence: Evidence) -> Finding:
    """The error of float32 inputs where nothing cancels."""
    sentence = (
        f"For float32 inputs it computes in less than float32: on the far pair its value differs by "
        f"{evidence.float32_error:.2g} (relative) from its value for the same numbers in float64."
    )
    return Finding(kind="low_precision", severity="wrong", sentence=sentence, where="float32")


def _cancellation(evidence: Evidence) -> list[Finding]:
    """The finding about cancellation in float32 where p and q nearly agree."""
    rows = [
        row
        for row in evidence.accuracy
        if row.dtype == "float32" and row.relative_error > max(CANCELLATION, 10 * row.unavoidable_error)
    ]
    if not rows:
        return []
    row = max(rows, key=lambda row: row.kl)
    sentence = (
        f"In float32 it loses digits to cancellation: at a KL of {row.kl:.0e} nats its relative error is "
        f"{row.relative_error:.2g}, where {row.unavoidable_error:.1g} is unavoidable."
    )
    return [Finding(kind="cancellation", severity="note", sentence=sentence, where="float32, near")]


def _low_precision(evidence: Evidence) -> list[Finding]:
    """The finding about computing in the precision of half-precision inputs."""
    rows = [row for row in evidence.accuracy if row.dtype in LOW_PRECISION and _is_inaccurate(row)]
    if not rows:
        return []
    bfloat16_rows = [row for row in rows if row.dtype == "bfloat16"]
    worst = max(bfloat16_rows or rows, key=lambda row: row.relative_error)
    returns_bfloat16 = evidence.dtype_for_bfloat16 == torch.bfloat16
    only_rounds_result = returns_bfloat16 and worst.relative_error <= BFLOAT16_ROUNDING
    severity: Severity = "note" if only_rounds_result else "fragile"
    cause = "it computes in bfloat16" if returns_bfloat16 else "it computes before it upcasts"
    cause = "it returns bfloat16" if only_rounds_result else cause
    sentence = (
        f"For {worst.dtype} inputs {cause}: at a KL of {worst.kl:.2g} nats its relative error is "
        f"{worst.relative_error:.2g}, where {worst.unavoidable_error:.1g} is unavoidable."
    )
    return [Finding(kind="low_precision", severity=severity, sentence=sentence, where=worst.dtype)]


def _is_inaccurate(row: AccuracyRow) -> bool:
    """Whether the error is avoidable; False for NaN, which the extreme inputs report."""
    return row.relative_error > max(ROUNDING, 10 * row.unavoidable_error)
