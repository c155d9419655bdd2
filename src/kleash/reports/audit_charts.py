"""The picture of an audited function: value and gradient against the log ratio, beside the right ones."""

from collections.abc import Callable, Sequence
from math import isfinite, isnan
from typing import Any

from kleash.records import Audit, CurveRow, ZoneRow
from kleash.reports.figures import ACCENT, ACCENT_BAND, INK, Chart, escape, figure, finite
from kleash.reports.words import plain

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
        _line(drawn, 1, f"its {what}", ACCENT, "solid"),
        _line(drawn, 2, truth, INK, "dot"),
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


def _line(
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
