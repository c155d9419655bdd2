"""The page of an audit: what each function estimates and differentiates, and its findings."""

from collections.abc import Sequence
from functools import partial
from math import isnan
from pathlib import Path
from typing import Any

from kleash.reports.drawing import BAND, INK, Chart, line, name_axes
from kleash.reports.formatting import UNKNOWN, format_value
from kleash.reports.page import write_page
from kleash.store import Audit
from kleash.store.audit import CurveRow, ZoneRow

MAX_UNFOLDED = 3
"""With more functions than this, each is collapsed under its name."""
X_LIMIT, Y_LIMIT = 14.0, 20.0
"""Nats up to which the curves are drawn: beyond the clamps of published code, and not as far as e^14."""
FLAT_ZONES = {"value": ("value",), "gradient": ("gradient", "gradient is NaN")}
"""Curve -> kinds of zones that are shaded in its chart."""
FORMULAS = {
    "k1": "k1, log p − log q",
    "abs": "|log p − log q|",
    "k2": "k2, (log p − log q)² / 2",
    "k3": "k3, q / p − 1 + log p − log q",
}


def write_audits(path: Path, audits: Sequence[Audit], command: str = "") -> Path:
    """Write one page about one or more audited functions.

    Args:
        path: the HTML file, in a folder that exists.
        audits: in the order of the page.
        command: the command that makes the page again, if there is one.

    Returns:
        ``path``.

    Raises:
        RunFolderError: if the page cannot be written.
        MissingExtraError: if Jinja2 or Matplotlib is not installed.
    """
    return write_page(
        path,
        "audits.html",
        audits=audits,
        command=command,
        curves=[curve_charts(number, audit) for number, audit in enumerate(audits, 1)],
        is_folded=len(audits) > MAX_UNFOLDED,
        format_value=format_or_dash,
        verdict=verdict_without_findings,
        audit_title=audit_title,
    )


def audit_title(audit: Audit) -> str:
    """The audited function with its bound arguments."""
    arguments = ", ".join(f"{name}={value}" for name, value in audit.arguments.items())
    return f"{audit.target} ({arguments})" if arguments else audit.target


def verdict_without_findings(audit: Audit) -> list[str]:
    """The sentences of the verdict that are not in the table of findings."""
    sentences = {finding.sentence for finding in audit.findings}
    return [line for line in audit.verdict if line not in sentences]


def format_or_dash(value: float) -> str:
    """A number to four significant digits; a dash for NaN."""
    return UNKNOWN if isnan(value) else format_value(value, 4)


def curve_charts(number: int, audit: Audit) -> list[Chart]:
    """The charts of a function's value and, if it was differentiated, its gradient; none without a scan.

    Args:
        number: of the function on the page.
        audit: of the function.
    """
    rows = [row for row in audit.curve if abs(row.log_ratio) <= X_LIMIT]
    is_per_token = any(row.log_ratio < 0 for row in rows)
    right = audit.right_value_is
    correct = {
        "value": FORMULAS.get(right, right),
        "gradient": "log p − log q" if is_per_token else f"gradient of {right}",
    }
    return [
        _curve_chart(f"{quantity}-{number}", quantity, rows, audit.zones, correct[quantity], is_per_token)
        for quantity in ("value", "gradient")
        if not all(isnan(getattr(row, quantity)) for row in rows)
    ]


def _curve_chart(
    name: str, quantity: str, rows: list[CurveRow], zones: Sequence[ZoneRow], correct: str, is_per_token: bool
) -> Chart:
    """The chart of a function's "value" or "gradient" against the log ratio, beside the correct curve."""
    points = [(row.log_ratio, getattr(row, quantity), getattr(row, f"right_{quantity}")) for row in rows]
    flat = [zone for zone in zones if zone.kind in FLAT_ZONES[quantity]]
    description = f"The dotted line is {correct}"
    if quantity == "gradient" and is_per_token:
        description += " (an added constant does not change the expectation)"
    if flat:
        state = "does not change" if quantity == "value" else "is zero or NaN"
        description += f"; shaded, where the {quantity} {state}: {', '.join(zone.span for zone in flat)} nats"
    return Chart(
        name=name,
        title=f"{quantity.capitalize()} against the log ratio",
        panels=(partial(_draw_curve, points=points, zones=flat, labels=(quantity, correct)),),
        description=f"{description}.",
        header=("Log ratio, nats" if is_per_token else "Log-odds, nats", quantity.capitalize(), "Correct"),
        rows=tuple(
            (format_value(u, 3), format_or_dash(measured), format_or_dash(right))
            for u, measured, right in points
            if u % 2 == 0
        ),
    )


def _draw_curve(
    axes: Any,
    *,
    points: Sequence[tuple[float, float, float]],
    zones: Sequence[ZoneRow],
    labels: tuple[str, str],
) -> None:
    """Draw the measured and the correct curve, and a band over the log ratios of each zone.

    Args:
        axes: of Matplotlib.
        points: (log ratio, measured, correct).
        zones: the ranges of log ratios with a band.
        labels: of the measured and of the correct curve.
    """
    log_ratios, measured, correct = zip(*points, strict=True)
    low, high = log_ratios[0], log_ratios[-1]
    for zone in zones:
        axes.axvspan(max(low, min(zone.low, high)), min(high, max(zone.high, low)), color=BAND, linewidth=0)
    line(axes, log_ratios, measured, label=labels[0], linewidth=2.4)
    line(axes, log_ratios, correct, color=INK, label=labels[1], linestyle=":")
    seen = [0.0, *(y for y in (*measured, *correct) if abs(y) <= Y_LIMIT)]
    margin = 0.06 * (max(seen) - min(seen))
    axes.set(xlim=(low, high), ylim=(min(seen) - margin, max(seen) + margin))
    # only log ratios have values below 0
    x = "log p − log q, nats" if low < 0 else "log-odds of two tokens, nats"
    name_axes(axes, x, f"{labels[0]}, nats" if labels[0] == "value" else labels[0])
