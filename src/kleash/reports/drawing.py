"""Charts: a record with its numbers as a table, drawn by Matplotlib in one style; in a page as SVG inside the HTML."""

import math
import re
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from threading import RLock
from typing import Any

from kleash.estimate import Estimate
from kleash.extras import import_extra
from kleash.reports.formatting import keep_end, make_visible, typographic

ACCENT, MUTED, BAND, INK, GRID = "#1d5c96", "#9a9da3", "#d7e2eb", "#3f434b", "#e6e6e1"
VARIABLES = {
    ACCENT: "var(--accent)",
    MUTED: "var(--chart-muted)",
    BAND: "var(--accent-band)",
    INK: "var(--chart-ink)",
    GRID: "var(--chart-grid)",
}
"""Colours of charts, which are those of the light theme -> the variables of the page's style."""
SERIES = (ACCENT, MUTED)
"""Colours of the series of one chart, in their order."""
WIDTH = 6.0
"""Of a chart in inches of 72 units: an 11-unit text has 8 pixels on a phone of 360 pixels."""
SERIES_DISTANCE = 0.24
"""Vertical distance between the dots of one row, in rows."""
LEGEND_CHARACTERS, MAX_ROW_NAME = 56, 36
MAX_LINEAR_TICKS, MIN_LOG_TICKS, MAX_LOG_TICKS = 5, 3, 7
TICK_DIGITS = (
    (1.0,),
    (1.0, 2.0, 5.0),
    (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0),
    (1.0, 1.1, 1.2, 1.4, 1.6, 1.8, 2.0, 2.2, 2.5, 2.8, 3.0, 3.5, 4.0, 4.5, 5.0, 5.5, 6.0, 7.0, 8.0, 9.0),
)
"""Leading digits of the ticks of a logarithmic axis: the first that give ``MIN_LOG_TICKS``, or the last."""
LABEL_ROOM = (0.05, 0.07)
"""Shares of a chart's width and height within which labels of points would lie on each other."""
MAX_NAMED_POINTS = 3
"""Points that a shared label names."""
STYLE: Mapping[str, Any] = {
    "text.parse_math": False,  # names may contain dollar signs
    "font.family": ["DejaVu Sans"],
    "font.size": 11.0,
    "axes.titlesize": 11.0,
    "axes.titlelocation": "left",
    "axes.edgecolor": GRID,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 0.0,
    "ytick.major.size": 0.0,
    "axes.grid": True,
    "grid.color": GRID,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 5.5,
    "legend.frameon": False,
    "legend.handlelength": 1.5,
    "legend.columnspacing": 1.2,
}
Panel = Callable[[Any], None]
"""Draws on the Matplotlib axes that it is given."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """What is drawn, with its description and its numbers as a table."""

    name: str
    """Its anchor in the page."""
    title: str
    panels: tuple[Panel, ...]
    """From top to bottom, with one x axis; a picture has the first alone."""
    height: float = 2.7
    """Of the chart in a page, in inches; it is ``WIDTH`` wide."""
    description: str
    """What it shows, in a sentence: its caption and its label for screen readers."""
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    """The plotted numbers, as a table."""


STYLE_LOCK = RLock()
"""Held while Matplotlib has another style: its settings are the process's."""


@contextmanager
def matplotlib_style(salt: str, settings: Mapping[str, Any] | None = None) -> Generator[Any]:
    """Context in which Matplotlib has this style and no other settings; its value is the class of figures.

    One thread at a time is in it.

    Args:
        salt: of the ids in an SVG file; equal data and salts give equal bytes.
        settings: further ``rcParams``.

    Raises:
        MissingExtraError: if Matplotlib is not installed.
    """
    matplotlib = import_extra("matplotlib", "models")
    figures = import_extra("matplotlib.figure", "models")
    with STYLE_LOCK, matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # another font or a box shows it
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({**STYLE, "svg.hashsalt": salt, **(settings or {})})
        yield figures.Figure


def draw_panel(axes: Any, panel: Panel) -> None:
    """Draw a panel on axes whose ticks are few and in kleash's notation, where the panel sets no others."""
    for axis in (axes.xaxis, axes.yaxis):
        axis.get_major_locator().set_params(nbins=MAX_LINEAR_TICKS)
        axis.set_major_formatter(lambda value, _: format_tick(value))
    panel(axes)


