"""The page of an audit: what each function estimates and differentiates, and its findings."""

from collections.abc import Sequence
from functools import partial
from math import inf, isfinite, isnan
from pathlib import Path
from typing import Any, NamedTuple

from kleash.reports.drawing import ACCENT, BAND, INK, MUTED, Chart, line, log_axis, name_axes
from kleash.reports.formatting import UNKNOWN, format_value
from kleash.reports.page import write_page
from kleash.store import Audit, Finding
from kleash.store.audit import AccuracyRow, Severity, ValueRow, ZoneRow

RELATIVE_ROUNDING = 1e-6
"""Relative bias that is shown as 0, since a function may compute in float32."""
MAX_UNFOLDED = 3
"""With more functions than this, each is collapsed under its name."""
MIN_X_LIMIT, MAX_X_LIMIT = 8.0, 30.0
"""Log ratios in nats up to which the curves are drawn: the range of training, and the range that is scanned."""
LEAST_ERROR = 1e-9
"""Relative errors below it are drawn there."""
FLAT_ZONES = {"value": ("value",), "gradient": ("gradient", "gradient is rounded away", "gradient is NaN")}
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
    context: dict[str, Any] = {
        "audits": audits,
        "command": command,
        "accuracy": [accuracy_chart(f"accuracy-{number}", audit) for number, audit in enumerate(audits, 1)],
        "curves": [curve_charts(number, audit) for number, audit in enumerate(audits, 1)],
        "is_folded": len(audits) > MAX_UNFOLDED,
        "format_bias": format_bias,
        "format_value": format_or_dash,
        "format_zone": format_zone,
        "kinds_of": kinds_of_severity,
        "verdict": verdict_without_findings,
        "title_of": title_of,
    }
    return write_page(path, "audits.html", context)


def title_of(audit: Audit) -> str:
    """The audited function with its bound arguments."""
    if not audit.arguments:
        return audit.target
    return f"{audit.target} ({', '.join(f'{name}={value}' for name, value in audit.arguments.items())})"


def finding_kinds(findings: Sequence[Finding]) -> list[str]:
    """The kinds of findings, each once."""
    return list(dict.fromkeys(finding.kind for finding in findings))


def kinds_of_severity(audit: Audit, severity: Severity) -> list[str]:
    """The kinds of an audit's findings of this severity, each once."""
    return finding_kinds([finding for finding in audit.findings if finding.severity == severity])


def verdict_without_findings(audit: Audit) -> list[str]:
    """The sentences of the verdict that are not in the table of findings."""
    sentences = {finding.sentence for finding in audit.findings}
    return [line for line in audit.verdict if line not in sentences]


def format_bias(row: ValueRow) -> str:
    """The bias of a value; "0" if it is within rounding."""
    scale = max(abs(row.exact), abs(row.expected))
    return "0" if abs(row.bias) <= RELATIVE_ROUNDING * scale else format_or_dash(row.bias)


def format_or_dash(value: float) -> str:
    """A number to four significant digits; a dash for NaN."""
    return UNKNOWN if isnan(value) else format_value(value, 4)


def format_zone(row: ZoneRow) -> str:
    """A range of log ratios in words: "below −3", "1 to 2", "above 4"."""
    low, high = format_or_dash(row.low), format_or_dash(row.high)
    if row.low == -inf:
        return f"below {high}" if row.high != inf else "everywhere"
    return f"above {low}" if row.high == inf else f"{low} to {high}"


def accuracy_chart(name: str, audit: Audit) -> Chart | None:
    """The relative error as the divergence goes to zero, and the error of an accurate formula in the same dtype."""
    rows = [row for row in audit.accuracy if row.kl > 0]
    if not rows:
        return None
    worst = max(rows, key=lambda row: -1.0 if isnan(row.relative_error) else row.relative_error)
    return Chart(
        name=name,
        title="Relative error against float64 as the divergence goes to zero",
        panels=(partial(_draw_errors, rows=rows),),
        height=3.2,
        description=(
            f"The largest error is {format_or_dash(worst.relative_error)} of the value, with {worst.dtype} inputs at "
            f"{format_or_dash(worst.kl)} nats; the dotted lines are an accurate formula on the same inputs."
        ),
        header=("Inputs", "KL, nats", "Relative error", "Accurate formula"),
        rows=tuple(
            (
                row.dtype,
                *(format_or_dash(value) for value in (row.kl, row.relative_error, row.unavoidable_error)),
            )
            for row in rows
        ),
    )


def _draw_errors(axes: Any, *, rows: Sequence[AccuracyRow]) -> None:
    """Draw the errors in each dtype, and dotted those of the accurate formula.

    One below ``LEAST_ERROR`` is drawn there, since the axis is logarithmic.
    """
    drawn: list[float] = []
    for dtype, color in zip(dict.fromkeys(row.dtype for row in rows), (ACCENT, INK, MUTED), strict=False):
        in_dtype = [row for row in rows if row.dtype == dtype]
        kls = [row.kl for row in in_dtype]
        errors = [max(row.relative_error, LEAST_ERROR) for row in in_dtype]
        unavoidable = [max(row.unavoidable_error, LEAST_ERROR) for row in in_dtype]
        line(axes, kls, errors, color=color, label=dtype, marker="o")
        line(axes, kls, unavoidable, color=color, linestyle=":")
        drawn += [*errors, *unavoidable]
    log_axis(axes, "x", [row.kl for row in rows])
    log_axis(axes, "y", drawn)
    name_axes(axes, "KL of the pair, nats", "relative error")


