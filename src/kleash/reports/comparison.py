"""The pages that compare measurements, and training runs."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import cycle, product
from pathlib import Path
from typing import Any

from kleash.estimate import Estimate
from kleash.reports.drawing import (
    ACCENT,
    INK,
    MUTED,
    Chart,
    line,
    name_axes,
    row_dots,
    row_height,
    step_axis,
)
from kleash.reports.formatting import UNKNOWN, format_value, format_with_interval, short_names
from kleash.reports.gate_verdicts import describe_gate
from kleash.reports.page import write_page
from kleash.reports.training_charts import (
    MAX_POINTS,
    MAX_ROWS,
    metric_cell,
    metric_line,
    metric_values,
    thin_steps,
)
from kleash.store import Comparison, StepRecord, read_steps
from kleash.store.comparison import KLS, PAIRED, TrainingComparison
from kleash.store.metrics import title_of
from kleash.store.statistics import BOUND_STATISTICS, COMPARED, PERPLEXITIES, kl_directions, label_of
from kleash.store.summary import summarize

CHARTED = (*PAIRED, KLS[1], "beta", "policy/entropy", "pairs/accuracy", "teacher/divergence")
FRONTIER = ("reward/score", "kl/exact_per_sequence")
"""The metrics that are drawn against each other, the second on the horizontal axis."""
STROKES = tuple(product(("-", "--", ":"), (ACCENT, MUTED, INK)))
"""Dash and colour of the runs' lines, in their order."""
Run = tuple[str, Sequence[StepRecord]]
"""Name of a run, and its steps."""


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
    return write_page(
        path,
        "comparison.html",
        comparison=comparison,
        statistics=statistics,
        run_statistics=[
            name
            for name in (*BOUND_STATISTICS, *compared)
            if any(name in run.numbers for run in comparison.runs)
        ],
        charts=comparison_charts(comparison),
        summary=summarize(comparison),
        noun=comparison.paired_noun,
        gates=[(run.name, describe_gate(run.gate)) for run in comparison.runs if run.gate is not None],
    )


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


def write_training_comparison(path: Path, comparison: TrainingComparison) -> Path:
    """Write the page of a comparison of training runs: the differences as tables, and each metric over the steps.

    Args:
        path: the HTML file, in a folder that exists.
        comparison: of two or more runs, whose folders are read.

    Returns:
        ``path``.

    Raises:
        RunFolderError: if a run's steps cannot be read, or the page cannot be written.
        MissingExtraError: if Jinja2 or Matplotlib is not installed.
    """
    names = short_names([run.name for run in comparison.runs])
    runs = [(name, read_steps(Path(run.folder))) for name, run in zip(names, comparison.runs, strict=True)]
    has = {metric for _, steps in runs for record in steps for metric in record.metrics}
    charts = [metric_chart(metric, runs) for metric in CHARTED if metric in has]
    if has.issuperset(FRONTIER):
        charts.insert(0, frontier_chart(runs))
    return write_page(
        path,
        "training_comparison.html",
        comparison=comparison,
        summary=summarize(comparison),
        charts=charts,
    )


def metric_chart(metric: str, runs: Sequence[Run]) -> Chart:
    """A metric of all runs over their steps."""
    ends = [
        f"{name}: {format_value(values[-1])}"
        for name, steps in runs
        if (values := metric_values(steps, metric))
    ]
    columns = [{record.step: record.metrics for record in steps} for _, steps in runs]
    longest = max((steps for _, steps in runs), key=len)
    return Chart(
        name=metric.replace("/", "-"),
        title=title_of(metric),
        panels=(partial(_draw_metric, metric=metric, runs=runs),),
        description=f"The last values: {'; '.join(ends)}.",
        header=("Step", *(name for name, _ in runs)),
        rows=tuple(
            (str(record.step), *(metric_cell(column.get(record.step, {}), metric) for column in columns))
            for record in thin_steps(longest, MAX_ROWS)
        ),
    )


def frontier_chart(runs: Sequence[Run]) -> Chart:
    """Each run's reward against its KL, step by step."""
    reward, kl = FRONTIER
    return Chart(
        name="frontier",
        title="Reward against KL",
        panels=(partial(_draw_frontier, runs=runs),),
        description="Each line is a run, from its first step on: the higher at one KL, the more is gained by one nat.",
        header=("Run", *(title_of(name, has_unit=True) for name in (kl, reward))),
        rows=tuple(
            (name, *(metric_cell(last, each) for each in (kl, reward)))
            for name, last in (
                (name, {metric: value for record in steps for metric, value in record.metrics.items()})
                for name, steps in runs
            )
        ),
    )


def _draw_frontier(axes: Any, *, runs: Sequence[Run]) -> None:
    """Draw a line for each run that has both numbers."""
    for (name, steps), (dash, color) in zip(runs, cycle(STROKES), strict=False):
        shown = [record for record in steps if record.metrics.keys() >= {*FRONTIER}]
        reward, kl = (metric_values(thin_steps(shown, MAX_POINTS), metric) for metric in FRONTIER)
        line(axes, kl, reward, color=color, label=name, linestyle=dash)
    name_axes(axes, title_of(FRONTIER[1], has_unit=True), title_of(FRONTIER[0]))


def _draw_metric(axes: Any, *, metric: str, runs: Sequence[Run]) -> None:
    """Draw a line for each run, that of the first with a band of two standard errors."""
    for (name, steps), (dash, color) in zip(runs, cycle(STROKES), strict=False):
        metric_line(
            axes, steps, metric, has_band=steps is runs[0][1], color=color, label=name, linestyle=dash
        )
    step_axis(axes)
    name_axes(axes, "step", title_of(metric, has_unit=True))
