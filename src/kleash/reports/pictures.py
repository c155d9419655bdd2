"""Pictures of a measurement and of a sweep, as PNG or SVG; Matplotlib draws them without a display or global state."""

import math
import textwrap
import warnings
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from kleash.errors import OptionError
from kleash.extras import import_extra
from kleash.jobs.output_options import PICTURES
from kleash.reports.formatting import format_threshold, keep_end, make_visible, short_names
from kleash.reports.measurement_charts import convergence_range, range_label
from kleash.reports.sweep import byte_axis
from kleash.store import Measurement, Number
from kleash.store.atomic import write_atomically
from kleash.store.measurement import Bin
from kleash.store.measurement_summary import headline, headline_name, upper_bound
from kleash.store.number import with_interval
from kleash.store.statistics import KL_DIRECTIONS, kl_directions, label_of
from kleash.store.summary_tables import plain_text
from kleash.store.sweep import Sweep

DOTS_PER_INCH = 200
ACCENT, MUTED, BAND, INK, GRID = "#0969da", "#bc4c00", "#b6d3f5", "#1f2328", "#d8dee4"
MAX_NAME = 44
"""Characters of a name, of which the end is kept."""
LABEL_HEIGHT, LABEL_WIDTH = 0.05, 0.05
"""Share of the range of KLs, and logarithm of a ratio of sizes, within which labels of points lie on each other."""
MAX_CANDIDATES = 40
"""Candidates in the key of a sweep's picture."""
OTHER_FONTS = (
    *(
        "Noto Sans CJK SC",
        "Noto Sans CJK JP",
        "Source Han Sans SC",
        "PingFang SC",
        "Hiragino Sans",
        "Microsoft YaHei",
    ),
    *("Malgun Gothic", "Noto Sans KR", "Noto Sans Devanagari", "Noto Sans Thai", "Noto Emoji"),
)
"""Fonts for characters that Matplotlib's own font lacks."""
STYLE: Mapping[str, Any] = {
    "text.parse_math": False,  # names may contain dollar signs
    "svg.hashsalt": "kleash",
    "font.size": 9.0,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.edgecolor": GRID,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.unicode_minus": True,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "figure.facecolor": "white",
}
Panel = Callable[[Any], None]
"""Draws on the axes that it is given."""


def write_picture(path: Path, result: Measurement | Sweep) -> Path:
    """Write the picture of a result: of a measurement four panels, of a sweep the KL against the size.

    The same files give the same bytes with the same version of Matplotlib.

    Args:
        path: a file that ends in ".png" or ".svg", in a folder that exists.
        result: what is drawn.

    Returns:
        ``path``.

    Raises:
        OptionError: if the name ends otherwise, or nothing in the result can be drawn.
        RunFolderError: if the file cannot be written.
        MissingExtraError: if Matplotlib is not installed.
    """
    if path.suffix.lower() not in PICTURES:
        raise OptionError(f"a picture is a file that ends in {' or '.join(PICTURES)}; it is {path}")
    matplotlib = import_extra("matplotlib", "pictures")
    import_extra("matplotlib.figure", "pictures")
    content = BytesIO()
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # it is drawn as a box
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({**STYLE, "font.family": _font_families()})
        figure = _measurement_figure(result) if isinstance(result, Measurement) else _sweep_figure(result)
        kind = path.suffix.lower().removeprefix(".")
        metadata = {"Date": None} if kind == "svg" else {"Software": None}
        figure.savefig(content, format=kind, dpi=DOTS_PER_INCH, metadata=metadata)
    write_atomically(path, content.getvalue())
    return path


def _font_families() -> list[str]:
    """The fonts of texts, the first that has a character first: Matplotlib's own, and others that are installed."""
    manager = import_extra("matplotlib.font_manager", "pictures").fontManager
    installed = {font.name for font in manager.ttflist}
    return ["DejaVu Sans", *(name for name in OTHER_FONTS if name in installed)]


