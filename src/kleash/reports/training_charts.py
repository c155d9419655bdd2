"""The charts of a training run: metrics over steps, with bands of two standard errors."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kleash.reports.figures import (
    ACCENT,
    INK,
    MUTED,
    Chart,
    band,
    escape,
    figure,
    finite_or_none,
    log_axis,
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
    dash: str = "solid"
    error: str | None = None
    """The metric that holds its standard error."""


REWARD = (
    MetricLine(metric="reward/score", label="reward", error="reward/score_error"),
    MetricLine(metric="reward/adjusted", label="reward − beta · KL", color=INK, dash="dash"),
)
PER_SEQUENCE = (
    MetricLine(metric="kl/exact_per_sequence", label="exact", error="kl/exact_per_sequence_error"),
)
PER_TOKEN = (
    MetricLine(metric="kl/exact_per_token", label="exact", error="kl/exact_per_token_error"),
    MetricLine(metric="kl/k1", label="k1", color=INK, dash="dot"),
    MetricLine(metric="kl/k3", label="k3", color=MUTED),
)
UPDATES = (
    MetricLine(metric="policy/clip_share", label="tokens clipped"),
    MetricLine(
        metric="kl/top_percent_share",
        label="share of the KL in the top 1 % of tokens",
        color=INK,
        dash="dash",
    ),
)
TEXTS = (
    MetricLine(metric="response/repetition", label="repeated trigrams within a response"),
    MetricLine(metric="response/distinct", label="distinct trigrams over the step", color=INK, dash="dash"),
)
PAIRS = (MetricLine(metric="pairs/accuracy", label="preference accuracy"),)


def run_charts(
    history: Sequence[StepRecord], *, target: float | None = None, per: str = "sequence"
) -> dict[str, Chart]:
    """The charts that a run has metrics for, by name.

    Args:
        history: the steps of the run.
        target: the target KL in nats; None if there is none.
        per: unit of the target, "sequence" or "token".
    """
    candidates = (
        metric_chart("reward", "Reward", history, REWARD, y="reward"),
        metric_chart(
            "kl-sequence",
            "KL(policy ‖ reference) per sequence",
            history,
            PER_SEQUENCE,
            y="nats per sequence",
            target=target if per == "sequence" else None,
        ),
        metric_chart(
            "kl-token",
            "KL(policy ‖ reference) per token",
            history,
            PER_TOKEN,
            y="nats per token",
            target=target if per == "token" else None,
        ),
        metric_chart(
            "beta", "Beta", history, (MetricLine(metric="beta", label="beta"),), y="beta", logarithmic=True
        ),
        metric_chart(
            "entropy",
            "Entropy",
            history,
            (MetricLine(metric="policy/entropy", label="policy"),),
            y="nats per token",
        ),
        metric_chart(
            "length",
            "Length",
            history,
            (MetricLine(metric="response/length", label="mean"),),
            y="tokens per response",
        ),
        metric_chart("updates", "Updates", history, UPDATES, y="share"),
        metric_chart("texts", "Repetition", history, TEXTS, y="share"),
        metric_chart("pairs", "Pairs", history, PAIRS, y="share"),
        metric_chart(
            "teacher",
            "Divergence from the teacher",
            history,
            (MetricLine(metric="teacher/divergence", label="exact"),),
            y="nats per token",
        ),
    )
    return {chart.name: chart for chart in candidates if chart is not None}


# The arguments are the differences between the charts.
def metric_chart(
    name: str,
    title: str,
    history: Sequence[StepRecord],
    lines: Sequence[MetricLine],
    *,
    y: str,
    target: float | None = None,
    logarithmic: bool = False,
) -> Chart | None:
    """Metrics over steps; None if the run has none of them.

    Args:
        name: of the chart.
        title: of the chart.
        history: the steps of the run.
        lines: the metrics and their styles.
        y: title of the y axis.
        target: drawn as a dotted line.
        logarithmic: whether the y axis may be logarithmic, which it is if the values differ by a factor of 5.
    """
    present = [line for line in lines if any(line.metric in record.metrics for record in history)]
    if not present:
        return None
    data: list[dict[str, Any]] = []
    for line in present:
        steps = thin_steps([record for record in history if line.metric in record.metrics], MAX_POINTS)
        x, values = [record.step for record in steps], metric_values(steps, line.metric)
        if line.error is not None and any(map(math.isfinite, metric_values(steps, line.error))):
            errors = metric_values(steps, line.error)
            low = [value - 2 * error for value, error in zip(values, errors, strict=True)]
            high = [value + 2 * error for value, error in zip(values, errors, strict=True)]
            data += band(x, low, high, "± 2 standard errors")
        data.append(trace(x, values, line.label, color=line.color, dash=line.dash))
    positive = [value for line in present for value in metric_values(history, line.metric) if value > 0]
    logarithmic = logarithmic and bool(positive) and max(positive) > 5 * min(positive)
    has_negative = any(value < 0 for line in present for value in metric_values(history, line.metric))
    return Chart(
        name=name,
        title=title,
        figure=figure(
            data,
            height=300,
            x="step",
            y=y,
            xaxis=step_axis([record.step for record in history]),
            yaxis=log_axis(positive)
            if logarithmic
            else {"nticks": 6, "rangemode": "normal" if has_negative else "nonnegative"},
            showlegend=len(present) > 1 or target is not None,
            shapes=[] if target is None else [horizontal_line(target)],
            annotations=[] if target is None else [_target_label(target)],
        ),
        description=describe_change(history, present, y, target),
        header=("Step", *(line.label for line in present)),
        rows=tuple(
            (str(record.step), *(format_value(record.metrics.get(line.metric, math.nan)) for line in present))
            for record in thin_steps(history, MAX_ROWS)
        ),
    )


def trace(
    x: Sequence[int] | Sequence[float],
    y: Sequence[float],
    label: str,
    *,
    color: str,
    dash: str = "solid",
    **options: Any,
) -> dict[str, Any]:
    """A Plotly trace of a metric over steps."""
    return {
        "type": "scatter",
        "mode": "lines" if len(x) > 1 else "markers",
        "name": escape(label),
        "x": list(x),
        "y": finite_or_none(y),
        "line": {"color": color, "width": 2, "dash": dash},
        "marker": {"color": color},
        "hovertemplate": f"step %{{x}}: %{{y:.4~g}}<extra>{escape(label)}</extra>",
        **options,
    }


def horizontal_line(value: float) -> dict[str, Any]:
    """A Plotly shape: a dotted horizontal line across the chart."""
    line = {"type": "line", "x0": 0, "x1": 1, "xref": "paper", "y0": value, "y1": value, "layer": "below"}
    return {**line, "line": {"color": INK, "width": 1, "dash": "dot"}}


def _target_label(value: float) -> dict[str, Any]:
    """A Plotly annotation of the target's line."""
    return {
        "text": "target",
        "x": 0,
        "xref": "paper",
        "xanchor": "left",
        "y": value,
        "yanchor": "bottom",
        "showarrow": False,
        "font": {"size": 12, "color": INK},
    }


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
