"""The charts of a measurement: means, quantiles, KL by position and confidence, and convergence."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from kleash.estimate import Estimate
from kleash.reports.drawing import (
    ACCENT,
    BAND,
    MUTED,
    Chart,
    band,
    dots,
    line,
    log_axis,
    name_axes,
    name_columns,
    name_rows,
    row_dots,
    row_height,
    shown_ends,
)
from kleash.reports.formatting import (
    UNKNOWN,
    format_count,
    format_percent,
    format_value,
    format_with_interval,
)
from kleash.store import Measurement
from kleash.store.measurement import Bin, ConvergencePoint
from kleash.store.measurement_summary import upper_bound
from kleash.store.statistics import KL_POLICY_REFERENCE, kl_directions, label_of


def means_chart(measurement: Measurement) -> Chart:
    """The KL in both directions, or its bounds, and the one-sample estimators on the same tokens."""
    bounds = [f"{measurement.headline}_{end}" for end in ("lower", "upper")]
    shown = [*(bounds if upper_bound(measurement) is not None else ()), *kl_directions(measurement.headline)]
    kls = {name: measurement.per_token[name] for name in shown if name in measurement.per_token}
    records = measurement.estimators
    rows = (
        *((label_of(name), format_with_interval(number), UNKNOWN, UNKNOWN) for name, number in kls.items()),
        *(
            (
                name,
                format_with_interval(record),
                UNKNOWN if record.bias is None else format_with_interval(record.bias),
                f"{format_value(record.spread)} nats",
            )
            for name, record in records.items()
        ),
    )
    return Chart(
        name="estimators",
        title="KL and one-sample estimators" if records else "KL per token",
        panels=(partial(_draw_means, kls=kls, estimators=records),),
        height=row_height(len(rows)),
        description="Means over the tokens with their 95 % intervals."
        + (" The line is the exact KL that the estimators, in grey, estimate." if records else ""),
        header=("Mean", "Value, nats per token", "Bias against exact", "Standard deviation per token"),
        rows=rows,
    )


def _draw_means(axes: Any, *, kls: Mapping[str, Estimate], estimators: Mapping[str, Estimate]) -> None:
    """Draw a row for each KL and each estimator, and a band over the interval of what the estimators estimate."""
    exact = kls.get(KL_POLICY_REFERENCE)
    if exact is not None and math.isfinite(exact.value):
        if all(map(math.isfinite, exact.ci95)):
            axes.axvspan(*exact.ci95, color=BAND, linewidth=0, zorder=0)
        axes.axvline(exact.value, color=ACCENT, linewidth=1, zorder=0.5)
    dots(axes, zip(kls.values(), range(len(kls)), strict=True), horizontal=True)
    below = range(len(kls), len(kls) + len(estimators))
    dots(axes, zip(estimators.values(), below, strict=True), color=MUTED, horizontal=True)
    name_rows(axes, [*map(label_of, kls), *estimators])
    name_axes(axes, "nats per token", "")


def quantiles_chart(measurement: Measurement) -> Chart | None:
    """Quantiles of the per-token KL in both directions; None if the measurement has none."""
    names = kl_directions(measurement.headline)
    quantiles = {name: measurement.quantiles[name] for name in names if name in measurement.quantiles}
    if not quantiles:
        return None
    first = next(iter(quantiles.values()))
    labels = {level: level if level == "max" else f"{level} %" for level in first}
    return Chart(
        name="quantiles",
        title="Quantiles of the KL over tokens",
        panels=(partial(_draw_quantiles, quantiles=quantiles, labels=list(labels.values())),),
        height=row_height(len(labels)),
        description="The KL that so many tokens do not exceed, with 95 % intervals.",
        header=("Quantile", *(label_of(name) for name in quantiles)),
        rows=tuple(
            (label, *(format_with_interval(values[level]) for values in quantiles.values()))
            for level, label in labels.items()
        ),
    )


def _draw_quantiles(
    axes: Any, *, quantiles: Mapping[str, Mapping[str, Estimate]], labels: Sequence[str]
) -> None:
    """Draw a row for each level, on a logarithmic axis unless a quantile is 0."""
    row_dots(axes, labels, {label_of(name): list(numbers.values()) for name, numbers in quantiles.items()})
    shown = [number for numbers in quantiles.values() for number in numbers.values()]
    if all(number.value > 0 for number in shown if math.isfinite(number.value)):
        log_axis(axes, "x", shown_ends(shown))
    name_axes(axes, "KL of a token, nats", "share of the tokens at or below")


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
    drawn = {"bins": bins, "labels": labels, "quantity": quantity}
    return Chart(
        name=name,
        title=title,
        panels=(partial(_draw_bin_means, **drawn), partial(_draw_bin_shares, **drawn)),
        height=4.6,
        description="Above, the mean KL with its 95 % interval; below, the shares of the tokens and of the KL.",
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


def _draw_bin_means(axes: Any, *, bins: Sequence[Bin], labels: Sequence[str], quantity: str) -> None:
    """Draw the mean KL of each bin."""
    dots(axes, [(part.kl, column) for column, part in enumerate(bins)])
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    name_columns(axes, labels)
    name_axes(axes, quantity, "mean KL, nats per token")


def _draw_bin_shares(axes: Any, *, bins: Sequence[Bin], labels: Sequence[str], quantity: str) -> None:
    """Draw the shares of the tokens and of the KL that each bin has."""
    tokens = sum(part.tokens for part in bins)
    shares = {
        "share of the tokens": (MUTED, [part.tokens / tokens for part in bins]),
        "share of the KL": (ACCENT, [part.share_of_kl for part in bins]),
    }
    for side, (label, (color, heights)) in zip((-0.2, 0.2), shares.items(), strict=True):
        axes.bar([column + side for column in range(len(bins))], heights, 0.4, color=color, label=label)
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
    name_columns(axes, labels)
    name_axes(axes, quantity, "share")


def range_label(part: Bin, *, is_integer: bool) -> str:
    """The range of a bin: "4–7" for whole numbers, otherwise "0.25–0.5"."""
    if math.isinf(part.high):
        return f"{part.low:g}+"
    last = part.high - 1 if is_integer else part.high
    return f"{part.low:g}" if last <= part.low else f"{part.low:g}–{last:g}"


def convergence_chart(means: Sequence[ConvergencePoint]) -> Chart | None:
    """The running mean with its interval; None without any."""
    if not means:
        return None
    return Chart(
        name="convergence",
        title="Convergence of the mean",
        panels=(partial(_draw_convergence, means=means),),
        description="The mean KL of the tokens so far, with its 95 % interval.",
        header=("Tokens", "Mean so far", "95 % interval"),
        rows=tuple(
            (
                format_count(point.tokens),
                format_value(point.mean),
                " to ".join(map(format_value, point.ci95)),
            )
            for point in means
        ),
    )


def _draw_convergence(axes: Any, *, means: Sequence[ConvergencePoint]) -> None:
    """Draw the running mean; y has all means, and the intervals after the first quarter of the points.

    The first intervals, from a handful of prompts, can be a hundred times as wide as the last.
    """
    tokens = [point.tokens for point in means]
    band(axes, tokens, [point.ci95[0] for point in means], [point.ci95[1] for point in means])
    line(axes, tokens, [point.mean for point in means])
    later = means[len(means) // 4 :]
    shown = (*(end for point in later for end in point.ci95), *(point.mean for point in means))
    finite = list(filter(math.isfinite, shown))
    if finite and min(finite) < max(finite):
        margin = 0.05 * (max(finite) - min(finite))
        axes.set_ylim(min(finite) - margin, max(finite) + margin)
    axes.xaxis.set_major_formatter(lambda value, _: format_count(round(value)))
    axes.grid(visible=False, axis="x")
    name_axes(axes, "tokens measured", "mean KL, nats per token, with its 95 % interval")