class CurvePoint(NamedTuple):
    """A point of a function's value or gradient curve."""

    log_ratio: float
    measured: float
    correct: float


def curve_charts(number: int, audit: Audit) -> list[Chart]:
    """The charts of a function's value and, if it was differentiated, its gradient; none without a scan.

    Args:
        number: of the function on the page.
        audit: of the function.
    """
    if not audit.curve:
        return []
    charts = [_curve_chart(f"value-{number}", "value", audit)]
    if not all(isnan(row.gradient) for row in audit.curve):
        charts.append(_curve_chart(f"gradient-{number}", "gradient", audit))
    return charts


def _curve_chart(name: str, quantity: str, audit: Audit) -> Chart:
    """The chart of a function's "value" or "gradient" against the log ratio, beside the correct curve."""
    zones = [zone for zone in audit.zones if zone.kind in FLAT_ZONES[quantity]]
    limit = _x_limit(zones)
    is_per_token = any(row.log_ratio < 0 for row in audit.curve)
    points = [
        CurvePoint(row.log_ratio, getattr(row, quantity), getattr(row, f"right_{quantity}"))
        for row in audit.curve
        if abs(row.log_ratio) <= limit
    ]
    correct_label = _correct_label(quantity, audit, is_per_token)
    low = -limit if is_per_token else 0.0
    return Chart(
        name=name,
        title=f"{quantity.capitalize()} against the log ratio",
        panels=(
            partial(
                _draw_curve, points=points, zones=zones, labels=(quantity, correct_label), limits=(low, limit)
            ),
        ),
        description=_description(quantity, zones, correct_label, is_per_token),
        header=("Log ratio, nats" if is_per_token else "Log-odds, nats", quantity.capitalize(), "Correct"),
        rows=tuple(
            (
                format_value(point.log_ratio, 3),
                format_or_dash(point.measured),
                format_or_dash(point.correct),
            )
            for point in points
            if point.log_ratio % 2 == 0
        ),
    )


def _draw_curve(
    axes: Any,
    *,
    points: Sequence[CurvePoint],
    zones: Sequence[ZoneRow],
    labels: tuple[str, str],
    limits: tuple[float, float],
) -> None:
    """Draw the measured and the correct curve, and a band over the log ratios of each zone."""
    low, high = limits
    for zone in zones:
        axes.axvspan(max(low, min(zone.low, high)), min(high, max(zone.high, low)), color=BAND, linewidth=0)
    quantity, correct = labels
    log_ratios = [point.log_ratio for point in points]
    line(axes, log_ratios, [point.measured for point in points], label=quantity, linewidth=2.4)
    line(axes, log_ratios, [point.correct for point in points], color=INK, label=correct, linestyle=":")
    axes.set(xlim=limits, ylim=_y_range(points))
    x = "log p − log q, nats" if low < 0 else "log-odds of two tokens, nats"
    name_axes(axes, x, f"{quantity}, nats" if quantity == "value" else quantity)


def _correct_label(quantity: str, audit: Audit, is_per_token: bool) -> str:
    """The label of the dotted curve."""
    if not is_per_token:
        return audit.right_value_is if quantity == "value" else f"gradient of {audit.right_value_is}"
    if quantity == "gradient":
        return "log p − log q"
    return FORMULAS.get(audit.right_value_is, audit.right_value_is)


def _x_limit(zones: Sequence[ZoneRow]) -> float:
    """The largest log ratio that is drawn: 1.3 times the furthest end of a zone within the limits."""
    edges = [abs(edge) for zone in zones for edge in (zone.low, zone.high) if isfinite(edge)]
    return max([MIN_X_LIMIT, *(1.3 * edge for edge in edges if 1.3 * edge <= MAX_X_LIMIT)])


def _y_range(points: Sequence[CurvePoint]) -> list[float]:
    """The range of the y axis: that of the correct curve, extended by at most half for the measured one.

    Of a correct curve that is steeper than 1.5, only the inner two thirds of the log ratios count.
    """
    limit = max(abs(point.log_ratio) for point in points)
    correct = [point.correct for point in points if isfinite(point.correct)]
    inner_share = 2 / 3 if max(map(abs, correct), default=0.0) > 1.5 * limit else 1.0
    inner = [
        point.correct
        for point in points
        if abs(point.log_ratio) <= limit * inner_share
        and isfinite(point.correct)
        and abs(point.correct) < 1e3
    ]
    measured_values = [point.measured for point in points if isfinite(point.measured)]
    high = max([1.0, *(value for value in inner if value <= 3 * limit)])
    low = min([0.0, *(value for value in inner if value >= -3 * limit)])
    high = max(high, min(max(measured_values, default=high), 1.5 * high))
    low = min(low, max(min(measured_values, default=low), 1.5 * low - 0.5 * high))
    margin = 0.06 * (high - low)
    return [low - margin, high + margin]


def _description(quantity: str, zones: Sequence[ZoneRow], correct_label: str, is_per_token: bool) -> str:
    """The dotted curve and the shaded zones in a sentence."""
    text = f"The dotted line is {correct_label}"
    if quantity == "gradient" and is_per_token:
        text += " (an added constant does not change the expectation)"
    if not zones:
        return f"{text}."
    state = {"value": "does not change", "gradient": "is zero"}[quantity]
    if any(zone.kind == "gradient is NaN" for zone in zones):
        state += " or NaN"
    return f"{text}; shaded, where the {quantity} {state}: {', '.join(map(format_zone, zones))} nats."
