"""The charts of a training run: curves over steps, with bands where errors are known."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kleash.records import StepRecord
from kleash.reports.figures import ACCENT, INK, MUTED, Chart, band, decades, escape, figure, finite
from kleash.reports.formatting import plain

MOST_POINTS = 400
"""Steps that a curve is drawn through; of more, every second, third … is left out."""
MOST_ROWS = 40


@dataclass(frozen=True, kw_only=True)
class Line:
    """A metric as a curve."""

    metric: str
    label: str
    color: str = ACCENT
    dash: str = "solid"
    error: str | None = None
    """The metric that holds its standard error."""


REWARD = (
    Line(metric="reward/score", label="reward", error="reward/score_error"),
    Line(metric="reward/adjusted", label="reward − beta · KL", color=INK, dash="dash"),
)
PER_SEQUENCE = (Line(metric="kl/exact_per_sequence", label="exact", error="kl/exact_per_sequence_error"),)
PER_TOKEN = (
    Line(metric="kl/exact_per_token", label="exact", error="kl/exact_per_token_error"),
    Line(metric="kl/k1", label="k1", color=INK, dash="dot"),
    Line(metric="kl/k3", label="k3", color=MUTED),
)
UPDATES = (
    Line(metric="policy/clip_share", label="tokens clipped"),
    Line(metric="kl/top_percent_share", label="KL held by the top 1 % of tokens", color=INK, dash="dash"),
)
TEXTS = (
    Line(metric="response/repetition", label="three-word runs repeated in a response"),
    Line(metric="response/distinct", label="different ones among all of the step's", color=INK, dash="dash"),
)
PAIRS = (Line(metric="pairs/accuracy", label="pairs told apart"),)


def charts_of(
    history: Sequence[StepRecord], *, target: float | None = None, per: str = "sequence"
) -> dict[str, Chart]:
    """Every chart that a run has numbers for, by its name.

    Args:
        history: its steps.
        target: the KL that beta was steered to, in nats; None if there was none.
        per: what the target is per, "sequence" or "token".
    """
    found = (
        curves("reward", "Reward", history, REWARD, y="reward"),
        curves(
            "kl-sequence",
            "KL(policy ‖ reference) per sequence",
            history,
            PER_SEQUENCE,
            y="nats per sequence",
            target=target if per == "sequence" else None,
        ),
        curves(
            "kl-token",
            "KL(policy ‖ reference) per token",
            history,
            PER_TOKEN,
            y="nats per token",
            target=target if per == "token" else None,
        ),
        curves("beta", "Beta", history, (Line(metric="beta", label="beta"),), y="beta", logarithmic=True),
        curves(
            "entropy",
            "Entropy",
            history,
            (Line(metric="policy/entropy", label="policy"),),
            y="nats per token",
        ),
        curves(
            "length",
            "Length",
            history,
            (Line(metric="response/length", label="mean"),),
            y="tokens per response",
        ),
        curves("updates", "Updates", history, UPDATES, y="share"),
        curves("texts", "Repetition", history, TEXTS, y="share"),
        curves("pairs", "Pairs", history, PAIRS, y="share"),
        curves(
            "teacher",
            "Divergence from the teacher",
            history,
            (Line(metric="teacher/divergence", label="exact"),),
            y="nats per token",
        ),
    )
    return {chart.name: chart for chart in found if chart is not None}


# More arguments than elsewhere: what a chart shows, and three ways in which one differs from another.
def curves(
    name: str,
    title: str,
    history: Sequence[StepRecord],
    lines: Sequence[Line],
    *,
    y: str,
    target: float | None = None,
    logarithmic: bool = False,
) -> Chart | None:
    """Metrics over steps; None if the run has none of them."""
    there = [line for line in lines if any(line.metric in record.metrics for record in history)]
    if not there:
        return None
    data: list[dict[str, Any]] = []
    for line in there:
        drawn = thinned([record for record in history if line.metric in record.metrics], MOST_POINTS)
        x, values = [record.step for record in drawn], values_of(drawn, line.metric)
        if line.error is not None and any(map(math.isfinite, values_of(drawn, line.error))):
            errors = values_of(drawn, line.error)
            low = [value - 2 * error for value, error in zip(values, errors, strict=True)]
            high = [value + 2 * error for value, error in zip(values, errors, strict=True)]
            data += band(x, low, high, "± 2 standard errors")
        data.append(trace(x, values, line.label, color=line.color, dash=line.dash))
    known = [value for line in there for value in values_of(history, line.metric) if value > 0]
    logarithmic = logarithmic and bool(known) and max(known) > 5 * min(known)
    negative = any(value < 0 for line in there for value in values_of(history, line.metric))
    return Chart(
        name=name,
        title=title,
        figure=figure(
            data,
            height=300,
            x="step",
            y=y,
            xaxis={"showgrid": False, "nticks": 6, **({"tickformat": "d"} if len(history) < 6 else {})},
            yaxis=decades(known)
            if logarithmic
            else {"nticks": 6, "rangemode": "normal" if negative else "nonnegative"},
            showlegend=len(there) > 1 or target is not None,
            shapes=[] if target is None else [level(target)],
            annotations=[] if target is None else [_target_label(target)],
        ),
        described=described(history, there, y, target),
        header=("Step", *(line.label for line in there)),
        rows=tuple(
            (str(record.step), *(plain(record.metrics.get(line.metric, math.nan)) for line in there))
            for record in thinned(history, MOST_ROWS)
        ),
    )


def trace(
    x: Sequence[int] | Sequence[float],
    y: Sequence[float],
    label: str,
    *,
    color: str,
    dash: str = "solid",
    **more: Any,
) -> dict[str, Any]:
    """A curve."""
    return {
        "type": "scatter",
        "mode": "lines" if len(x) > 1 else "markers",
        "name": escape(label),
        "x": list(x),
        "y": finite(y),
        "line": {"color": color, "width": 2, "dash": dash},
        "marker": {"color": color},
        "hovertemplate": f"step %{{x}}: %{{y:.4~g}}<extra>{escape(label)}</extra>",
        **more,
    }


def level(value: float) -> dict[str, Any]:
    """A dotted line across a chart."""
    line = {"type": "line", "x0": 0, "x1": 1, "xref": "paper", "y0": value, "y1": value, "layer": "below"}
    return {**line, "line": {"color": INK, "width": 1, "dash": "dot"}}


def _target_label(value: float) -> dict[str, Any]:
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


def described(history: Sequence[StepRecord], lines: Sequence[Line], y: str, target: float | None) -> str:
    """Where the first of the curves began and ended."""
    values = [value for value in values_of(history, lines[0].metric) if not math.isnan(value)]
    if not values:
        return f"No step has a number for {lines[0].label}."
    aim = "" if target is None else f"; the target is {plain(target)}"
    unit = y.removeprefix("nats ")
    nats = " nats" if y.startswith("nats") else ""
    per = f" {unit}" if nats else ""
    return f"From {plain(values[0])} in the first step to {plain(values[-1])}{nats}{per} in the last{aim}."


def values_of(history: Sequence[StepRecord], metric: str) -> list[float]:
    """A metric's value in each step; NaN where a step has none."""
    return [record.metrics.get(metric, math.nan) for record in history]


def thinned(history: Sequence[StepRecord], most: int) -> list[StepRecord]:
    """Evenly chosen steps, the first and the last among them."""
    if len(history) <= most:
        return list(history)
    places = [round(at * (len(history) - 1) / (most - 1)) for at in range(most)]
    return [history[place] for place in places]