def chart_figure(make_figure: Any, chart: Chart) -> Any:
    """The Matplotlib figure of a chart, with all of its panels."""
    figure = make_figure(figsize=(WIDTH, chart.height), layout="constrained")
    grid = figure.subplots(len(chart.panels), 1, squeeze=False, sharex=True)[:, 0]
    for axes, panel in zip(grid, chart.panels, strict=True):
        draw_panel(axes, panel)
        axes.label_outer()
    return figure


def to_svg(chart: Chart) -> str:
    """A chart as an SVG element for a page: its texts as text, its colours those of the page's theme.

    Ids are those that are referred to, and differ between charts of different names.
    """
    content = BytesIO()
    with matplotlib_style(chart.name, {"svg.fonttype": "none"}) as make_figure:
        chart_figure(make_figure, chart).savefig(
            content, format="svg", metadata={"Date": None}, transparent=True
        )
    text = content.getvalue().decode("utf-8")
    body = re.sub(r'<g id="[^"]*"', "<g", text[text.index("<g ") :])
    body = re.sub(r"#[0-9a-f]{6}(?=[^<]*>)", lambda colour: VARIABLES.get(colour[0], colour[0]), body)
    return f'<svg viewBox="0 0 {72 * WIDTH:g} {72 * chart.height:g}">{body.rstrip()}'


def format_tick(value: float) -> str:
    """The number at a tick, without trailing zeros: "0.25", "10⁻⁵"."""
    return re.sub("^1 × ", "", typographic(f"{value:.8g}"))


