"""Charts as plain Plotly JSON in one style: intervals are whiskers or bands, axes carry units.

A colour is the name of a CSS variable, "var(--accent)"; the page puts the theme's colour in its place
and draws anew when the reader's device changes from light to dark.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kleash.records import Number

ACCENT, ACCENT_BAND, MUTED, INK, GRID = (
    f"var(--{name})" for name in ("accent", "accent-band", "chart-muted", "chart-ink", "chart-grid")
)


FEWEST_TICKS = 2
"""Powers of ten below which a logarithmic axis has ticks between them, too."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A figure with everything that says the same in words."""

    name: str
    """Its anchor in the page."""
    title: str
    figure: dict[str, Any]
    described: str
    """What a reader sees in it, in a sentence."""
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    """The numbers that are drawn, as a table."""


def finite(values: Sequence[float]) -> list[float | None]:
    """``values`` with nothing (a gap) for what cannot be drawn."""
    return [value if math.isfinite(value) else None for value in values]


def figure(
    data: list[dict[str, Any]], *, height: int, x: str = "", y: str = "", **layout: Any
) -> dict[str, Any]:
    """A figure in the common style.

    Args:
        data: traces.
        height: pixels.
        x: title of the x axis, with its unit.
        y: title of the y axis, with its unit.
        layout: more of Plotly's layout; what it says of ``xaxis`` and ``yaxis`` is added to the style's.
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


def axis(title: str, **more: Any) -> dict[str, Any]:
    """An axis in the common style: a quiet grid, no zooming by accident; a logarithmic one says that it is."""
    if more.get("type") == "log" and "logarithmic" not in title:
        title = f"{title}, logarithmic scale" if title else "logarithmic scale"
    return {
        "title": {"text": title, "standoff": 10, "font": {"size": 13}},
        "automargin": True,
        "fixedrange": True,
        "gridcolor": GRID,
        "linecolor": GRID,
        "zeroline": False,
        "ticks": "",
        **more,
    }


def decades(values: Sequence[float]) -> dict[str, Any]:
    """A logarithmic axis with ticks at the powers of ten, and at 2 and 5 times these where that would be one tick."""
    known = [value for value in values if math.isfinite(value) and value > 0]
    if not known:
        return {"type": "log"}
    low, high = math.log10(min(known)), math.log10(max(known))
    powers = range(math.floor(low), math.ceil(high) + 1)
    digits = (1, 2, 5) if sum(low <= power <= high for power in powers) < FEWEST_TICKS else (1,)
    ticks = [digit * 10.0**power for power in powers for digit in digits]
    texts = [f"{tick:g}" if 1e-4 < tick < 1e5 else _scientific(tick) for tick in ticks]
    return {"type": "log", "tickvals": ticks, "ticktext": texts}


def _scientific(value: float) -> str:
    digit, _, power = f"{value:e}".partition("e")
    raised = f"10<sup>{int(power)}</sup>"
    return raised if float(digit) == 1 else f"{float(digit):g}·{raised}"


def whiskers(numbers: Sequence[Number], scale: float = 1.0) -> dict[str, Any]:
    """Error bars from the 95 % intervals."""
    up = [scale * (number.ci95[1] - number.value) for number in numbers]
    down = [scale * (number.value - number.ci95[0]) for number in numbers]
    return {"type": "data", "symmetric": False, "array": finite(up), "arrayminus": finite(down), "width": 0}


def dots(
    numbers: Sequence[Number],
    at: Sequence[Any],
    *,
    name: str,
    color: str = ACCENT,
    across: bool = False,
    **more: Any,
) -> dict[str, Any]:
    """Values as dots with whiskers; ``across`` lays them along x, one row for each of ``at``."""
    along, other = ("x", "y") if across else ("y", "x")
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        along: finite([number.value for number in numbers]),
        other: list(at),
        f"error_{along}": {**whiskers(numbers), "color": color, "thickness": 2},
        "marker": {"color": color, "size": 9},
        "hovertemplate": f"%{{{'text' if across else other}}}: %{{{along}:.4~g}}<extra>{escape(name)}</extra>",
        **more,
    }


def rows_of(names: Sequence[str]) -> dict[str, Any]:
    """A y axis of named rows, from the top down."""
    return {
        "tickvals": list(range(len(names))),
        "ticktext": [escape(name) for name in names],
        "range": [len(names) - 0.5, -0.5],
        "showgrid": False,
    }


def escape(text: str) -> str:
    """``text`` for a figure, where Plotly reads tags, entities and %{…}."""
    for character, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("%{", "%&#123;")):
        text = text.replace(character, entity)
    return text


def band(x: Sequence[int], low: Sequence[float], high: Sequence[float], name: str) -> list[dict[str, Any]]:
    """The area between ``low`` and ``high``."""
    edge = {"type": "scatter", "mode": "lines", "x": list(x), "line": {"width": 0}, "hoverinfo": "skip"}
    return [
        {**edge, "y": finite(low), "showlegend": False},
        {**edge, "y": finite(high), "fill": "tonexty", "fillcolor": ACCENT_BAND, "name": name},
    ]


def bars(at: Sequence[Any], values: Sequence[float], *, name: str, color: str, **more: Any) -> dict[str, Any]:
    """Shares as bars."""
    return {
        "type": "bar",
        "name": name,
        "x": list(at),
        "y": finite(values),
        "marker": {"color": color},
        "hovertemplate": f"%{{x}}: %{{y:.1%}}<extra>{name}</extra>",
        **more,
    }
