"""The page of the demonstration: the runs side by side, and what their rewards cost."""

import math
from collections.abc import Sequence
from pathlib import Path

from kleash.records import Demonstration, TrainingFolder, read_samples
from kleash.reports.figures import ACCENT, INK, MUTED, Chart, decades, figure
from kleash.reports.frontier import LAST_SAMPLES, Ran, frontier
from kleash.reports.page import write_page
from kleash.reports.training_charts import MOST_ROWS, thinned, trace, values_of
from kleash.reports.words import plain

STYLES = ((INK, "dash"), (ACCENT, "solid"), (MUTED, "solid"))


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
