"""The charts of a measurement: quantiles, KL by position and confidence, convergence, and sampled estimators."""

import math
from collections.abc import Mapping, Sequence

from kleash.reports.figures import (
    ACCENT,
    ACCENT_BAND,
    MUTED,
    Chart,
    axis,
    band,
    bars,
    dots,
    figure,
    log_axis,
    row_axis,
)
from kleash.reports.formatting import (
    format_count,
    format_percent,
    format_value,
    format_with_interval,
    nan_as_minimum,
)
from kleash.store import Measurement, Number
from kleash.store.measurement import Bin, ConvergencePoint, EstimatorRecord
from kleash.store.statistics import kl_directions, label_of

KL_COLOURS = (ACCENT, MUTED)
"""Colours of the KLs of both directions, the headline first."""
ROW_OFFSET = 0.24
"""Vertical distance between the dots of one row, in rows."""


def quantiles_chart(measurement: Measurement) -> Chart | None:
    """Quantiles of the per-token KL in both directions; None if the measurement has none."""
    names = kl_directions(measurement.headline)
    quantiles = {name: measurement.quantiles[name] for name in names if name in measurement.quantiles}
    if not quantiles:
        return None
    first = next(iter(quantiles.values()))
    levels = list(first)
    labels = [level if level == "max" else f"{level} %" for level in levels]
    sentences = [
        f"{'the largest is' if level == 'max' else f'{level} % of tokens lie at or below'} "
        f"{format_value(first[level].value)} nats"
        for level in levels
        if level in ("50", "99", "max")
    ]
    return Chart(
        name="quantiles",
        title="Quantiles of the KL over tokens",
        figure=_quantiles_figure(quantiles, levels, labels),
        description="; ".join(sentences) + ".",
        header=("Quantile", *(label_of(name) for name in quantiles)),
        rows=tuple(
            (label, *(format_with_interval(values[level]) for values in quantiles.values()))
            for label, level in zip(labels, levels, strict=True)
        ),
    )


def _quantiles_figure(
    quantiles: Mapping[str, Mapping[str, Number]], levels: list[str], labels: list[str]
) -> dict[str, object]:
    """The Plotly figure of ``quantiles_chart``."""
    values = [numbers[level].value for numbers in quantiles.values() for level in levels]
    is_logarithmic = all(value > 0 for value in values if math.isfinite(value))
    data = [
        dots(
            [quantiles[name][level] for level in levels],
            [row + ROW_OFFSET * (index - (len(quantiles) - 1) / 2) for row in range(len(labels))],
            name=label_of(name),
            color=color,
            horizontal=True,
            text=labels,
        )
        for index, (name, color) in enumerate(zip(quantiles, KL_COLOURS, strict=False))
    ]
    return figure(
        data,
        height=340,
        x="KL of a token, nats",
        y="share of the tokens at or below",
        xaxis=log_axis(values) if is_logarithmic else {},
        yaxis=row_axis(labels),
        showlegend=len(quantiles) > 1,
    )


def bin_chart(
    name: str, title: str, bins: Sequence[Bin], quantity: str, *, is_integer: bool = False
) -> Chart | None:
    """The mean KL of each bin, and its share of the tokens and of the whole KL; None without bins.

    Args:
        name: of the chart.
        title: of the chart.
        bins: ranges of ``quantity``.
        quantity: in words.
        is_integer: whether it is a whole number.
    """
    if not bins:
        return None
    labels = [range_label(part, is_integer=is_integer) for part in bins]
    highest = max(range(len(bins)), key=lambda at: nan_as_minimum(bins[at].kl.value))
    largest = max(range(len(bins)), key=lambda at: nan_as_minimum(bins[at].share_of_kl))
    return Chart(
        name=name,
        title=title,
        figure=_bin_figure(bins, labels, quantity),
        description=f"The mean is highest at {labels[highest]}: "
        f"{format_value(bins[highest].kl.value)} nats per token. The largest share of the KL, "
        f"{format_percent(bins[largest].share_of_kl)}, lies at {labels[largest]}.",
        header=(quantity.capitalize(), "Mean KL, nats per token", "Tokens", "Share of the KL"),
        rows=tuple(
            (
                label,
                format_with_interval(part.kl),
                format_count(part.tokens),
                format_percent(part.share_of_kl),
            )
            for label, part in zip(labels, bins, strict=True)
        ),
    )


def _bin_figure(bins: Sequence[Bin], labels: list[str], quantity: str) -> dict[str, object]:
    """The Plotly figure of ``bin_chart``."""
    tokens = sum(part.tokens for part in bins)
    token_shares = [part.tokens / tokens for part in bins]
    kl_shares = [part.share_of_kl for part in bins]
    data = [
        dots([part.kl for part in bins], labels, name="mean KL", showlegend=False),
        bars(labels, token_shares, name="share of the tokens", color=MUTED, yaxis="y2"),
        bars(labels, kl_shares, name="share of the KL", color=ACCENT, yaxis="y2"),
    ]
    return figure(
        data,
        height=420,
        x=quantity,
        y="nats per token",
        xaxis={"type": "category", "showgrid": False, "anchor": "y2"},
        yaxis={"domain": [0.5, 1], "rangemode": "tozero"},
        yaxis2=axis("share", domain=[0, 0.38], tickformat=".0%", rangemode="tozero", nticks=4),
        barmode="group",
        bargap=0.35,
        showlegend=True,
    )


def range_label(part: Bin, *, is_integer: bool) -> str:
    """The range of a bin: "4–7" for whole numbers, otherwise "0.25–0.5"."""
    if math.isinf(part.high):
        return f"{part.low:g}+"
    if not is_integer:
        return f"{part.low:g}–{part.high:g}"
    last = part.high - 1
    return f"{part.low:g}" if last <= part.low else f"{part.low:g}–{last:g}"


