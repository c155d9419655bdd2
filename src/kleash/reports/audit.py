"""The page of an audit: what each function estimates, what it differentiates, and what is wrong with it."""

from collections.abc import Callable, Sequence
from math import isfinite, isnan
from pathlib import Path
from typing import Any

from kleash.records import AccuracyRow, Audit, CurveRow, Finding, ValueRow, ZoneRow
from kleash.records.audit import Severity
from kleash.reports.figures import ACCENT, ACCENT_BAND, INK, MUTED, Chart, escape, figure, finite
from kleash.reports.formatting import plain
from kleash.reports.page import write_page

ROUNDING = 1e-6
"""Relative; a function may compute in float32."""
MANY = 3
"""More functions than this are folded away, each behind its name."""


def write_audits(path: Path, audits: Sequence[Audit], command: str = "") -> Path:
    """Write one page about one or more audited functions.

    Args:
        path: the HTML file, in a folder that exists.
        audits: what was found, in the order of the page.
        command: the command that makes the page again, if there is one.

    Returns:
        ``path``.

    Raises:
        RunFolderError: if the page cannot be written.
        MissingExtraError: if Jinja2 or Plotly is not installed.
    """
    context: dict[str, Any] = {
        "audits": audits,
        "command": command,
        "accuracy": [accuracy_chart(f"accuracy-{at}", audit) for at, audit in enumerate(audits, 1)],
        "pictures": [picture(at, audit) for at, audit in enumerate(audits, 1)],
        "bias": bias,
        "bound": bound,
        "folded": len(audits) > MANY,
        "of": of_severity,
        "summary": summary,
        "zone": zone,
        "kinds": kinds,
        "title": title,
    }
    return write_page(path, "audits.html", context, ("plotly", "charts.js"))


def title(audit: Audit) -> str:
    """What was audited with the arguments bound to it."""
    if not audit.arguments:
        return audit.target
    return f"{audit.target} ({', '.join(f'{name}={value}' for name, value in audit.arguments.items())})"


def kinds(findings: Sequence[Finding]) -> list[str]:
    """Their kinds, each once."""
    return list(dict.fromkeys(finding.kind for finding in findings))


def of_severity(audit: Audit, severity: Severity) -> list[str]:
    """The kinds of findings of this severity, each once."""
    return kinds([finding for finding in audit.findings if finding.severity == severity])


def summary(audit: Audit) -> list[str]:
    """The sentences of the verdict that are not those of findings, which stand in their own table."""
    said = {finding.sentence for finding in audit.findings}
    return [line for line in audit.verdict if line not in said]


def bias(row: ValueRow) -> str:
    """The bias of a value, 0 where it is no more than rounding."""
    scale = max(abs(row.exact), abs(row.expected))
    return "0" if abs(row.bias) <= ROUNDING * scale else bound(row.bias)


def bound(value: float) -> str:
    """A number that may be infinite, missing or tiny."""
    return "–" if value != value else plain(value, 4)


def zone(row: ZoneRow) -> str:
    """A range of log ratios in words."""
    return interval(row)


