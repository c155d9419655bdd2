"""The report of a training run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kleash.errors import RunFolderError
from kleash.jobs.algorithms import ALGORITHMS
from kleash.jobs.option_groups import in_order_of_help
from kleash.reports.formatting import command_line, format_number, format_value
from kleash.reports.page import write_page
from kleash.reports.training_charts import run_charts, thin_steps
from kleash.store import StepRecord, TrainingFolder, TrainingResult, read_samples
from kleash.store.job_folder import RunHeader
from kleash.store.metrics import METRICS, metric_of, number_of, per_what
from kleash.store.steps import STEPS
from kleash.store.training_folder import MAX_LISTED, last_checkpoint
from kleash.uncertainty.diagnostics import few_clusters

MAX_SAMPLE_STEPS = 6
"""Steps whose responses are shown: the first, the last and evenly chosen ones between."""
MAX_SAMPLES = 3
HELD_OUT = "eval/"
"""Prefix of the metrics of evaluations, which not every step has."""


def write_training_report(folder: Path) -> Path:
    """Write ``report.html`` of a training run's folder from its files, finished or not.

    Args:
        folder: of a run with at least one step.

    Returns:
        The report's path.

    Raises:
        RunFolderError: if there is no step, a file is damaged, or the report cannot be written.
        MissingExtraError: if Jinja2 or Matplotlib is not installed.
    """
    files = TrainingFolder(folder)
    header, history, result = files.header(), files.history(), files.result()
    if not history:
        raise RunFolderError(
            f"{folder / STEPS} is missing or empty, and the run has checkpoints; copy the whole folder again"
            if last_checkpoint(folder) is not None
            else f"{folder} holds a training run without a step; the report needs at least one"
        )
    sampled = read_samples(folder)
    per = str(header.settings.get("target_per", TrainingResult.target_per))
    return write_page(
        folder / "report.html",
        "training.html",
        warnings=run_warnings(history),
        algorithm=str(header.settings.get("algorithm", "")),
        settings=header.settings,
        kleash=header.kleash,
        result=result,
        steps=history[-1].step,
        cards=summary_cards(header, history, result),
        alerts=[(record.step, alert) for record in history for alert in record.alerts],
        events=[(record.step, event) for record in history for event in record.events],
        most=MAX_LISTED,
        charts=run_charts(history, target=target_nats(header), per=per),
        samples=[
            (step, [each.sample for each in sampled if each.step == step][:MAX_SAMPLES])
            for step in thin_steps(sorted({each.step for each in sampled}), MAX_SAMPLE_STEPS)
        ],
        metrics=metrics_table(history, per=per),
        command=None if "trainer" in header.settings else rerun_command(header, history),
    )


def summary_cards(
    header: RunHeader, history: Sequence[StepRecord], result: TrainingResult | None
) -> list[tuple[str, str, str]]:
    """The run's main metrics: title, the last value, and a note with the first one, or its step, and the target."""
    target = target_nats(header)
    target_name = f"kl/exact_per_{header.settings.get('target_per')}"
    rows: list[tuple[str, str, str]] = []
    held_out_first = sorted(METRICS.items(), key=lambda item: not item[0].startswith(HELD_OUT))
    for name, metric in held_out_first:
        steps = [record for record in history if name in record.metrics]
        if not metric.card or not steps:
            continue
        is_current = name in history[-1].metrics and len(steps) > 1
        note = (
            f"{format_value(steps[0].metrics[name])} in step {steps[0].step}"
            if is_current
            else f"after step {steps[-1].step}"
        )
        if target is not None and name == target_name:
            note += f"; target {format_value(target)}"
        rows.append((metric.card, format_metric(steps[-1].metrics, name), note))
    status = "running or interrupted" if result is None else result.stopped or "finished"
    return [*rows, ("Steps", str(history[-1].step), status)]


def run_warnings(history: Sequence[StepRecord]) -> tuple[str, ...]:
    """The warnings about the standard errors of the last step that has any."""
    with_errors = (step.metrics for step in reversed(history) if "response/prompts" in step.metrics)
    return step_warnings(next(with_errors, {}))


def step_warnings(metrics: Mapping[str, float]) -> tuple[str, ...]:
    """The warnings about the standard errors of a step, which are clustered by its prompts."""
    if "response/prompts" not in metrics:
        return ()
    warnings = few_clusters(int(metrics["response/prompts"]))
    return tuple(f"the errors of a step are over its prompts: {warning}" for warning in warnings)


def target_nats(header: RunHeader) -> float | None:
    """The target KL of the run in nats; None if it has none."""
    target = header.settings.get("target_nats")
    return float(target) if isinstance(target, (int, float)) else None


def format_metric(metrics: Mapping[str, float], name: str) -> str:
    """A metric of a step with its standard error, if the step has one, and with its unit if that is nats."""
    number = number_of(metrics, name)
    text = format_number(number)
    value = f"{text.value} ± {text.error}" if number.has_error else format_value(number.value)
    return f"{value} nats" if metric_of(name).unit == "nats" else value


def metrics_table(
    history: Sequence[StepRecord], *, per: str = TrainingResult.target_per
) -> list[tuple[str, str, str, str, str]]:
    """Name, first value, last value, unit and meaning of each metric; a target is ``per`` "sequence" or "token"."""
    first, last = (
        {name: value for record in order for name, value in record.metrics.items()}
        for order in (reversed(history), history)
    )
    return [
        (
            name,
            format_value(first[name]),
            format_value(last[name]),
            metric_of(name).unit + per_what(name, per),
            metric_of(name).meaning,
        )
        for name in sorted(first)
    ]


def rerun_command(header: RunHeader, history: Sequence[StepRecord]) -> str:
    """The command that repeats the run."""
    algorithm = str(header.settings["algorithm"])
    settings: dict[str, Any] = {**header.settings, "steps": history[-1].step}
    return command_line(("kleash", "train", algorithm), in_order_of_help(ALGORITHMS[algorithm]), settings)
