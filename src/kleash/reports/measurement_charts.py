"""The charts of where the drift is: how large on single tokens, at which positions, how sure the reference was."""

import math
from collections.abc import Mapping, Sequence

from kleash.records import Bin, EstimatorRecord, Measurement, Number, RunningMean
from kleash.records.statistics import label_of
from kleash.reports.figures import (
    ACCENT,
    ACCENT_BAND,
    MUTED,
    Chart,
    axis,
    band,
    bars,
    decades,
    dots,
    figure,
    rows_of,
)
from kleash.reports.formatting import count, percent, plain, sizes, with_interval

DIRECTIONS = (("kl_policy_reference", ACCENT), ("kl_reference_policy", MUTED))
APART = 0.24
"""Rows by which two dots of one row stand apart."""


def quantile_ladder(measurement: Measurement) -> Chart | None:
    """How large the KL of single tokens is: medians to maximum, both directions."""
    ladders = {name: measurement.quantiles[name] for name, _ in DIRECTIONS if name in measurement.quantiles}
    if not ladders:
        return None
    first = next(iter(ladders.values()))
    levels = list(first)
    rungs = [level if level == "max" else f"{level} %" for level in levels]
    described = [
        f"{'the largest is' if level == 'max' else f'{level} % of tokens lie at or below'} "
        f"{plain(first[level].value)} nats"
        for level in levels
        if level in ("50", "99", "max")
    ]
    return Chart(
        name="quantiles",
        title="How large it is on single tokens",
        figure=_ladder_figure(ladders, levels, rungs),
        described="; ".join(described) + ".",
        header=("Quantile", *(label_of(name) for name in ladders)),
        rows=tuple(
            (rung, *(with_interval(ladder[level]) for ladder in ladders.values()))
            for rung, level in zip(rungs, levels, strict=True)
        ),
    )


def _ladder_figure(
    ladders: Mapping[str, Mapping[str, Number]], levels: list[str], rungs: list[str]
) -> dict[str, object]:
    drawn = [ladder[level].value for ladder in ladders.values() for level in levels]
    logarithmic = all(value > 0 for value in drawn if math.isfinite(value))
    data = [
        dots(
            [ladders[name][level] for level in levels],
            [rung + APART * (place - (len(ladders) - 1) / 2) for rung in range(len(rungs))],
            name=label_of(name),
            color=color,
            across=True,
            text=rungs,
        )
        for place, (name, color) in enumerate(DIRECTIONS)
        if name in ladders
    ]
    return figure(
        data,
        height=340,
        x="KL of a token, nats",
        y="share of the tokens at or below",
        xaxis=decades(drawn) if logarithmic else {},
        yaxis=rows_of(rungs),
        showlegend=len(ladders) > 1,
    )


def by_bin(name: str, title: str, found: Sequence[Bin], what: str, *, whole: bool = False) -> Chart | None:
    """The mean in each range above the share of the tokens and of the whole KL that lies there.

    Args:
        name: of the chart.
        title: of the chart.
        found: the ranges.
        what: the quantity whose ranges they are.
        whole: whether that quantity is a whole number.
    """
    if not found:
        return None
    labels = [range_label(part, whole=whole) for part in found]
    top = max(range(len(found)), key=lambda at: sizes(found[at].kl_policy_reference.value))
    most = max(range(len(found)), key=lambda at: sizes(found[at].share_of_kl))
    return Chart(
        name=name,
        title=title,
        figure=_bin_figure(found, labels, what),
        described=f"The mean is highest at {labels[top]}: "
        f"{plain(found[top].kl_policy_reference.value)} nats per token. The largest share of the KL, "
        f"{percent(found[most].share_of_kl)}, lies at {labels[most]}.",
        header=(what.capitalize(), "Mean KL, nats per token", "Tokens", "Share of the KL"),
        rows=tuple(
            (text, with_interval(part.kl_policy_reference), count(part.tokens), percent(part.share_of_kl))
            for text, part in zip(labels, found, strict=True)
        ),
    )


def _bin_figure(found: Sequence[Bin], labels: list[str], what: str) -> dict[str, object]:
    tokens = sum(part.tokens for part in found)
    of_tokens = [part.tokens / tokens for part in found]
    of_kl = [part.share_of_kl for part in found]
    data = [
        dots([part.kl_policy_reference for part in found], labels, name="mean KL", showlegend=False),
        bars(labels, of_tokens, name="share of the tokens", color=MUTED, yaxis="y2"),
        bars(labels, of_kl, name="share of the KL", color=ACCENT, yaxis="y2"),
    ]
    return figure(
        data,
        height=420,
        x=what,
        y="nats per token",
        xaxis={"type": "category", "showgrid": False, "anchor": "y2"},
        yaxis={"domain": [0.5, 1], "rangemode": "tozero"},
        yaxis2=axis("share", domain=[0, 0.38], tickformat=".0%", rangemode="tozero", nticks=4),
        barmode="group",
        bargap=0.35,
        showlegend=True,
    )


def range_label(part: Bin, *, whole: bool) -> str:
    """The range of a bin: whole numbers as "4–7", others as "0.25–0.5"."""
    if math.isinf(part.high):
        return f"{part.low:g}+"
    if not whole:
        return f"{part.low:g}–{part.high:g}"
    last = part.high - 1
    return f"{part.low:g}" if last <= part.low else f"{part.low:g}–{last:g}"


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
