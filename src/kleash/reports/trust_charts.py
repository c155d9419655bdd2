"""The charts of what to trust: how the mean settled, and what one-sample estimators say of the same tokens."""

import math
from collections.abc import Mapping, Sequence

from kleash.records import EstimatorRecord, Number, RunningMean
from kleash.reports.figures import ACCENT, ACCENT_BAND, MUTED, Chart, band, dots, figure, rows_of
from kleash.reports.words import count, plain, sizes, with_interval


def convergence(steps: Sequence[RunningMean]) -> Chart | None:
    """The running mean with its interval: whether more tokens would change the answer."""
    if not steps:
        return None
    tokens = [step.tokens for step in steps]
    low, high = [step.ci95[0] for step in steps], [step.ci95[1] for step in steps]
    last = steps[-1]
    line = {
        "type": "scatter",
        "mode": "lines" if len(steps) > 1 else "markers",
        "name": "running mean",
        "x": tokens,
        "y": [step.mean if math.isfinite(step.mean) else None for step in steps],
        "line": {"color": ACCENT, "width": 2},
        "hovertemplate": "%{x:,} tokens: %{y:.4~g} nats<extra></extra>",
    }
    return Chart(
        name="convergence",
        title="How the mean settled",
        figure=figure(
            [*band(tokens, low, high, "95 % interval"), line],
            height=300,
            x="tokens measured",
            y="nats per token",
            xaxis={"showgrid": False, "separatethousands": True, "exponentformat": "none", "nticks": 6},
            yaxis=settled_range(steps),
        ),
        described=f"After {count(last.tokens)} tokens the mean is {plain(last.mean)} nats{_within(last)}.",
        header=("Tokens", "Mean so far", "95 % interval"),
        rows=tuple(
            (count(s.tokens), plain(s.mean), f"{plain(s.ci95[0])} to {plain(s.ci95[1])}") for s in steps
        ),
    )


def _within(step: RunningMean) -> str:
    """The interval, unless there is none: one cluster alone has no error."""
    low, high = step.ci95
    if math.isnan(low) or math.isnan(high):
        return ""
    return f", with a 95 % interval from {plain(low)} to {plain(high)}"


def settled_range(steps: Sequence[RunningMean]) -> dict[str, list[float]]:
    """The range of the y axis: every mean, and the interval once the first quarter is over.

    The first intervals, from a handful of prompts, can be a hundred times the last one.
    """
    settled = steps[len(steps) // 4 :]
    ends = [end for step in settled for end in step.ci95] + [step.mean for step in steps]
    known = [end for end in ends if math.isfinite(end)]
    if not known or min(known) == max(known):
        return {}
    margin = 0.05 * (max(known) - min(known))
    return {"range": [min(known) - margin, max(known) + margin]}


def estimators(exact: Number, found: Mapping[str, EstimatorRecord]) -> Chart | None:
    """What the one-sample estimators say on the same tokens, next to the exact value."""
    if not found:
        return None
    biased = max(found, key=lambda name: sizes(abs(found[name].bias.value)))
    return Chart(
        name="estimators",
        title="What a trainer's estimator would have said",
        figure=_estimator_figure(exact, found),
        described=f"The exact value is {plain(exact.value)} nats per token; {biased} is furthest from it, "
        f"by {plain(found[biased].bias.value)}.",
        header=("Estimator", "Value", "Bias against exact", "Spread per token"),
        rows=(
            ("exact", with_interval(exact), "0", "0"),
            *(
                (name, with_interval(one.number), with_interval(one.bias), f"{plain(one.spread)} nats")
                for name, one in found.items()
            ),
        ),
    )


def _estimator_figure(exact: Number, found: Mapping[str, EstimatorRecord]) -> dict[str, object]:
    values = [one.number for one in found.values()]
    data = [
        dots([exact], [0], name="exact", across=True, text=["exact"]),
        dots(values, range(1, len(found) + 1), name="one sample", color=MUTED, across=True, text=list(found)),
    ]
    shapes = []
    if math.isfinite(exact.value):
        ends = exact.ci95 if all(map(math.isfinite, exact.ci95)) else (exact.value, exact.value)
        down = {"y0": 0, "y1": 1, "yref": "paper", "layer": "below"}
        wide, thin = {"width": 0}, {"color": ACCENT, "width": 1}
        shapes = [
            {**down, "type": "rect", "x0": ends[0], "x1": ends[1], "fillcolor": ACCENT_BAND, "line": wide},
            {**down, "type": "line", "x0": exact.value, "x1": exact.value, "line": thin},
        ]
    return figure(
        data,
        height=280,
        x="nats per token, on the same tokens",
        y="estimator",
        yaxis=rows_of(["exact", *found]),
        shapes=shapes,
    )
