"""The charts of a training run: metrics over steps, with bands of two standard errors."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

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
from kleash.reports.formatting import format_value
from kleash.store import StepRecord

MAX_POINTS = 400
"""Points of a curve; longer histories are thinned evenly."""
MAX_ROWS = 40


@dataclass(frozen=True, kw_only=True)
class MetricLine:
    """The style of a metric's curve."""

    metric: str
    label: str
    color: str = ACCENT
    dash: str = "-"
    """In Matplotlib's notation."""
    error: str | None = None
    """The metric that holds its standard error."""


CHARTS: tuple[tuple[str, str, str, tuple[MetricLine, ...]], ...] = (
    (
        "reward",
        "Reward",
        "reward",
        (
            MetricLine(metric="reward/score", label="reward", error="reward/score_error"),
            MetricLine(metric="reward/adjusted", label="reward − beta · KL", color=INK, dash="--"),
        ),
    ),
    (
        "kl-sequence",
        "KL(policy ‖ reference) per sequence",
        "nats per sequence",
        (MetricLine(metric="kl/exact_per_sequence", label="exact", error="kl/exact_per_sequence_error"),),
    ),
    (
        "kl-token",
        "KL(policy ‖ reference) per token",
        "nats per token",
        (
            MetricLine(metric="kl/exact_per_token", label="exact", error="kl/exact_per_token_error"),
            MetricLine(metric="kl/k1", label="k1", color=INK, dash=":"),
            MetricLine(metric="kl/k3", label="k3", color=MUTED),
        ),
    ),
    ("beta", "Beta", "beta", (MetricLine(metric="beta", label="beta"),)),
    ("entropy", "Entropy", "nats per token", (MetricLine(metric="policy/entropy", label="policy"),)),
    ("length", "Length", "tokens per response", (MetricLine(metric="response/length", label="mean"),)),
    (
        "updates",
        "Updates",
        "share",
        (
            MetricLine(metric="policy/clip_share", label="tokens clipped"),
            MetricLine(
                metric="kl/top_percent_share",
                label="share of the KL in the top 1 % of tokens",
                color=INK,
                dash="--",
            ),
        ),
    ),
    (
        "texts",
        "Repetition",
        "share",
        (
            MetricLine(metric="response/repetition", label="repeated trigrams within a response"),
            MetricLine(
                metric="response/distinct", label="distinct trigrams over the step", color=INK, dash="--"
            ),
        ),
    ),
    ("pairs", "Pairs", "share", (MetricLine(metric="pairs/accuracy", label="preference accuracy"),)),
    (
        "teacher",
        "Divergence from the teacher",
        "nats per token",
        (MetricLine(metric="teacher/divergence", label="policy", error="teacher/divergence_error"),),
    ),
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
    for name, title, y, lines in CHARTS:
        present = [line for line in lines if any(line.metric in record.metrics for record in history)]
        if present:
            charts[name] = _metric_chart(
                name, title, y, history, present, target if name == f"kl-{per}" else None
            )
    return charts


def _metric_chart(
    name: str,
    title: str,
    y: str,
    history: Sequence[StepRecord],
    lines: Sequence[MetricLine],
    target: float | None,
) -> Chart:
    """The chart of metrics over steps, at least one of which a step has."""
    return Chart(
        name=name,
        title=title,
        panels=(partial(_draw_metrics, history=history, lines=lines, y=y, target=target),),
        description=describe_change(history, lines, y, target),
        header=("Step", *(each.label for each in lines)),
        rows=tuple(
            (str(record.step), *(format_value(record.metrics.get(each.metric, math.nan)) for each in lines))
            for record in thin_steps(history, MAX_ROWS)
        ),
    )


def _draw_metrics(
    axes: Any, *, history: Sequence[StepRecord], lines: Sequence[MetricLine], y: str, target: float | None
) -> None:
    """Draw curves with bands of two standard errors, and the target as a dotted line.

    Beta has a logarithmic axis if its values differ by a factor of 5. The axis of values that are not negative begins
    at 0 or above.
    """
    for each in lines:
        steps = thin_steps([record for record in history if each.metric in record.metrics], MAX_POINTS)
        x, values = [record.step for record in steps], metric_values(steps, each.metric)
        if each.error is not None:
            errors = metric_values(steps, each.error)
            ends = ([v + sign * 2 * e for v, e in zip(values, errors, strict=True)] for sign in (-1, 1))
            band(axes, x, *ends)
        line(axes, x, values, color=each.color, label=each.label, linestyle=each.dash)
    if target is not None:
        axes.axhline(target, color=INK, linewidth=1.4, linestyle=":", label="target")
    values = [value for each in lines for value in metric_values(history, each.metric)]
    positive = [value for value in values if value > 0]
    if y == "beta" and positive and max(positive) > 5 * min(positive):
        log_axis(axes, "y", positive)
    elif not any(value < 0 for value in values):
        axes.set_ylim(bottom=max(0.0, axes.get_ylim()[0]))
    step_axis(axes)
    name_axes(axes, "step", y)


def describe_change(
    history: Sequence[StepRecord], lines: Sequence[MetricLine], y: str, target: float | None
) -> str:
    """The first and the last value of the first curve, and the target, in a sentence."""
    values = [value for value in metric_values(history, lines[0].metric) if not math.isnan(value)]
    if not values:
        return f"No step has a number for {lines[0].label}."
    target_note = "" if target is None else f"; the target is {format_value(target)}"
    unit = y.removeprefix("nats ")
    nats = " nats" if y.startswith("nats") else ""
    per = f" {unit}" if nats else ""
    first, last = format_value(values[0]), format_value(values[-1])
    return f"From {first} in the first step to {last}{nats}{per} in the last{target_note}."


def metric_values(history: Sequence[StepRecord], metric: str) -> list[float]:
    """A metric's value in each step; NaN for steps without it."""
    return [record.metrics.get(metric, math.nan) for record in history]


def thin_steps(history: Sequence[StepRecord], limit: int) -> list[StepRecord]:
    """At most ``limit`` evenly chosen steps, the first and the last among them."""
    if len(history) <= limit:
        return list(history)
    return [history[round(index * (len(history) - 1) / (limit - 1))] for index in range(limit)]
