"""The report of a training run."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from kleash.errors import RunFolderError
from kleash.records import (
    DistillJob,
    DPOJob,
    GRPOJob,
    Number,
    PPOJob,
    RLOOJob,
    RunHeader,
    Sample,
    SampleRecord,
    StepRecord,
    TrainingFolder,
    TrainingResult,
    TrainJob,
    metric_of,
    read_samples,
)
from kleash.records.checksums import UNCHECKED
from kleash.records.steps import STEPS
from kleash.reports.formatting import command_of, plain, typeset
from kleash.reports.page import write_page
from kleash.reports.training_charts import charts_of
from kleash.uncertainty import few_clusters

SHOWN_STEPS = 6
"""Steps whose responses are shown: the first, the last, and some between."""
SHOWN_SAMPLES = 3
SHOWN_EVENTS = 50
JOBS: Mapping[str, type[TrainJob]] = {
    kind.algorithm: kind for kind in (PPOJob, GRPOJob, RLOOJob, DPOJob, DistillJob)
}


def write_training_report(folder: Path) -> Path:
    """Make ``report.html`` of a training run's folder from its files, finished or not.

    Args:
        folder: of a run that has taken at least one step.

    Returns:
        The report's path.

    Raises:
        RunFolderError: if there is no step, a file is damaged, or the report cannot be written.
        MissingExtraError: if Jinja2 or Plotly is not installed.
    """
    files = TrainingFolder(folder)
    header, history, result = files.header(), files.history(), files.result()
    if not history:
        gone = (folder / "checkpoints").exists()
        raise RunFolderError(
            f"{folder / STEPS} is missing or empty, and the run has checkpoints; copy the whole folder again"
            if gone
            else f"{folder} holds a training run that has not taken a step yet; there is nothing to show"
        )
    events = [(record.step, event) for record in history for event in record.events]
    context = {
        "warnings": (*(() if header.checksums else (UNCHECKED,)), *run_warnings(history)),
        "algorithm": str(header.settings.get("algorithm", "")),
        "settings": header.settings,
        "kleash": header.kleash,
        "result": result,
        "steps": history[-1].step,
        "cards": cards(header, history, result),
        "alerts": [(record.step, alert) for record in history for alert in record.alerts],
        "events": events[-SHOWN_EVENTS:],
        "events_left_out": max(0, len(events) - SHOWN_EVENTS),
        "charts": charts_of(
            history, target=target_of(header), per=str(header.settings.get("target_per", "sequence"))
        ),
        "samples": samples_of(read_samples(folder)),
        "metrics": metrics_table(history),
        "command": command(header, history),
    }
    return write_page(folder / "report.html", "training.html", context, ("plotly", "charts.js"))


def cards(
    header: RunHeader, history: Sequence[StepRecord], result: TrainingResult | None
) -> list[tuple[str, str, str]]:
    """The run's headlines: what it is, its value at the end, and what to compare that with."""
    last = history[-1].metrics
    found: list[tuple[str, str, str]] = []
    for title, name, error in (
        ("Reward", "reward/score", "reward/score_error"),
        ("KL per sequence", "kl/exact_per_sequence", "kl/exact_per_sequence_error"),
        ("KL per token", "kl/exact_per_token", "kl/exact_per_token_error"),
        ("Beta", "beta", None),
        ("Entropy per token", "policy/entropy", None),
        ("Pairs told apart", "pairs/accuracy", None),
        ("Divergence from the teacher", "teacher/divergence", None),
    ):
        if name not in last:
            continue
        unit = " nats" if metric_of(name).unit == "nats" else ""
        first = history[0].metrics.get(name, math.nan)
        target = target_of(header)
        aims = target is not None and name == f"kl/exact_per_{header.settings.get('target_per')}"
        aim = f"; target {plain(target)}" if aims and target is not None else ""
        found.append((title, number_of(last, name, error) + unit, f"{plain(first)} in the first step{aim}"))
    steps = f"{history[-1].step}"
    end = "still running, or interrupted" if result is None else result.stopped or "finished"
    return [*found, ("Steps", steps, end)]


def run_warnings(history: Sequence[StepRecord]) -> tuple[str, ...]:
    """Warnings about the errors of the last step that has any."""
    measured = [step.metrics for step in history if "response/prompts" in step.metrics]
    return warnings_about_step(measured[-1]) if measured else ()


def warnings_about_step(metrics: Mapping[str, float]) -> tuple[str, ...]:
    """Warnings about the errors of a step: that they are over few prompts."""
    if "response/prompts" not in metrics:
        return ()
    few = few_clusters(int(metrics["response/prompts"]))
    return tuple(f"the errors of a step are over its prompts: {warning}" for warning in few)


def target_of(header: RunHeader) -> float | None:
    """The KL that was asked for, in nats."""
    target = header.settings.get("target_nats")
    return float(target) if isinstance(target, (int, float)) else None


def number_of(metrics: Mapping[str, float], name: str, error: str | None) -> str:
    """A metric with its standard error, where it has one."""
    value = metrics.get(name, math.nan)
    uncertain = metrics.get(error, math.nan) if error else math.nan
    if not (math.isfinite(uncertain) and uncertain > 0 and math.isfinite(value)):
        return plain(value)
    number = Number.with_error(value, uncertain)
    return f"{typeset(number.rounded)} ± {typeset(number.format(uncertain))}"


def samples_of(records: Sequence[SampleRecord]) -> list[tuple[int, list[Sample]]]:
    """Responses of a few steps, from the first to the last."""
    steps = sorted({record.step for record in records})
    if len(steps) > SHOWN_STEPS:
        steps = [steps[round(at * (len(steps) - 1) / (SHOWN_STEPS - 1))] for at in range(SHOWN_STEPS)]
    return [
        (step, [record.sample for record in records if record.step == step][:SHOWN_SAMPLES]) for step in steps
    ]


def metrics_table(history: Sequence[StepRecord]) -> list[tuple[str, str, str, str, str]]:
    """Each metric: name, first, last, unit and meaning."""
    names = dict.fromkeys(name for record in history for name in record.metrics)
    first, last = history[0].metrics, history[-1].metrics
    return [
        (
            name,
            plain(first.get(name, math.nan)),
            plain(last.get(name, math.nan)),
            metric_of(name).unit,
            metric_of(name).meaning,
        )
        for name in sorted(names)
    ]


def command(header: RunHeader, history: Sequence[StepRecord]) -> str:
    """The command that makes the run again."""
    algorithm = str(header.settings.get("algorithm", "ppo"))
    settings: dict[str, Any] = {**header.settings, "steps": history[-1].step}
    return command_of(("kleash", "train", algorithm), fields(JOBS.get(algorithm, PPOJob)), settings)