def accuracy_chart(name: str, audit: Audit) -> Chart | None:
    """The relative error as the divergence shrinks, beside the error that rounding forces."""
    rows = [row for row in audit.accuracy if row.kl > 0]
    if not rows:
        return None
    dtypes = list(dict.fromkeys(row.dtype for row in rows))
    data: list[dict[str, Any]] = []
    for dtype, color in zip(dtypes, (ACCENT, INK, MUTED), strict=False):
        chosen = [row for row in rows if row.dtype == dtype]
        data.append(_error_curve(chosen, [row.relative_error for row in chosen], dtype, color, "solid"))
        forced = f"{dtype}, computed with care"
        data.append(_error_curve(chosen, [row.forced for row in chosen], forced, color, "dot"))
    worst = max(
        rows, key=lambda row: -1.0 if row.relative_error != row.relative_error else row.relative_error
    )
    return Chart(
        name=name,
        title="Relative error against float64 as the divergence goes to zero",
        figure=figure(
            data,
            height=300,
            x="KL of the pair, nats",
            y="relative error",
            xaxis={"type": "log", "exponentformat": "power", "dtick": 1},
            yaxis={"type": "log", "exponentformat": "power"},
            showlegend=True,
        ),
        described=(
            f"The largest error is {bound(worst.relative_error)} of the value, with {worst.dtype} inputs at "
            f"{bound(worst.kl)} nats; the dotted lines are the same formula computed with care on the same inputs."
        ),
        header=("Inputs", "KL, nats", "Relative error", "Computed with care"),
        rows=tuple((row.dtype, bound(row.kl), bound(row.relative_error), bound(row.forced)) for row in rows),
    )


def _error_curve(
    rows: Sequence[AccuracyRow], values: Sequence[float], name: str, color: str, dash: str
) -> dict[str, Any]:
    """A line of errors; an error of nothing lies at the bottom, since a logarithm of 0 cannot be drawn."""
    return {
        "type": "scatter",
        "mode": "lines+markers" if dash == "solid" else "lines",
        "name": escape(name),
        "x": finite([row.kl for row in rows]),
        "y": finite([max(value, 1e-9) for value in values]),
        "line": {"color": color, "dash": dash, "width": 2},
        "marker": {"color": color, "size": 7},
        "hovertemplate": f"%{{x:.1e}} nats: %{{y:.2g}}<extra>{escape(name)}</extra>",
    }


NARROWEST, WIDEST = 8.0, 30.0
"""Nats on either side of the picture: as far as tokens of a policy in training go, and as far as there are numbers."""

STANDS_STILL = {"value": ("value",), "gradient": ("gradient", "gradient is rounded away", "gradient is NaN")}
"""What is drawn -> the zones that are shaded in it."""

FORMULAS = {
    "k1": "k1, log p − log q",
    "abs": "|log p − log q|",
    "k2": "k2, (log p − log q)² / 2",
    "k3": "k3, q / p − 1 + log p − log q",
}


def picture(at: int, audit: Audit) -> list[Chart]:
    """The charts of one function: its value, and where it is differentiated its gradient; none without a scan."""
    if not audit.curve:
        return []
    charts = [_chart(f"value-{at}", "value", audit)]
    if not all(isnan(row.gradient) for row in audit.curve):
        charts.append(_chart(f"gradient-{at}", "gradient", audit))
    return charts


def _chart(name: str, what: str, audit: Audit) -> Chart:
    zones = [zone for zone in audit.zones if zone.of in STANDS_STILL[what]]
    reach = _reach(zones)
    tokens = any(row.log_ratio < 0 for row in audit.curve)
    rows = [row for row in audit.curve if abs(row.log_ratio) <= reach]
    found, right = (_column(what), _column(f"right_{what}"))
    drawn = [(row.log_ratio, found(row), right(row)) for row in rows]
    truth = _truth(what, audit, tokens)
    data = [
        _curve(drawn, 1, f"its {what}", ACCENT, "solid"),
        _curve(drawn, 2, truth, INK, "dot"),
    ]
    low = -reach if tokens else 0.0
    return Chart(
        name=name,
        title=f"Its {what} against the log ratio",
        figure=figure(
            data,
            height=300,
            x="log p − log q, nats" if tokens else "log-odds of two tokens, nats",
            y=f"{what}, nats" if what == "value" else "gradient",
            xaxis={"range": [low, reach], "zeroline": tokens},
            yaxis={"range": _range(drawn)},
            shapes=[_shade(zone, low, reach) for zone in zones],
            showlegend=True,
        ),
        described=_described(what, zones, truth, tokens),
        header=(
            "Log ratio, nats" if tokens else "Log-odds, nats",
            f"Its {what}",
            "Right",
        ),
        rows=tuple((plain(u, 3), _shown(value), _shown(expected)) for u, value, expected in drawn[::4]),
    )


