"""The page that compares runs."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from kleash.records import COMPARED, PERPLEXITIES, Comparison, Number, RunDifference
from kleash.records.statistics import label_of
from kleash.reports.figures import INK, Chart, dots, escape, figure, rows_of
from kleash.reports.formatting import UNKNOWN, count, ending, with_interval
from kleash.reports.measurement_charts import APART, DIRECTIONS
from kleash.reports.page import write_page


def write_comparison(path: Path, comparison: Comparison) -> Path:
    """Write the page that compares runs: each run's means, and its paired differences from the first.

    Args:
        path: the HTML file, in a folder that exists.
        comparison: what was found.

    Returns:
        ``path``.

    Raises:
        RunFolderError: if the page cannot be written.
        MissingExtraError: if Jinja2 or Plotly is not installed.
    """
    names = (*COMPARED, *PERPLEXITIES)
    columns = [name for name in names if any(name in found.differences for found in comparison.differences)]
    context = {
        "comparison": comparison,
        "columns": columns,
        "charts": {"runs": runs_chart(comparison), "differences": differences_chart(comparison)},
        "verdict": lambda found: verdict(found, prompts_of(comparison)),
        "prompts": prompts_of(comparison),
    }
    return write_page(path, "comparison.html", context, ("plotly", "charts.js"))


def runs_chart(comparison: Comparison) -> Chart:
    """Each run's own KL in both directions."""
    rows = [(ending(run.name), run.numbers) for run in comparison.runs]
    return _rows_chart("runs", "Each run by itself", rows, zero=False)


def differences_chart(comparison: Comparison) -> Chart:
    """The paired differences from the first run."""
    rows = [(ending(found.name), found.differences) for found in comparison.differences]
    first = ending(comparison.runs[0].name)
    return _rows_chart(
        "differences",
        f"Difference from {first}, on the {prompts_of(comparison)} that both have",
        rows,
        zero=True,
    )


def _rows_chart(
    name: str, title: str, rows: Sequence[tuple[str, Mapping[str, Number]]], *, zero: bool
) -> Chart:
    """One row for each run, in it one dot with its interval for each direction of the KL."""
    column = DIRECTIONS[0][0]
    described = [f"{text}: {with_interval(found[column])} nats" for text, found in rows if column in found]
    return Chart(
        name=name,
        title=title,
        figure=_rows_figure(rows, zero=zero),
        described="; ".join(described) + ".",
        header=("Run", *(label_of(column) for column, _ in DIRECTIONS)),
        rows=tuple(
            (
                text,
                *(with_interval(found[column]) if column in found else UNKNOWN for column, _ in DIRECTIONS),
            )
            for text, found in rows
        ),
    )


def _rows_figure(rows: Sequence[tuple[str, Mapping[str, Number]]], *, zero: bool) -> dict[str, object]:
    data = []
    for place, (column, color) in enumerate(DIRECTIONS):
        there = [at for at, (_, found) in enumerate(rows) if column in found]
        data.append(
            dots(
                [rows[at][1][column] for at in there],
                [at + APART * (place - 0.5) for at in there],
                name=label_of(column),
                color=color,
                across=True,
                text=[escape(rows[at][0]) for at in there],
            )
        )
    line = {"type": "line", "x0": 0, "x1": 0, "y0": 0, "y1": 1, "yref": "paper", "layer": "below"}
    return figure(
        data,
        height=150 + 56 * len(rows),
        x="difference of the KL, nats per token" if zero else "KL, nats per token",
        y="run",
        xaxis={"rangemode": "tozero"},
        yaxis=rows_of([text for text, _ in rows]),
        showlegend=True,
        shapes=[{**line, "line": {"color": INK, "width": 1}}] if zero else [],
    )


def prompts_of(comparison: Comparison) -> str:
    """What was paired: "prompts", or "documents" of text."""
    return "documents" if comparison.runs[0].source == "text" else "prompts"


def verdict(found: RunDifference, prompts: str = "prompts") -> str:
    """In words, whether the run has drifted further than the first, and on how many ``prompts`` that rests."""
    on = f"{count(found.shared_prompts)} shared {prompts if found.shared_prompts != 1 else prompts[:-1]}"
    number = found.differences.get("kl_policy_reference")
    if number is None:
        return f"not compared, on {on}"
    return f"{direction(number)}: {with_interval(number)} nats per token, on {on}"


def direction(number: Number) -> str:
    """Which way a difference points, if its interval says so."""
    low, high = number.ci95
    if low > 0:
        return "further from its reference"
    if high < 0:
        return "closer to its reference"
    if math.isnan(low) or math.isnan(high):
        return "not known which way"
    return "no difference that stands out"
