"""The page of the demonstration: the runs side by side, and what their rewards cost."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kleash.records import (
    BestOf,
    Demonstration,
    Leash,
    Sample,
    SampleRecord,
    StepRecord,
    TrainingFolder,
    read_samples,
)
from kleash.reports.figures import ACCENT, INK, MUTED, Chart, decades, escape, figure, finite, whiskers
from kleash.reports.formatting import percent, plain, sentence, with_interval
from kleash.reports.page import write_page
from kleash.reports.training import number_of
from kleash.reports.training_charts import MOST_ROWS, thinned, trace, values_of

STYLES = ((INK, "dash"), (ACCENT, "solid"), (MUTED, "solid"))


LAST_SAMPLES = 3

NEAREST = 0.02
"""Nats below which a point is left out of the picture: its place on a logarithmic axis says nothing."""

AXES = ("kl/exact_per_sequence", "reward/score")


@dataclass(frozen=True, kw_only=True)
class Ran:
    """A run as the page shows it."""

    leash: Leash
    history: tuple[StepRecord, ...]
    samples: tuple[SampleRecord, ...]
    color: str
    dash: str

    @property
    def last(self) -> dict[str, float]:
        """The numbers of its last step."""
        return dict(self.history[-1].metrics)

    def number(self, name: str, error: str | None = None) -> str:
        """One of them, as text."""
        return number_of(self.last, name, error)

    def share(self, name: str) -> str:
        """One of them, as a percentage."""
        return percent(self.last.get(name, math.nan))

    @property
    def alerts(self) -> list[tuple[int, str]]:
        """The alerts of the hacking monitor."""
        return [(record.step, alert.sentence) for record in self.history for alert in record.alerts]

    @property
    def last_samples(self) -> list[Sample]:
        """What it says in the end."""
        last = max((record.step for record in self.samples), default=0)
        return [record.sample for record in self.samples if record.step == last][:LAST_SAMPLES]


def write_demonstration(folder: Path) -> Path:
    """Make ``report.html`` of a demonstration's folder from its files.

    Args:
        folder: with ``demonstration.json`` and the folders of its runs.

    Returns:
        The page's path.

    Raises:
        RunFolderError: if a file is missing or damaged, or the page cannot be written.
        MissingExtraError: if Jinja2 or Plotly is not installed.
    """
    found = Demonstration.read(folder)
    runs = [
        Ran(
            leash=leash,
            history=TrainingFolder(folder / leash.name).history(),
            samples=read_samples(folder / leash.name),
            color=STYLES[at % len(STYLES)][0],
            dash=STYLES[at % len(STYLES)][1],
        )
        for at, leash in enumerate(found.runs)
    ]
    runs = [run for run in runs if run.history]
    context = {
        "found": found,
        "runs": runs,
        "samples": found.samples[:LAST_SAMPLES],
        "frontier": frontier(runs, found.best_of),
        "charts": [
            beside("reward", "Reward", runs, "reward/score", "reward per response", logarithmic=True),
            beside(
                "kl",
                "KL(policy ‖ reference)",
                runs,
                "kl/exact_per_sequence",
                "nats per response",
                logarithmic=True,
            ),
            beside(
                "repetition",
                "Repetition",
                runs,
                "response/repetition",
                "three-word runs repeated",
                logarithmic=False,
            ),
            beside("entropy", "Entropy", runs, "policy/entropy", "nats per token", logarithmic=False),
        ],
    }
    return write_page(folder / "report.html", "demonstration.html", context, ("plotly", "charts.js"))


# More arguments than elsewhere: what a chart shows, by name.
def beside(name: str, title: str, runs: Sequence[Ran], metric: str, y: str, *, logarithmic: bool) -> Chart:
    """A metric of all runs over steps."""
    above_0 = [value for run in runs for value in values_of(run.history, metric) if value > 0]
    data = [
        trace(
            [record.step for record in run.history],
            [value if value > 0 or not logarithmic else math.nan for value in values_of(run.history, metric)],
            run.leash.title,
            color=run.color,
            dash=run.dash,
        )
        for run in runs
    ]
    ends = "; ".join(f"{run.leash.title}: {plain(run.last.get(metric, math.nan))}" for run in runs)
    longest = max((run.history for run in runs), key=len, default=())
    return Chart(
        name=f"chart-{name}",
        title=title,
        figure=figure(
            data,
            height=300,
            x="step",
            y=y,
            xaxis={"showgrid": False, "nticks": 6},
            yaxis=decades(above_0) if logarithmic and above_0 else {"nticks": 6, "rangemode": "tozero"},
            showlegend=True,
        ),
        described=f"In the last step, {ends}.",
        header=("Step", *(run.leash.title for run in runs)),
        rows=tuple(
            (str(record.step), *(plain(_at(run, record.step, metric)) for run in runs))
            for record in thinned(longest, MOST_ROWS)
        ),
    )


def _at(run: Ran, step: int, metric: str) -> float:
    return next(
        (record.metrics.get(metric, math.nan) for record in run.history if record.step == step), math.nan
    )


def frontier(runs: Sequence[Ran], best_of: Sequence[BestOf]) -> Chart:
    """Reward against KL: each run's way through the picture, and best-of-n beside it.

    On logarithmic axes, where what is nearer than ``NEAREST`` has no place.
    """
    data: list[dict[str, Any]] = []
    best_of = [point for point in best_of if point.kl.value >= NEAREST]
    for run in runs:
        x = [
            value if value >= NEAREST else math.nan
            for value in values_of(run.history, "kl/exact_per_sequence")
        ]
        y = values_of(run.history, "reward/score")
        name = escape(run.leash.title)
        data.append(
            {
                **trace(x, y, run.leash.title, color=run.color, dash=run.dash),
                "x": finite(x),
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
            "x": finite([point.kl.value for point in best_of]),
            "y": finite([point.reward.value for point in best_of]),
            "error_y": {**whiskers([point.reward for point in best_of]), "color": INK, "thickness": 1},
            "error_x": {**whiskers([point.kl for point in best_of]), "color": INK, "thickness": 1},
            "text": [str(point.n) for point in best_of],
            "textposition": "top left",
            "textfont": {"size": 12, "color": INK},
            "marker": {"color": INK, "size": 9, "symbol": "diamond-open", "line": {"width": 2}},
            "hovertemplate": "best of %{text}: %{x:.3~g} nats, reward %{y:.3~g}<extra></extra>",
        }
    )
    known = [[value for trace in data for value in trace[axis] if value is not None] for axis in "xy"]
    return Chart(
        name="frontier",
        title="What the reward costs",
        figure=figure(
            data,
            height=460,
            x="KL(policy ‖ reference), nats per response",
            y="reward per response",
            xaxis=logarithmic_axis([value for value in known[0] if value > 0]),
            yaxis=logarithmic_axis([value for value in known[1] if value > 0]),
            showlegend=True,
        ),
        described=_frontier_in_words(runs, best_of),
        header=("What", "KL, nats per response", "Reward"),
        rows=(
            *((run.leash.title, *(run.number(f"{name}", f"{name}_error") for name in AXES)) for run in runs),
            *(
                (f"best of {point.n}", with_interval(point.kl), with_interval(point.reward))
                for point in best_of
            ),
        ),
    )


def logarithmic_axis(values: Sequence[float]) -> dict[str, Any]:
    """A logarithmic axis that holds ``values`` with a little room."""
    if not values:
        return {"type": "log"}
    low, high = math.log10(min(values)), math.log10(max(values))
    return {**decades(values), "range": [low - 0.1, high + 0.15]}


def _frontier_in_words(runs: Sequence[Ran], best_of: Sequence[BestOf]) -> str:
    ways = "; ".join(
        f"{run.leash.title} ends at {plain(run.last[AXES[1]])} for {plain(run.last[AXES[0]])} nats"
        for run in runs
    )
    if not best_of:
        return sentence(ways)
    top = best_of[-1]
    return sentence(
        f"{ways}. Keeping the best of {top.n} responses of the reference reaches {plain(top.reward.value)} for "
        f"{plain(top.kl.value)} nats."
    )
