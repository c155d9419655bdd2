"""The charts of a training run: metrics over steps, with bands of two standard errors."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from kleash.reports.drawing import (
    ACCENT,
    INK,
    MUTED,
    Chart,
    band,
    line,
    log_axis,
    name_axes,
    step_axis,
)
from kleash.reports.formatting import UNKNOWN, format_value
from kleash.store import StepRecord
from kleash.store.metrics import number_of

StepT = TypeVar("StepT", StepRecord, int)

MAX_POINTS = 400
"""Points of a curve; longer histories are thinned evenly."""
MAX_ROWS = 40


STYLES = ((ACCENT, "-"), (INK, "--"), (MUTED, "-"), (MUTED, "--"))
"""Colour and dashes, in Matplotlib's notation, of the curves of a chart in their order."""
Curves = Mapping[str, str]
"""Metric -> label of its curve; around the first one is the band of its error."""
CHARTS: tuple[tuple[str, str, str, Curves], ...] = (
    ("reward", "Reward", "reward", {"reward/score": "reward", "reward/adjusted": "reward − beta · KL"}),
    ("held-out", "Held-out reward", "reward", {"eval/reward": "held-out prompts"}),
    (
        "kl-sequence",
        "KL(policy ‖ reference) per sequence",
        "nats per sequence",
        {
            "kl/exact_per_sequence": "exact",
            "kl/k3_per_sequence": "k3",
            "eval/kl_per_sequence": "of held-out prompts",
            "drift/kl_per_sequence": "of the monitor's prompts",
        },
    ),
    (
        "kl-token",
        "KL(policy ‖ reference) per token",
        "nats per token",
        {"kl/exact_per_token": "exact", "kl/k1": "k1", "kl/k3": "k3"},
    ),
    ("beta", "Beta", "beta", {"beta": "beta"}),
    ("entropy", "Entropy", "nats per token", {"policy/entropy": "policy"}),
    ("length", "Length", "tokens per response", {"response/length": "mean"}),
    (
        "updates",
        "Updates",
        "share",
        {
            "policy/clip_share": "tokens clipped",
            "kl/top_percent_share": "share of the KL in the top 1 % of tokens",
        },
    ),
    (
        "texts",
        "Repetition",
        "share",
        {
            "response/repetition": "repeated trigrams within a response",
            "response/distinct": "distinct trigrams over the step",
        },
    ),
    ("pairs", "Pairs", "share", {"pairs/accuracy": "preference accuracy"}),
    ("teacher", "Divergence from the teacher", "per token", {"teacher/divergence": "policy"}),
)
"""Name, title, title of the y axis, and curves of each chart."""


def run_charts(
    history: Sequence[StepRecord], *, target: float | None = None, per: str = "sequence"
) -> dict[str, Chart]:
    """The charts that a run has metrics for, by name.

    Args:
        history: the steps of the run.
        target: the target KL in nats; None if there is none.
        per: unit of the target, "sequence" or "token".
    """
    charts = {}
    for name, title, y, curves in CHARTS:
        present = {
            metric: label
            for metric, label in curves.items()
            if any(metric in record.metrics for record in history)
        }
        if present:
            limit = target if name == f"kl-{per}" else None
            charts[name] = Chart(
                name=name,
                title=title,
                panels=(partial(_draw_metrics, history=history, curves=present, y=y, target=limit),),
                description=describe_change(history, present, y, limit),
                header=("Step", *present.values()),
                rows=tuple(
                    (
                        str(step.step),
                        *(metric_cell(step.metrics, metric) for metric in present),
                    )
                    for step in thin_steps(history, MAX_ROWS)
                ),
            )
    return charts


def _draw_metrics(
    axes: Any, *, history: Sequence[StepRecord], curves: Curves, y: str, target: float | None
) -> None:
    """Draw curves, the first with a band of two standard errors, and the target as a dotted line.

    Beta has a logarithmic axis if its values differ by a factor of 5.
    """
    for place, ((metric, label), (color, dash)) in enumerate(zip(curves.items(), STYLES, strict=False)):
        metric_line(axes, history, metric, has_band=place == 0, color=color, label=label, linestyle=dash)
    if target is not None:
        axes.axhline(target, color=INK, linewidth=1.4, linestyle=":", label="target")
    positive = [value for metric in curves for value in metric_values(history, metric) if value > 0]
    if y == "beta" and positive and max(positive) > 5 * min(positive):
        log_axis(axes, "y", positive)
    step_axis(axes)
    name_axes(axes, "step", y)


def metric_line(
    axes: Any, history: Sequence[StepRecord], metric: str, *, has_band: bool, **style: Any
) -> None:
    """Draw a metric over the steps that have it, with a band of two standard errors where they are known.

    Args:
        axes: of Matplotlib.
        history: the steps of a run.
        metric: its name.
        has_band: whether there is a band.
        style: of the line.
    """
    steps = thin_steps([record for record in history if metric in record.metrics], MAX_POINTS)
    x, numbers = [record.step for record in steps], [number_of(record.metrics, metric) for record in steps]
    if has_band and any(number.has_error for number in numbers):
        ends = ([number.value + sign * 2 * number.standard_error for number in numbers] for sign in (-1, 1))
        band(axes, x, *ends)
    line(axes, x, [number.value for number in numbers], **style)


def describe_change(history: Sequence[StepRecord], curves: Curves, y: str, target: float | None) -> str:
    """The first and the last value of the first curve, with their steps, and the target, in a sentence."""
    metric, label = next(iter(curves.items()))
    steps = [step for step in history if not math.isnan(step.metrics.get(metric, math.nan))]
    if not steps:
        return f"No step has a number for {label}."
    target_note = "" if target is None else f"; the target is {format_value(target)}"
    unit = f" {y}" if y.startswith("nats") else ""
    first, last = (
        f"{format_value(at.metrics[metric])}{unit} in step {at.step}" for at in (steps[0], steps[-1])
    )
    infinite = sum(map(math.isinf, metric_values(history, metric)))
    gap_note = f"; infinite in {infinite} steps, which are not drawn" if infinite else ""
    return f"From {first} to {last}{target_note}{gap_note}."


def metric_values(history: Sequence[StepRecord], metric: str) -> list[float]:
    """A metric's value in each step that has it."""
    return [record.metrics[metric] for record in history if metric in record.metrics]


def metric_cell(metrics: Mapping[str, float], metric: str) -> str:
    """A metric of a step in a table: "–" where the step has none, which is no NaN."""
    return format_value(metrics[metric]) if metric in metrics else UNKNOWN


def thin_steps(history: Sequence[StepT], limit: int) -> list[StepT]:
    """At most ``limit`` evenly chosen steps, or their numbers, the first and the last among them."""
    if len(history) <= limit:
        return list(history)
    return [history[round(index * (len(history) - 1) / (limit - 1))] for index in range(limit)]
