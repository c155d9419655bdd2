"""Charts as Plotly JSON in one style: intervals are whiskers or bands, and axes name their units.

A colour is a reference to a CSS variable, "var(--accent)". The page's script replaces it by the theme's colour, and
draws the chart again when the reader's device changes between light and dark.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kleash.store import Number

ACCENT, ACCENT_BAND, MUTED, INK, GRID = (
    f"var(--{name})" for name in ("accent", "accent-band", "chart-muted", "chart-ink", "chart-grid")
)
MIN_TICKS = 2
"""Powers of ten below which a logarithmic axis also has ticks between them."""
MAX_STEP_TICKS = 6
"""Ticks of an axis of training steps."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A figure with its description and its numbers as a table."""

    name: str
    """Its anchor in the page."""
    title: str
    figure: dict[str, Any]
    description: str
    """What it shows, in a sentence: its caption and its label for screen readers."""
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    """The plotted numbers, as a table."""


def finite_or_none(values: Sequence[float]) -> list[float | None]:
    """``values`` with None, a gap in the chart, in place of infinite and NaN ones."""
    return [value if math.isfinite(value) else None for value in values]


def figure(
    data: list[dict[str, Any]], *, height: int, x: str = "", y: str = "", **layout: Any
) -> dict[str, Any]:
    """A Plotly figure in the common style.

    Args:
        data: traces.
        height: in pixels.
        x: title of the x axis, with its unit.
        y: title of the y axis, with its unit.
        layout: further fields of Plotly's layout; ``xaxis`` and ``yaxis`` are merged into the style's.
    """
    axes = {"xaxis": axis(x, **layout.pop("xaxis", {})), "yaxis": axis(y, **layout.pop("yaxis", {}))}
    return {
        "data": data,
        "layout": {
            "height": height,
            "margin": {"l": 8, "r": 12, "t": 8, "b": 8},
            "font": {"family": "system-ui, sans-serif", "size": 13, "color": INK},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "separators": ".\u202f",
            "dragmode": False,
            "hoverlabel": {"bgcolor": "var(--raised)", "bordercolor": "var(--line)", "font": {"color": INK}},
            "legend": {"orientation": "h", "x": 0, "y": 1.02, "xanchor": "left", "yanchor": "bottom"},
            "showlegend": False,
            **axes,
            **layout,
        },
    }


def axis(title: str, **options: Any) -> dict[str, Any]:
    """A Plotly axis in the common style, without zoom; the title of a logarithmic axis says so."""
    if options.get("type") == "log" and "logarithmic" not in title:
        title = f"{title}, logarithmic scale" if title else "logarithmic scale"
    return {
        "title": {"text": title, "standoff": 10, "font": {"size": 13}},
        "automargin": True,
        "fixedrange": True,
        "gridcolor": GRID,
        "linecolor": GRID,
        "zeroline": False,
        "ticks": "",
        "exponentformat": "power",
        **options,
    }


def step_axis(steps: Sequence[int]) -> dict[str, Any]:
    """Options of an axis of training steps: few ticks, and only at whole steps."""
    is_short = max(steps, default=0) - min(steps, default=0) < MAX_STEP_TICKS
    return {"showgrid": False, **({"dtick": 1} if is_short else {"nticks": MAX_STEP_TICKS})}


def log_axis(values: Sequence[float]) -> dict[str, Any]:
    """A logarithmic axis for ``values``, with ticks at powers of ten, and at 2 and 5 times these on a short axis."""
    positive = [value for value in values if math.isfinite(value) and value > 0]
    if not positive:
        return {"type": "log"}
    low, high = math.log10(min(positive)), math.log10(max(positive))
    powers = range(math.floor(low), math.ceil(high) + 1)
    digits = (1, 2, 5) if sum(low <= power <= high for power in powers) < MIN_TICKS else (1,)
    ticks = [digit * 10.0**power for power in powers for digit in digits]
    texts = [f"{tick:g}" if 1e-4 < tick < 1e5 else _scientific(tick) for tick in ticks]
    return {"type": "log", "tickvals": ticks, "ticktext": texts}


def _scientific(value: float) -> str:
    digit, _, power = f"{value:e}".partition("e")
    power_of_ten = f"10<sup>{int(power)}</sup>"
    return power_of_ten if float(digit) == 1 else f"{float(digit):g}·{power_of_ten}"


def whiskers(numbers: Sequence[Number], scale: float = 1.0) -> dict[str, Any]:
    """Plotly error bars of the 95 % intervals."""
    up = [scale * (number.ci95[1] - number.value) for number in numbers]
    down = [scale * (number.value - number.ci95[0]) for number in numbers]
    return {
        "type": "data",
        "symmetric": False,
        "array": finite_or_none(up),
        "arrayminus": finite_or_none(down),
        "width": 0,
    }


def dots(
    numbers: Sequence[Number],
    at: Sequence[Any],
    *,
    name: str,
    color: str = ACCENT,
    horizontal: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """A trace of values as dots with 95 % whiskers.

    Args:
        numbers: the values.
        at: their positions on the other axis.
        name: in the legend.
        color: of dots and whiskers.
        horizontal: whether the values lie along x, with one row for each of ``at``.
        options: further fields of Plotly's scatter trace.
    """
    along, other = ("x", "y") if horizontal else ("y", "x")
    position = "text" if horizontal else other
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        along: finite_or_none([number.value for number in numbers]),
        other: list(at),
        f"error_{along}": {**whiskers(numbers), "color": color, "thickness": 2},
        "marker": {"color": color, "size": 9},
        "hovertemplate": f"%{{{position}}}: %{{{along}:.4~g}}<extra>{escape(name)}</extra>",
        **options,
    }


def row_axis(names: Sequence[str]) -> dict[str, Any]:
    """A y axis with one named row per entry, from top to bottom."""
    return {
        "tickvals": list(range(len(names))),
        "ticktext": [escape(name) for name in names],
        "range": [len(names) - 0.5, -0.5],
        "showgrid": False,
    }


def escape(text: str) -> str:
    """``text`` with Plotly's tags, entities and %{…} placeholders escaped."""
    for character, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("%{", "%&#123;")):
        text = text.replace(character, entity)
    return text


def band(x: Sequence[int], low: Sequence[float], high: Sequence[float], name: str) -> list[dict[str, Any]]:
    """Two traces that fill the area between ``low`` and ``high``."""
    edge = {"type": "scatter", "mode": "lines", "x": list(x), "line": {"width": 0}, "hoverinfo": "skip"}
    return [
        {**edge, "y": finite_or_none(low), "showlegend": False},
        {**edge, "y": finite_or_none(high), "fill": "tonexty", "fillcolor": ACCENT_BAND, "name": name},
    ]


def bars(
    at: Sequence[Any], values: Sequence[float], *, name: str, color: str, **options: Any
) -> dict[str, Any]:
    """A trace of shares as bars."""
    return {
        "type": "bar",
        "name": name,
        "x": list(at),
        "y": finite_or_none(values),
        "marker": {"color": color},
        "hovertemplate": f"%{{x}}: %{{y:.1%}}<extra>{name}</extra>",
        **options,
    }
