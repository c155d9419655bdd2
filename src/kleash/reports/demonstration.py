"""The page of the demonstration: its runs side by side, and their reward against their KL."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kleash.reports.figures import (
    ACCENT,
    INK,
    MUTED,
    Chart,
    escape,
    figure,
    finite_or_none,
    log_axis,
    step_axis,
    whiskers,
)
from kleash.reports.formatting import as_sentence, format_percent, format_value, format_with_interval
from kleash.reports.page import write_page
from kleash.reports.training import format_metric
from kleash.reports.training_charts import MAX_ROWS, metric_values, thin_steps, trace
from kleash.store import Sample, SampleRecord, StepRecord, TrainingFolder, read_samples
from kleash.store.demonstration import BestOf, Demonstration, LeashSetting

STYLES = ((INK, "dash"), (ACCENT, "solid"), (MUTED, "solid"))
"""Colour and dash of each run's curves, in the order of the runs."""
MAX_SAMPLES = 3
MIN_KL = 0.02
"""KL in nats below which a point is left out of the chart, whose axis is logarithmic."""
AXES = ("kl/exact_per_sequence", "reward/score")
"""Metrics on the x and the y axis of the frontier."""


@dataclass(frozen=True, kw_only=True)
class DemonstrationRun:
    """A run of the demonstration: its leash, its steps and the style of its curve."""

    leash: LeashSetting
    history: tuple[StepRecord, ...]
    samples: tuple[SampleRecord, ...]
    color: str
    dash: str

    @property
    def last(self) -> dict[str, float]:
        """The metrics of the last step."""
        return dict(self.history[-1].metrics)

    def number(self, name: str, error: str | None = None) -> str:
        """A metric of the last step with its standard error, as text."""
        return format_metric(self.last, name, error)

    def share(self, name: str) -> str:
        """A metric of the last step in percent."""
        return format_percent(self.last.get(name, math.nan))

    @property
    def alerts(self) -> list[tuple[int, str]]:
        """The alerts of the hacking monitor."""
        return [(record.step, alert.sentence) for record in self.history for alert in record.alerts]

    @property
    def last_samples(self) -> list[Sample]:
        """Responses of the last step with samples."""
        last = max((record.step for record in self.samples), default=0)
        return [record.sample for record in self.samples if record.step == last][:MAX_SAMPLES]


def write_demonstration(folder: Path) -> Path:
    """Write ``report.html`` of a demonstration's folder from its files.

    Args:
        folder: with ``demonstration.json`` and the folders of its runs.

    Returns:
        The page's path.

    Raises:
        RunFolderError: if a file is missing or damaged, or the page cannot be written.
        MissingExtraError: if Jinja2 or Plotly is not installed.
    """
    demonstration = Demonstration.read(folder)
    runs = [
        DemonstrationRun(
            leash=leash,
            history=TrainingFolder(folder / leash.name).history(),
            samples=read_samples(folder / leash.name),
            color=STYLES[index % len(STYLES)][0],
            dash=STYLES[index % len(STYLES)][1],
        )
        for index, leash in enumerate(demonstration.runs)
    ]
    runs = [run for run in runs if run.history]
    context = {
        "demonstration": demonstration,
        "runs": runs,
        "samples": demonstration.samples[:MAX_SAMPLES],
        "frontier": frontier_chart(runs, demonstration.best_of),
        "charts": [
            runs_metric_chart(
                "reward", "Reward", runs, "reward/score", "reward per response", logarithmic=True
            ),
            runs_metric_chart(
                "kl",
                "KL(policy ‖ reference)",
                runs,
                "kl/exact_per_sequence",
                "nats per response",
                logarithmic=True,
            ),
            runs_metric_chart(
                "repetition",
                "Repetition",
                runs,
                "response/repetition",
                "share of repeated trigrams",
                logarithmic=False,
            ),
            runs_metric_chart(
                "entropy", "Entropy", runs, "policy/entropy", "nats per token", logarithmic=False
            ),
        ],
    }
    return write_page(folder / "report.html", "demonstration.html", context, ("plotly", "charts.js"))


