"""The page that compares training runs."""

import math
from collections.abc import Sequence
from functools import partial
from itertools import cycle, product
from pathlib import Path
from typing import Any

from kleash.reports.drawing import ACCENT, INK, MUTED, Chart, band, line, name_axes, step_axis
from kleash.reports.formatting import format_value, short_names
from kleash.reports.page import write_page
from kleash.reports.training_charts import MAX_POINTS, MAX_ROWS, metric_values, thin_steps
from kleash.store import StepRecord, read_steps
from kleash.store.metrics import title_of
from kleash.store.summary import summarize
from kleash.store.training_comparison import PAIRED, TrainingComparison

CHARTED = (*PAIRED, "beta", "policy/entropy", "pairs/accuracy", "teacher/divergence")
STROKES = tuple(product(("-", "--", ":"), (ACCENT, MUTED, INK)))
"""Dash and colour of the runs' lines, in their order."""
Run = tuple[str, Sequence[StepRecord]]
"""Name of a run, and its steps."""


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
    charts = [_chart(metric, runs) for metric in CHARTED if metric in has]
    if {*PAIRED[:2]} <= has:
        charts.insert(0, _frontier(runs))
    context = {"comparison": comparison, "summary": summarize(comparison), "charts": charts}
    return write_page(path, "training_comparison.html", context)


def _chart(metric: str, runs: Sequence[Run]) -> Chart:
    """A metric of all runs over their steps."""
    title = title_of(metric)
    ends = [
        f"{name}: {format_value(values[-1])}" for name, steps in runs if (values := _known(steps, metric))
    ]
    columns = [{record.step: record.metrics.get(metric, math.nan) for record in steps} for _, steps in runs]
    longest = max((steps for _, steps in runs), key=len)
    return Chart(
        name=metric.replace("/", "-"),
        title=title[0].upper() + title[1:],
        panels=(partial(_draw, metric=metric, title=title, runs=runs),),
        description=f"In the last step, {'; '.join(ends)}.",
        header=("Step", *(name for name, _ in runs)),
        rows=tuple(
            (str(record.step), *(format_value(column.get(record.step, math.nan)) for column in columns))
            for record in thin_steps(longest, MAX_ROWS)
        ),
    )


def _frontier(runs: Sequence[Run]) -> Chart:
    """Each run's reward against its KL, step by step."""
    reward, kl = PAIRED[:2]
    return Chart(
        name="frontier",
        title="Reward against KL",
        panels=(partial(_draw_frontier, runs=runs),),
        description="Each line is a run, from its first step on: the higher at one KL, the more is gained by one nat.",
        header=("Run", *(title_of(name) for name in (kl, reward))),
        rows=tuple(
            (
                name,
                *(
                    format_value(values[-1])
                    for values in (_known(steps, kl), _known(steps, reward))
                    if values
                ),
            )
            for name, steps in runs
        ),
    )


def _draw_frontier(axes: Any, *, runs: Sequence[Run]) -> None:
    """Draw a line for each run that has both numbers."""
    for (name, steps), (dash, color) in zip(runs, cycle(STROKES), strict=False):
        shown = [record for record in steps if {*PAIRED[:2]} <= record.metrics.keys()]
        reward, kl = (metric_values(thin_steps(shown, MAX_POINTS), metric) for metric in PAIRED[:2])
        line(axes, kl, reward, color=color, label=name, linestyle=dash)
    name_axes(axes, title_of(PAIRED[1]), title_of(PAIRED[0]))


def _known(steps: Sequence[StepRecord], metric: str) -> list[float]:
    """The values of a metric in the steps that have it."""
    return metric_values([record for record in steps if metric in record.metrics], metric)


def _draw(axes: Any, *, metric: str, title: str, runs: Sequence[Run]) -> None:
    """Draw a line for each run, that of the first with a band of two standard errors."""
    for (name, steps), (dash, color) in zip(runs, cycle(STROKES), strict=False):
        shown = thin_steps([record for record in steps if metric in record.metrics], MAX_POINTS)
        x, values = [record.step for record in shown], metric_values(shown, metric)
        if steps is runs[0][1]:
            errors = metric_values(shown, f"{metric}_error")
            ends = ([v + sign * 2 * e for v, e in zip(values, errors, strict=True)] for sign in (-1, 1))
            band(axes, x, *ends)
        line(axes, x, values, color=color, label=name, linestyle=dash)
    step_axis(axes)
    name_axes(axes, "step", title)