def _measurement_figure(measurement: Measurement) -> Any:
    """The figure of a measurement, with a panel for everything that it has numbers for."""
    panels = _measurement_panels(measurement)
    columns = min(2, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = _new_figure(max(6.4, 4.6 * columns), 2.7 * rows + 0.8)
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes, panel in zip(grid.flat, panels, strict=False):
        panel(axes)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_axis_off()
    models = [_name(measurement.models[role].path) for role in ("policy", "reference")]
    counts = measurement.counts
    _title(
        figure,
        f"{label_of(headline_name(measurement))} per token: {with_interval(headline(measurement))}",
        (
            f"{models[0]} against {models[1]}",
            f"{counts.tokens:,} tokens, {counts.clusters:,} independent cluster{'' if counts.clusters == 1 else 's'}",
        ),
    )
    return figure


def _measurement_panels(measurement: Measurement) -> list[Panel]:
    """The panels that the measurement has numbers for."""
    panels: list[Panel] = [lambda axes: _means_panel(axes, measurement)]
    if any(name in measurement.quantiles for name in KL_DIRECTIONS):
        panels.append(lambda axes: _quantiles_panel(axes, measurement))
    if measurement.by_position:
        panels.append(lambda axes: _bins_panel(axes, measurement.by_position))
    if len(measurement.convergence) > 1:
        panels.append(lambda axes: _convergence_panel(axes, measurement))
    return panels


def _means_panel(axes: Any, measurement: Measurement) -> None:
    """The KL in both directions, or its bounds, and the one-sample estimators."""
    names = [name for name in kl_directions(measurement.headline) if name in measurement.per_token]
    if upper_bound(measurement) is not None:
        names = [f"{measurement.headline}_lower", f"{measurement.headline}_upper", *names]
    rows = [(label_of(name), measurement.per_token[name]) for name in names]
    rows += [(f"estimator {name}", record.number) for name, record in measurement.estimators.items()]
    for row, (_, number) in enumerate(rows):
        _dot(axes, number, row, color=ACCENT if row < len(names) else MUTED, horizontal=True)
    _rows(axes, [label for label, _ in rows])
    axes.set_title("Mean per token, nats, with 95 % intervals")


def _quantiles_panel(axes: Any, measurement: Measurement) -> None:
    """Quantiles of the KL of a token, in both directions."""
    names = [name for name in kl_directions(measurement.headline) if name in measurement.quantiles]
    levels = list(measurement.quantiles[names[0]])
    values = [measurement.quantiles[name][level].value for name in names for level in levels]
    for index, name in enumerate(names):
        color = (ACCENT, MUTED)[index]
        for row, level in enumerate(levels):
            number = measurement.quantiles[name][level]
            offset = 0.22 * (index - (len(names) - 1) / 2)
            label = label_of(name) if row == 0 else None
            _dot(axes, number, row + offset, color=color, horizontal=True, label=label)
    _rows(axes, [level if level == "max" else f"{level} %" for level in levels])
    if all(value > 0 for value in values if math.isfinite(value)):
        _log_axis(axes.xaxis, axes.set_xscale, values)
    if len(names) > 1:
        axes.legend(loc="lower left", handletextpad=0.3)
    axes.set_title("Share of tokens at or below a KL, nats")


def _bins_panel(axes: Any, bins: Sequence[Bin]) -> None:
    """The mean KL by position."""
    for column, part in enumerate(bins):
        _dot(axes, part.kl, column, color=ACCENT)
    labels = [range_label(part, is_integer=True) for part in bins]
    axes.set_xticks(range(len(bins)), labels, rotation=45 if len(bins) > 8 else 0, fontsize=8)
    axes.grid(False, axis="x")
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.set_title("KL by position of the token, nats per token")


def _convergence_panel(axes: Any, measurement: Measurement) -> None:
    """The running mean with its interval."""
    points = measurement.convergence
    tokens = [point.tokens for point in points]
    low, high = ([point.ci95[end] for point in points] for end in (0, 1))
    axes.fill_between(tokens, low, high, color=BAND, linewidth=0)
    axes.plot(tokens, [point.mean for point in points], color=ACCENT, linewidth=1.5)
    limits = convergence_range(points).get("range")
    if limits is not None:
        axes.set_ylim(*limits)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(False, axis="x")
    axes.set_title("Mean after so many tokens, nats per token")


def _sweep_figure(sweep: Sweep) -> Any:
    """KL against size on disk with numbered candidates and their key; without sizes, the key with intervals alone."""
    ranking = sweep.ranking[:MAX_CANDIDATES]
    if not ranking:
        raise OptionError("no candidate of the sweep could be measured, so there is no picture of it")
    has_sizes = any(candidate.bytes_on_disk is not None for candidate in ranking)
    height = max(3.4, 0.24 * len(ranking) + 1.6)
    figure = _new_figure(10.4 if has_sizes else 6.4, height)
    axes = figure.subplots(1, 2 if has_sizes else 1, squeeze=False, width_ratios=[5, 4][: 1 + has_sizes])[0]
    for place, candidate in enumerate(ranking):
        color = ACCENT if candidate.is_on_pareto_front or not has_sizes else MUTED
        _dot(axes[-1], candidate.numbers[sweep.rank_by], place, color=color, horizontal=True)
    names = short_names([plain_text(candidate.name) for candidate in ranking], 30)
    keys = [
        _key(place, name, candidate.letters)
        for place, (name, candidate) in enumerate(zip(names, ranking, strict=True), 1)
    ]
    _rows(axes[-1], keys)
    values = [candidate.numbers[sweep.rank_by].value for candidate in ranking]
    _log_axis(axes[-1].xaxis, axes[-1].set_xscale, values)
    for place in [place for place, value in enumerate(values) if value == 0] if any(values) else []:
        axes[-1].annotate("0", (0.01, place), xycoords=("axes fraction", "data"), va="center", fontsize=8)
    axes[-1].set_title("95 % intervals, nats per token")
    if has_sizes:
        _size_panel(axes[0], sweep)
    left_out = len(sweep.ranking) - len(ranking)
    _title(
        figure,
        f"{label_of(sweep.rank_by)} of {len(sweep.ranking)} candidate{'' if len(sweep.ranking) == 1 else 's'}",
        (
            f"reference: {_name(sweep.reference)}",
            f"{sweep.tokens:,} tokens, {sweep.clusters:,} independent clusters; those that share a letter are tied",
            *([f"the {left_out} farthest are not shown"] if left_out else []),
        ),
    )
    return figure


def _size_panel(axes: Any, sweep: Sweep) -> None:
    """KL against size on disk, with the Pareto front as a line and the places in the ranking as labels."""
    points = [
        (place, candidate, float(candidate.bytes_on_disk))
        for place, candidate in enumerate(sweep.ranking[:MAX_CANDIDATES], start=1)
        if candidate.bytes_on_disk is not None
    ]
    for _, candidate, size in points:
        number = candidate.numbers[sweep.rank_by]
        _dot(axes, number, size, color=ACCENT if candidate.is_on_pareto_front else MUTED)
    for places, size, value in _near_each_other(
        [(place, size, candidate.numbers[sweep.rank_by].value) for place, candidate, size in points]
    ):
        label = ", ".join(map(str, places))
        axes.annotate(label, (size, value), xytext=(5, 4), textcoords="offset points", fontsize=8)
    front = sorted(
        (size, candidate.numbers[sweep.rank_by].value)
        for _, candidate, size in points
        if candidate.is_on_pareto_front
    )
    if front:
        axes.plot(*zip(*front, strict=True), color=GRID, drawstyle="steps-post", zorder=0)
    values = [candidate.numbers[sweep.rank_by].value for _, candidate, _ in points]
    _size_axis(axes, [size for *_, size in points])
    _log_axis(axes.yaxis, axes.set_yscale, values)
    axes.set_xlabel("size on disk; the line is the Pareto front" if len(front) > 1 else "size on disk")
    axes.set_title("nats per token")


def _size_axis(axes: Any, sizes: Sequence[float]) -> None:
    """Make the axis of sizes logarithmic, with the ticks that it has on the page of a sweep."""
    ticks = byte_axis(sizes)
    if "tickvals" in ticks:
        ticker = import_extra("matplotlib.ticker", "pictures")
        axes.set_xscale("log", nonpositive="clip")
        axes.set_xticks(ticks["tickvals"], ticks["ticktext"])
        axes.xaxis.set_minor_locator(ticker.NullLocator())


def _near_each_other(
    points: Sequence[tuple[int, float, float]],
) -> list[tuple[list[int], float, float]]:
    """Points (place, size, KL) whose labels would lie on each other, as one: places, and the first's size and KL.

    A KL of 0 is left out where others have a place on the logarithmic axis.
    """
    finite = [point for point in points if math.isfinite(point[2])]
    shown = [point for point in finite if point[2] > 0] or finite
    heights = {place: math.log(value) if value > 0 else 0.0 for place, _, value in shown}
    height = LABEL_HEIGHT * (max(heights.values(), default=0) - min(heights.values(), default=0))
    groups: list[tuple[list[int], float, float]] = []
    for place, size, value in shown:
        for places, other_size, _ in groups:
            is_beside = abs(heights[place] - heights[places[0]]) <= height
            if is_beside and abs(math.log(max(size, 1) / max(other_size, 1))) < LABEL_WIDTH:
                places.append(place)
                break
        else:
            groups.append(([place], size, value))
    return groups


def _new_figure(width: float, height: float) -> Any:
    """An empty figure, in inches."""
    return import_extra("matplotlib.figure", "pictures").Figure(figsize=(width, height), layout="constrained")


def _title(figure: Any, title: str, subtitles: Sequence[str]) -> None:
    """A title in bold and lines below it, at the left, broken at the figure's width."""
    width, height = figure.get_size_inches()
    title_lines = textwrap.wrap(title, int(9.8 * width))
    lines = [line for subtitle in subtitles for line in textwrap.wrap(subtitle, int(13 * width))]
    title_height, lines_height = 0.2 * len(title_lines) + 0.03, 0.16 * len(lines)
    figure.get_layout_engine().set(rect=(0, 0, 1, 1 - (title_height + lines_height + 0.18) / height))
    figure.text(0.012, 1 - 0.07 / height, "\n".join(title_lines), fontsize=11, fontweight="bold", va="top")
    figure.text(0.012, 1 - (0.1 + title_height) / height, "\n".join(lines), fontsize=8.5, va="top")


def _name(path: str) -> str:
    """A name as it can be drawn: its end, with invisible characters shown."""
    return keep_end(plain_text(path), MAX_NAME)


def _key(place: int, name: str, letters: str) -> str:
    """The label of a candidate: its place, its short name, and its letters."""
    return f"{place}  {name}  {make_visible(letters) if letters else ''}".rstrip()


def _dot(
    axes: Any, number: Number, at: float, *, color: str, horizontal: bool = False, label: str | None = None
) -> None:
    """A value as a dot with its 95 % interval; nothing if it is not finite, no whisker where there is no end."""
    if not math.isfinite(number.value):
        return
    low, high = (abs(end - number.value) if math.isfinite(end) else 0.0 for end in number.ci95)
    position = (number.value, at) if horizontal else (at, number.value)
    error = {"xerr" if horizontal else "yerr": [[low], [high]]}
    axes.errorbar(*position, **error, fmt="o", markersize=4.5, color=color, elinewidth=1.4, label=label)


def _rows(axes: Any, labels: Sequence[str]) -> None:
    """Name the rows of an axes, from top to bottom."""
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.grid(False, axis="y")


def _log_axis(
    axis: Any,
    set_scale: Callable[..., None],
    values: Sequence[float],
) -> None:
    """Make an axis logarithmic, with ticks between the powers of ten where it is short."""
    ticker = import_extra("matplotlib.ticker", "pictures")
    positive = [value for value in values if math.isfinite(value) and value > 0]
    if not positive:
        return
    set_scale("log", nonpositive="clip")
    is_short = max(positive) / min(positive) < 100
    axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5) if is_short else (1,), numticks=8))
    axis.set_major_formatter(lambda value, _: format_threshold(value))
    axis.set_minor_formatter(ticker.NullFormatter())