# The arguments are the differences between the charts.
def runs_metric_chart(
    name: str, title: str, runs: Sequence[DemonstrationRun], metric: str, y: str, *, logarithmic: bool
) -> Chart:
    """A metric of all runs over steps."""
    positive = [value for run in runs for value in metric_values(run.history, metric) if value > 0]
    data = [
        trace(
            [record.step for record in run.history],
            [
                value if value > 0 or not logarithmic else math.nan
                for value in metric_values(run.history, metric)
            ],
            run.leash.title,
            color=run.color,
            dash=run.dash,
        )
        for run in runs
    ]
    last_values = "; ".join(
        f"{run.leash.title}: {format_value(run.last.get(metric, math.nan))}" for run in runs
    )
    longest = max((run.history for run in runs), key=len, default=())
    return Chart(
        name=f"chart-{name}",
        title=title,
        figure=figure(
            data,
            height=300,
            x="step",
            y=y,
            xaxis=step_axis([record.step for record in longest]),
            yaxis=log_axis(positive) if logarithmic and positive else {"nticks": 6, "rangemode": "tozero"},
            showlegend=True,
        ),
        description=f"In the last step, {last_values}.",
        header=("Step", *(run.leash.title for run in runs)),
        rows=tuple(
            (str(record.step), *(format_value(_metric_at_step(run, record.step, metric)) for run in runs))
            for record in thin_steps(longest, MAX_ROWS)
        ),
    )


def _metric_at_step(run: DemonstrationRun, step: int, metric: str) -> float:
    """A metric of a run at a step; NaN if it is missing."""
    return next(
        (record.metrics.get(metric, math.nan) for record in run.history if record.step == step), math.nan
    )


def frontier_chart(runs: Sequence[DemonstrationRun], best_of: Sequence[BestOf]) -> Chart:
    """Reward against KL on logarithmic axes: a curve for each run, and a point for each n of best-of-n.

    Points with a KL below ``MIN_KL`` are left out.
    """
    data: list[dict[str, Any]] = []
    best_of = [point for point in best_of if point.kl.value >= MIN_KL]
    for run in runs:
        x = [
            value if value >= MIN_KL else math.nan
            for value in metric_values(run.history, "kl/exact_per_sequence")
        ]
        y = metric_values(run.history, "reward/score")
        name = escape(run.leash.title)
        data.append(
            {
                **trace(x, y, run.leash.title, color=run.color, dash=run.dash),
                "x": finite_or_none(x),
                "mode": "lines+markers",
                "marker": {"color": run.color, "size": 4},
                "text": [str(record.step) for record in run.history],
                "hovertemplate": f"step %{{text}}: %{{x:.3~g}} nats, reward %{{y:.3~g}}<extra>{name}</extra>",
            }
        )
    data.append(
        {
            "type": "scatter",
            "mode": "markers+text",
            "name": "best of n",
            "x": finite_or_none([point.kl.value for point in best_of]),
            "y": finite_or_none([point.reward.value for point in best_of]),
            "error_y": {**whiskers([point.reward for point in best_of]), "color": INK, "thickness": 1},
            "error_x": {**whiskers([point.kl for point in best_of]), "color": INK, "thickness": 1},
            "text": [str(point.n) for point in best_of],
            "textposition": "top left",
            "textfont": {"size": 12, "color": INK},
            "marker": {"color": INK, "size": 9, "symbol": "diamond-open", "line": {"width": 2}},
            "hovertemplate": "best of %{text}: %{x:.3~g} nats, reward %{y:.3~g}<extra></extra>",
        }
    )
    finite = [[value for trace in data for value in trace[axis] if value is not None] for axis in "xy"]
    return Chart(
        name="frontier",
        title="Reward against KL",
        figure=figure(
            data,
            height=460,
            x="KL(policy ‖ reference), nats per response",
            y="reward per response",
            xaxis=padded_log_axis([value for value in finite[0] if value > 0]),
            yaxis=padded_log_axis([value for value in finite[1] if value > 0]),
            showlegend=True,
        ),
        description=_frontier_description(runs, best_of),
        header=("Run", "KL, nats per response", "Reward"),
        rows=(
            *((run.leash.title, *(run.number(f"{name}", f"{name}_error") for name in AXES)) for run in runs),
            *(
                (f"best of {point.n}", format_with_interval(point.kl), format_with_interval(point.reward))
                for point in best_of
            ),
        ),
    )


def padded_log_axis(values: Sequence[float]) -> dict[str, Any]:
    """A logarithmic axis for ``values`` with a margin."""
    if not values:
        return {"type": "log"}
    low, high = math.log10(min(values)), math.log10(max(values))
    return {**log_axis(values), "range": [low - 0.1, high + 0.15]}


def _frontier_description(runs: Sequence[DemonstrationRun], best_of: Sequence[BestOf]) -> str:
    """The end of each run, and best-of-n with the largest n, in words."""
    ends = "; ".join(
        f"{run.leash.title} ends at reward {format_value(run.last[AXES[1]])} and {format_value(run.last[AXES[0]])} nats"
        for run in runs
    )
    if not best_of:
        return as_sentence(ends)
    top = best_of[-1]
    return as_sentence(
        f"{ends}. Best-of-{top.n} sampling from the reference reaches reward {format_value(top.reward.value)} at "
        f"{format_value(top.kl.value)} nats."
    )