def name_axes(axes: Any, x: str, y: str) -> None:
    """Name both axes with their units, x below and y above, and several labelled artists in a legend below y.

    The name of a logarithmic axis says so. A title that is there stays above. Without a name of y, the legend is at the
    right, since names of rows may leave the axes little width.
    """
    log = ", log scale"
    axes.set_xlabel(x + log * (axes.get_xscale() == "log"))
    labels = axes.get_legend_handles_labels()[1]
    rows = 0
    if len(labels) > 1:
        fitting = max(1, LEGEND_CHARACTERS // (max(map(len, labels)) + 5))
        rows = math.ceil(len(labels) / fitting)
        side = (
            {"loc": "lower left", "bbox_to_anchor": (-0.02, 0.98)}
            if y
            else {"loc": "lower right", "bbox_to_anchor": (1, 0.98)}
        )
        axes.legend(ncols=math.ceil(len(labels) / rows), **side)
    lines = (axes.get_title("left"), y + log * (axes.get_yscale() == "log"))
    axes.set_title("\n".join(filter(None, lines)), pad=6 + 17 * rows)


def dots(
    axes: Any,
    points: Iterable[tuple[Estimate, float]],
    *,
    color: str = ACCENT,
    label: str | None = None,
    horizontal: bool = False,
) -> None:
    """Draw values as dots with their 95 % intervals as lines.

    What is not finite is left out; an end of an interval that is not is the value.

    Args:
        axes: of Matplotlib.
        points: values, and their positions on the other axis.
        color: of dots and lines.
        label: in the legend.
        horizontal: whether the values lie along x.
    """
    shown = [(number, place) for number, place in points if math.isfinite(number.value)]
    values, places = [number.value for number, _ in shown], [place for _, place in shown]
    low, high = (
        [number.ci95[end] if math.isfinite(number.ci95[end]) else number.value for number, _ in shown]
        for end in (0, 1)
    )
    (axes.hlines if horizontal else axes.vlines)(places, low, high, color=color, linewidth=1.8)
    x, y = (values, places) if horizontal else (places, values)
    axes.plot(x, y, "o", color=color, label=label)


def row_dots(axes: Any, labels: Sequence[str], series: Mapping[str, Sequence[Estimate | None]]) -> None:
    """Draw rows from top to bottom, each with a dot and a 95 % interval of each series; None is left out."""
    for index, (name, numbers) in enumerate(series.items()):
        offset = SERIES_DISTANCE * (index - (len(series) - 1) / 2)
        points = [(number, row + offset) for row, number in enumerate(numbers) if number is not None]
        dots(axes, points, color=SERIES[index], label=name if len(series) > 1 else None, horizontal=True)
    name_rows(axes, labels)


def name_rows(axes: Any, labels: Sequence[str]) -> None:
    """Make y an axis of named rows, from top to bottom; of long names the end is shown."""
    axes.set_yticks(range(len(labels)), [keep_end(label, MAX_ROW_NAME) for label in labels])
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")


def row_height(rows: int) -> float:
    """The height of a chart with so many rows, in inches."""
    return 1.1 + 0.3 * max(2, rows)


def name_columns(axes: Any, labels: Sequence[str]) -> None:
    """Make x an axis of named columns; many names are turned."""
    turn: dict[str, Any] = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"}
    axes.set_xticks(range(len(labels)), labels, **(turn if len(labels) > 8 else {}))
    axes.grid(visible=False, axis="x")


def line(
    axes: Any,
    x: Sequence[float],
    y: Sequence[float],
    *,
    color: str = ACCENT,
    label: str | None = None,
    **options: Any,
) -> None:
    """Draw a curve, with gaps where ``y`` is not finite; a single point as a dot."""
    finite = [value if math.isfinite(value) else math.nan for value in y]
    single = {"marker": "o"} if len(x) == 1 else {}
    axes.plot(x, finite, color=color, label=label and make_visible(label), **{**single, **options})


def band(axes: Any, x: Sequence[float], low: Sequence[float], high: Sequence[float]) -> None:
    """Fill the area between two curves."""
    axes.fill_between(x, low, high, color=BAND, linewidth=0)


def step_axis(axes: Any) -> None:
    """Make x an axis of training steps, with ticks only at whole steps; y begins at 0 or above if no curve is below."""
    axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    axes.grid(visible=False, axis="x")
    if not any(value < 0 for curve in axes.lines for value in curve.get_ydata()):
        axes.set_ylim(bottom=max(0.0, axes.get_ylim()[0]))


def log_axis(
    axes: Any, name: str, values: Iterable[float], tick_text: Callable[[float], str] = format_tick
) -> None:
    """Make an axis logarithmic, with ticks such as 1, 2, 5; it stays linear where no value is positive.

    Args:
        axes: of Matplotlib.
        name: "x" or "y".
        values: all that must be seen.
        tick_text: the text at a tick.
    """
    positive = [value for value in values if math.isfinite(value) and value > 0]
    if not positive:
        return
    margin = max(1.2, (max(positive) / min(positive)) ** 0.06)
    low, high = min(positive) / margin, max(positive) * margin
    axes.set(**{f"{name}scale": "log", f"{name}lim": (low, high)})
    axis, ticks = getattr(axes, f"{name}axis"), log_ticks(low, high)
    axis.set_ticks(ticks, list(map(tick_text, ticks)))
    axis.set_ticks([], minor=True)


def shown_ends(numbers: Iterable[Estimate]) -> list[float]:
    """Values, and the ends of their intervals within a factor of 10 of them: what a logarithmic axis must show."""
    return [
        each
        for number in numbers
        for each in (number.value, *number.ci95)
        if number.value / 10 <= each <= 10 * number.value
    ]


def log_ticks(low: float, high: float) -> list[float]:
    """Round numbers from ``low`` to ``high``, at least ``MIN_LOG_TICKS`` where possible."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks: list[float] = []
    for digits in TICK_DIGITS:
        ticks = [float(f"{digit}e{power}") for power in powers for digit in digits]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) >= MIN_LOG_TICKS:
            break
    return ticks[:: math.ceil(len(ticks) / MAX_LOG_TICKS) or 1]


def label_points(axes: Any, points: Iterable[tuple[str, float, float]]) -> None:
    """Write a label beside each point; points (label, x, y) whose labels would lie on each other share one.

    What a logarithmic axis has no place for is left out.
    """
    axes.autoscale_view()  # which computes the limits that are not set
    groups: list[tuple[list[str], tuple[float, float], tuple[float, float]]] = []
    to_share = axes.transData + axes.transAxes.inverted()
    for label, x, y in points:
        if not math.isfinite(y) or (axes.get_yscale() == "log" and y <= 0):
            continue
        place = to_share.transform((x, y))
        for labels, other, _ in groups:
            if all(abs(a - b) < room for a, b, room in zip(place, other, LABEL_ROOM, strict=True)):
                labels.append(label)
                break
        else:
            groups.append(([label], place, (x, y)))
    for labels, _, point in groups:
        text = ", ".join(labels if len(labels) <= MAX_NAMED_POINTS else [*labels[:MAX_NAMED_POINTS], "…"])
        axes.annotate(text, point, xytext=(5, 4), textcoords="offset points")
