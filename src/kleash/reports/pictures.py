"""Pictures of a measurement and of a sweep, as PNG or SVG: their charts beside each other, below a title."""

import textwrap
from io import BytesIO
from pathlib import Path
from typing import Any

from kleash.errors import OptionError
from kleash.extras import import_extra
from kleash.reports.drawing import WIDTH, draw_panel, matplotlib_style
from kleash.reports.formatting import keep_end
from kleash.reports.measurement import picture_charts
from kleash.reports.sweep import sweep_charts
from kleash.store import Measurement
from kleash.store.atomic import write_atomically
from kleash.store.summary import Name, plain_text, summarize
from kleash.store.sweep import Sweep

DOTS_PER_INCH = 150
MAX_NAME = 44
"""Characters of a name, of which the end is kept."""
FACTS = ("policy", "reference", "sample")
"""Facts of the summary that stand above a picture, below the headline."""


def write_picture(path: Path, result: Measurement | Sweep) -> Path:
    """Write the picture of a result: of a measurement up to four charts, of a sweep its ranking and KL against size.

    The bytes depend on the result and on the version of Matplotlib alone.

    Args:
        path: a file that ends in ".png" or ".svg", in a folder that exists.
        result: what is drawn.

    Returns:
        ``path``.

    Raises:
        OptionError: if nothing in the result can be drawn.
        RunFolderError: if the file cannot be written.
        MissingExtraError: if Matplotlib is not installed.
    """
    content = BytesIO()
    kind = path.suffix.lower().removeprefix(".")
    with matplotlib_style("kleash") as make_figure:
        picture_figure(make_figure, result).savefig(
            content,
            format=kind,
            dpi=DOTS_PER_INCH,
            metadata={"Date": None} if kind == "svg" else {"Software": None},
        )
    write_atomically(path, content.getvalue())
    return path


def plot(result: object) -> Any:
    """The Matplotlib figure of a result's picture.

    Raises:
        OptionError: if it is neither a measurement nor a sweep, or nothing in it can be drawn.
        MissingExtraError: if Matplotlib is not installed.
    """
    if not isinstance(result, Measurement | Sweep):
        raise OptionError(
            f"there is no picture of a {type(result).__name__}; its page has charts where it has any"
        )
    import_extra("matplotlib.pyplot", "models")  # which tells a notebook how figures are shown
    with matplotlib_style("kleash") as make_figure:
        figure = picture_figure(make_figure, result)
        figure.draw_without_rendering()  # makes the ticks in this style
    return figure


def picture_figure(make_figure: Any, result: Measurement | Sweep) -> Any:
    """The Matplotlib figure of a picture: the first panel of each chart, two beside each other, below the title."""
    if isinstance(result, Sweep) and not result.ranking:
        raise OptionError("no candidate of the sweep could be measured, so there is no picture of it")
    charts = picture_charts(result) if isinstance(result, Measurement) else sweep_charts(result)[:2]
    columns = min(2, len(charts))
    chart_rows = [charts[at : at + columns] for at in range(0, len(charts), columns)]
    heights = [max(0.3 + max(2.7, chart.height / len(chart.panels)) for chart in row) for row in chart_rows]
    width = max(7.0, WIDTH * columns)
    figure = make_figure(figsize=(width, sum(heights) + 0.8), layout="constrained")
    grid = figure.subplots(len(chart_rows), columns, squeeze=False, height_ratios=heights)
    for axes, chart in zip(grid.flat, charts, strict=False):
        axes.set_title(chart.title)
        draw_panel(axes, chart.panels[0])
    for axes in list(grid.flat)[len(charts) :]:
        axes.set_axis_off()
    summary = summarize(result)
    facts = (
        f"{label}: {keep_end(plain_text(text), MAX_NAME) if isinstance(text, Name) else text}"
        for label, text in summary.facts
        if label in FACTS
    )
    texts = (summary.headline, *facts)
    title_lines = [line for text in texts for line in textwrap.wrap(text, int(7.5 * width))]
    figure.suptitle("\n".join(title_lines), x=0.012, ha="left", fontsize=9.5)
    return figure
