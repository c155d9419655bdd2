"""The page that compares runs."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kleash.estimate import Estimate
from kleash.reports.drawing import INK, Chart, name_axes, row_dots, row_height
from kleash.reports.formatting import UNKNOWN, format_with_interval, short_names
from kleash.reports.gate_verdicts import describe_gate
from kleash.reports.page import write_page
from kleash.store import Comparison
from kleash.store.statistics import BOUND_STATISTICS, COMPARED, PERPLEXITIES, kl_directions, label_of
from kleash.store.summary import summarize


def write_comparison(path: Path, comparison: Comparison) -> Path:
    """Write the page of a comparison: each run's means, and its paired differences from the first run.

    Args:
        path: the HTML file, in a folder that exists.
        comparison: of two or more runs.

    Returns:
        ``path``.

    Raises:
        RunFolderError: if the page cannot be written.
        MissingExtraError: if Jinja2 or Matplotlib is not installed.
    """
    kls = kl_directions(comparison.headline)
    compared = (*kls, *(name for name in (*COMPARED, *PERPLEXITIES) if name not in kls))
    statistics = [
        name
        for name in compared
        if any(name in difference.differences for difference in comparison.differences)
    ]
    context = {
        "comparison": comparison,
        "statistics": statistics,
        "run_statistics": [
            *(name for name in BOUND_STATISTICS if any(name in run.numbers for run in comparison.runs)),
            *(name for name in compared if any(name in run.numbers for run in comparison.runs)),
        ],
        "charts": comparison_charts(comparison),
        "summary": summarize(comparison),
        "noun": comparison.paired_noun,
        "gates": [(run.name, describe_gate(run.gate)) for run in comparison.runs if run.gate is not None],
    }
    return write_page(path, "comparison.html", context)


def comparison_charts(comparison: Comparison) -> dict[str, Chart]:
    """Each run's KL in both directions, and the paired differences from the first run, by name."""
    names = short_names([run.name for run in comparison.runs])
    runs = list(zip(names, (run.numbers for run in comparison.runs), strict=True))
    differences = list(zip(names[1:], (each.differences for each in comparison.differences), strict=True))
    title = f"Difference from {names[0]}, on shared {comparison.paired_noun}"
    return {
        "runs": _rows_chart("runs", "KL of each run", runs, comparison.headline, is_difference=False),
        "differences": _rows_chart(
            "differences", title, differences, comparison.headline, is_difference=True
        ),
    }


def _rows_chart(
    name: str,
    title: str,
    rows: Sequence[tuple[str, Mapping[str, Estimate]]],
    kl: str,
    *,
    is_difference: bool,
) -> Chart:
    """A chart with one row per run, and a dot with its interval for each direction of the KL, ``kl`` first."""
    sentences = [
        f"{text}: {format_with_interval(numbers[kl])} nats" if kl in numbers else f"{text}: not known exactly"
        for text, numbers in rows
    ]
    return Chart(
        name=name,
        title=title,
        panels=(partial(_draw_rows, rows=rows, kl=kl, is_difference=is_difference),),
        height=row_height(2 * len(rows)),
        description="; ".join(sentences) + ".",
        header=("Run", *map(label_of, kl_directions(kl))),
        rows=tuple(
            (
                text,
                *(
                    format_with_interval(numbers[direction]) if direction in numbers else UNKNOWN
                    for direction in kl_directions(kl)
                ),
            )
            for text, numbers in rows
        ),
    )


def _draw_rows(
    axes: Any, *, rows: Sequence[tuple[str, Mapping[str, Estimate]]], kl: str, is_difference: bool
) -> None:
    """Draw a row for each run; an axis of differences has a line at 0, and one of KLs begins there."""
    series = {label_of(name): [numbers.get(name) for _, numbers in rows] for name in kl_directions(kl)}
    row_dots(axes, [name for name, _ in rows], series)
    if is_difference:
        axes.axvline(0, color=INK, linewidth=1)
    else:
        axes.set_xlim(left=min(0.0, axes.get_xlim()[0]))
    name_axes(axes, "difference of the KL, nats per token" if is_difference else "KL, nats per token", "")