def convergence_chart(means: Sequence[ConvergencePoint]) -> Chart | None:
    """The running mean with its interval; None without any."""
    if not means:
        return None
    tokens = [point.tokens for point in means]
    low, high = [point.ci95[0] for point in means], [point.ci95[1] for point in means]
    last = means[-1]
    line = {
        "type": "scatter",
        "mode": "lines" if len(means) > 1 else "markers",
        "name": "running mean",
        "x": tokens,
        "y": [point.mean if math.isfinite(point.mean) else None for point in means],
        "line": {"color": ACCENT, "width": 2},
        "hovertemplate": "%{x:,} tokens: %{y:.4~g} nats<extra></extra>",
    }
    return Chart(
        name="convergence",
        title="Convergence of the mean",
        figure=figure(
            [*band(tokens, low, high, "95 % interval"), line],
            height=300,
            x="tokens measured",
            y="nats per token",
            xaxis={"showgrid": False, "separatethousands": True, "exponentformat": "none", "nticks": 6},
            yaxis=convergence_range(means),
        ),
        description=(
            f"After {format_count(last.tokens)} tokens the mean is {format_value(last.mean)} nats{_interval(last)}."
        ),
        header=("Tokens", "Mean so far", "95 % interval"),
        rows=tuple(
            (
                format_count(point.tokens),
                format_value(point.mean),
                f"{format_value(point.ci95[0])} to {format_value(point.ci95[1])}",
            )
            for point in means
        ),
    )


def _interval(point: ConvergencePoint) -> str:
    """The interval in words; empty with a single cluster, which has no error."""
    low, high = point.ci95
    if math.isnan(low) or math.isnan(high):
        return ""
    return f", with a 95 % interval from {format_value(low)} to {format_value(high)}"


def convergence_range(means: Sequence[ConvergencePoint]) -> dict[str, list[float]]:
    """The range of the y axis: all means, and the intervals after the first quarter of the points.

    The first intervals, from a handful of prompts, can be a hundred times as wide as the last.
    """
    later = means[len(means) // 4 :]
    values = [end for point in later for end in point.ci95] + [point.mean for point in means]
    finite = [value for value in values if math.isfinite(value)]
    if not finite or min(finite) == max(finite):
        return {}
    margin = 0.05 * (max(finite) - min(finite))
    return {"range": [min(finite) - margin, max(finite) + margin]}


def estimators_chart(
    exact: Number | None,
    records: Mapping[str, EstimatorRecord],
    *,
    bounds: Sequence[Number | None] = (None, None),
) -> Chart | None:
    """The one-sample estimators on the same tokens, beside the exact value or its bounds; None without estimators.

    Args:
        exact: KL(policy || reference); None if it is unknown.
        records: by the names of the estimators.
        bounds: its lower and its upper bound, for the description where it is unknown.
    """
    if not records:
        return None
    if exact is None:
        low, high = (math.nan if bound is None else bound.value for bound in bounds)
        return Chart(
            name="estimators",
            title="One-sample estimators",
            figure=_estimators_figure(None, records),
            description=f"The exact value is unknown; it lies between {format_value(low)} and {format_value(high)} "
            "nats per token.",
            header=("Estimator", "Value"),
            rows=tuple((name, format_with_interval(record.number)) for name, record in records.items()),
        )
    biases = {name: record.bias for name, record in records.items() if record.bias is not None}
    furthest = max(biases, key=lambda name: nan_as_minimum(abs(biases[name].value)))
    return Chart(
        name="estimators",
        title="One-sample estimators on the same tokens",
        figure=_estimators_figure(exact, records),
        description=f"The exact value is {format_value(exact.value)} nats per token; {furthest} is furthest from it, "
        f"by {format_value(biases[furthest].value)}.",
        header=("Estimator", "Value", "Bias against exact", "Standard deviation per token"),
        rows=(
            ("exact", format_with_interval(exact), "0", "0"),
            *(
                (
                    name,
                    format_with_interval(records[name].number),
                    format_with_interval(bias),
                    f"{format_value(records[name].spread)} nats",
                )
                for name, bias in biases.items()
            ),
        ),
    )


def _estimators_figure(exact: Number | None, records: Mapping[str, EstimatorRecord]) -> dict[str, object]:
    """The Plotly figure of ``estimators_chart``."""
    values = [record.number for record in records.values()]
    known = [] if exact is None else [exact]
    data = [
        *(dots([number], [0], name="exact", horizontal=True, text=["exact"]) for number in known),
        dots(
            values,
            range(len(known), len(known) + len(records)),
            name="one sample",
            color=MUTED,
            horizontal=True,
            text=list(records),
        ),
    ]
    shapes = []
    if exact is not None and math.isfinite(exact.value):
        ends = exact.ci95 if all(map(math.isfinite, exact.ci95)) else (exact.value, exact.value)
        vertical = {"y0": 0, "y1": 1, "yref": "paper", "layer": "below"}
        shapes = [
            {
                **vertical,
                "type": "rect",
                "x0": ends[0],
                "x1": ends[1],
                "fillcolor": ACCENT_BAND,
                "line": {"width": 0},
            },
            {
                **vertical,
                "type": "line",
                "x0": exact.value,
                "x1": exact.value,
                "line": {"color": ACCENT, "width": 1},
            },
        ]
    return figure(
        data,
        height=280,
        x="nats per token, on the same tokens",
        y="estimator",
        yaxis=row_axis([*(["exact"] * len(known)), *records]),
        shapes=shapes,
    )