def _column(name: str) -> Callable[[CurveRow], float]:
    return lambda row: getattr(row, name)


def _truth(what: str, audit: Audit, tokens: bool) -> str:
    """What the dotted line is."""
    if not tokens:
        return audit.right_value_is if what == "value" else f"gradient of {audit.right_value_is}"
    return FORMULAS.get(audit.right_value_is, audit.right_value_is) if what == "value" else "log p − log q"


def _reach(zones: Sequence[ZoneRow]) -> float:
    """How far the picture goes: over the nearest ends of what stands still."""
    edges = [abs(edge) for zone in zones for edge in (zone.low, zone.high) if isfinite(edge)]
    shown = [1.3 * edge for edge in edges if 1.3 * edge <= WIDEST]
    return max([NARROWEST, *shown])


def _range(drawn: Sequence[tuple[float, float, float]]) -> list[float]:
    """What the right values span, of steep ones the inner two thirds, and what the function adds without exploding."""
    reach = max(abs(u) for u, _, _ in drawn)
    whole = [right for _, _, right in drawn if isfinite(right)]
    near = 2 / 3 if max(map(abs, whole), default=0.0) > 1.5 * reach else 1.0
    inner = [
        right for u, _, right in drawn if abs(u) <= reach * near and isfinite(right) and abs(right) < 1e3
    ]
    found = [value for _, value, _ in drawn if isfinite(value)]
    high = max([1.0, *(right for right in inner if right <= 3 * reach)])
    low = min([0.0, *(right for right in inner if right >= -3 * reach)])
    high = max(high, min(max(found, default=high), 1.5 * high))
    low = min(low, max(min(found, default=low), 1.5 * low - 0.5 * high))
    margin = 0.06 * (high - low)
    return [low - margin, high + margin]


def _curve(
    drawn: Sequence[tuple[float, float, float]], column: int, name: str, color: str, dash: str
) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": escape(name),
        "x": [row[0] for row in drawn],
        "y": finite([row[column] for row in drawn]),
        "line": {"color": color, "dash": dash, "width": 2.5 if dash == "solid" else 1.5},
        "hovertemplate": f"at %{{x:.1f}} nats: %{{y:.4~g}}<extra>{escape(name)}</extra>",
    }


def _shade(zone: ZoneRow, low: float, high: float) -> dict[str, Any]:
    """A band over the log ratios at which it stands still."""
    return {
        "type": "rect",
        "xref": "x",
        "yref": "paper",
        "x0": max(low, min(zone.low, high)),
        "x1": min(high, max(zone.high, low)),
        "y0": 0,
        "y1": 1,
        "fillcolor": ACCENT_BAND,
        "line": {"width": 0},
        "layer": "below",
    }


def _described(what: str, zones: Sequence[ZoneRow], truth: str, tokens: bool) -> str:
    """What a reader sees, in words."""
    right = f"The dotted line is {truth}"
    if what == "gradient" and tokens:
        right += " (a constant may be added: it changes no expectation)"
    if not zones:
        return f"{right}."
    still = {"value": "does not change", "gradient": "is zero"}[what]
    if any(zone.of == "gradient is NaN" for zone in zones):
        still += " or NaN"
    return f"{right}; shaded, where the {what} {still}: {', '.join(interval(zone) for zone in zones)} nats."


def interval(row: ZoneRow) -> str:
    """A range of log ratios in words."""
    low, high = _shown(row.low), _shown(row.high)
    if row.low == float("-inf"):
        return f"below {high}" if row.high != float("inf") else "everywhere"
    return f"above {low}" if row.high == float("inf") else f"{low} to {high}"


def _shown(value: float) -> str:
    return "–" if isnan(value) else plain(value, 4)
