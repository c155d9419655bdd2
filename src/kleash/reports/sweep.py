"""The page of a sweep: KL against size with the Pareto front, the ranking with letters, and all pairs."""

import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from kleash.reports.attribution import (
    added_warnings,
    attribution_chart,
    describe_attribution,
    describe_control,
    describe_sum,
    name_of_candidate,
    names_of_candidates,
    shown_attributions,
)
from kleash.reports.figures import ACCENT, INK, MUTED, Chart, dots, escape, figure, log_axis
from kleash.reports.formatting import (
    UNKNOWN,
    format_bytes,
    format_count,
    format_round_bytes,
    format_with_interval,
)
from kleash.reports.page import write_page
from kleash.store.number import Number
from kleash.store.statistics import label_of
from kleash.store.sweep import QUANTILE, Sweep, SweepCandidate, SweepPair

PAGE = "sweep.html"
AXIS_MARGIN = 1.2
"""Factor by which an axis of sizes goes beyond the smallest and the largest."""
NARROW = 4.0
"""Ratio of the ends of an axis of sizes below which it ends there; Plotly shows a hundredfold range of one size."""
TICK_DIGITS = (
    (1.0,),
    (1.0, 2.0, 5.0),
    (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0),
    (1.0, 1.1, 1.2, 1.4, 1.6, 1.8, 2.0, 2.2, 2.5, 2.8, 3.0, 3.5, 4.0, 4.5, 5.0, 5.5, 6.0, 7.0, 8.0, 9.0),
)
"""Leading digits of the ticks of an axis of sizes: the first that give at least ``MIN_BYTE_TICKS``, or the last."""
MIN_BYTE_TICKS = 3
CHART_LINES, CHART_CHARACTERS = 16, 45
"""Lines of text that fit above each other in a chart of KL against size, and letters beside each other on a phone."""
COLUMNS = ("kl_policy_reference", "kl_reference_policy", "top1_agreement", "perplexity_ratio")
"""Statistics in the table of candidates."""


def write_sweep(path: Path, sweep: Sweep) -> Path:
    """Write the page of a sweep.

    Args:
        path: the HTML file, in a folder that exists.
        sweep: its candidates and their differences.

    Returns:
        ``path``.

    Raises:
        RunFolderError: if the page cannot be written.
        MissingExtraError: if Jinja2 or Plotly is not installed.
    """
    names = names_of_candidates(sweep)
    ranking = sweep.ranking
    present = [name for name in COLUMNS if any(name in candidate.numbers for candidate in ranking)]
    context = {
        "sweep": sweep,
        "ranking": ranking,
        "names": names,
        "columns": present,
        "quantile": lambda candidate, name: candidate.numbers.get(f"{name}_{QUANTILE}"),
        "warnings": [
            *sweep.warnings,
            *(
                f"on {', '.join(subjects)}: {warning}"
                for warning, subjects in warnings_of_candidates(sweep).items()
            ),
        ],
        "rank_label": label_of(sweep.rank_by),
        "charts": sweep_charts(sweep),
        "size": lambda candidate: format_bytes(candidate.bytes_on_disk),
        "bits": format_bits,
        "pairs": [
            (describe_pair(pair, names), nearer_minus_farther(pair, sweep.warnings))
            for pair in sorted(sweep.pairs, key=lambda pair: _ranks(pair, ranking))
        ],
        "headline": describe_ranking(sweep),
        "attributions": [
            {
                "chart": None if attribution.failure else attribution_chart(attribution, name),
                "record": attribution,
                "warnings": added_warnings(sweep, attribution),
                "sentences": (
                    describe_attribution(attribution, name),
                    describe_sum(attribution),
                    describe_control(attribution),
                ),
            }
            for attribution in shown_attributions(sweep)
            for name in [name_of_candidate(sweep, attribution)]
        ],
    }
    return write_page(path, "sweep.html", context, ("plotly", "charts.js"))


def warnings_of_candidates(sweep: Sweep) -> dict[str, list[str]]:
    """The warnings about the statistic that ranks, each with the names of the candidates that have it."""
    names = names_of_candidates(sweep)
    subjects: dict[str, list[str]] = {}
    for candidate in sweep.ranking:
        for warning in candidate.numbers[sweep.rank_by].warnings:
            if warning not in sweep.warnings:
                subjects.setdefault(warning, []).append(names[candidate.number])
    return subjects


def format_bits(candidate: SweepCandidate) -> str:
    """Bits a weight, such as "4.85"; "–" where size or parameters are."""
    return UNKNOWN if candidate.bits_per_weight is None else f"{candidate.bits_per_weight:.2f}"


def nearer_minus_farther(pair: SweepPair, shared_warnings: Collection[str]) -> Number:
    """The difference of a pair, at most 0, with its simultaneous interval and without warnings about all candidates."""
    low, high = pair.simultaneous_ci95
    is_first_nearer = pair.difference.value <= 0
    return Number(
        value=min(pair.difference.value, -pair.difference.value),
        unit=pair.difference.unit,
        standard_error=pair.difference.standard_error,
        ci95=(low, high) if is_first_nearer else (-high, -low),
        warnings=tuple(warning for warning in pair.difference.warnings if warning not in shared_warnings),
    )


def _nearer_and_farther(pair: SweepPair) -> tuple[int, int]:
    """The numbers of the two candidates, the one with the smaller mean first."""
    return (pair.first, pair.second) if pair.difference.value <= 0 else (pair.second, pair.first)


def _ranks(pair: SweepPair, ranking: Sequence[SweepCandidate]) -> tuple[int, ...]:
    """The places of a pair in the ranking."""
    places = {candidate.number: place for place, candidate in enumerate(ranking)}
    return tuple(places[number] for number in _nearer_and_farther(pair))


def describe_pair(pair: SweepPair, names: dict[int, str]) -> str:
    """Which of two candidates is nearer to the reference, in words."""
    nearer, farther = (names[number] for number in _nearer_and_farther(pair))
    if pair.is_tie:
        return f"{nearer} and {farther} are tied"
    return f"{nearer} is nearer to the reference than {farther}"


def describe_ranking(sweep: Sweep) -> str:
    """How many candidates were ranked, and how many pairs are tied, in a sentence."""
    ranking = sweep.ranking
    if not ranking:
        return "No candidate could be measured."
    names = names_of_candidates(sweep)
    best = names[ranking[0].number]
    if len(ranking) == 1:
        return f"One candidate was measured: {best}."
    ties = sum(pair.is_tie for pair in sweep.pairs)
    if len(ranking) == 2:
        other = names[ranking[1].number]
        verdict = f"tied with {other}" if ties else f"nearer to the reference than {other}"
        return f"{best} has the smallest {label_of(sweep.rank_by)}, {verdict}."
    partners = {
        pair.second if pair.first == ranking[0].number else pair.first
        for pair in sweep.pairs
        if pair.is_tie and ranking[0].number in (pair.first, pair.second)
    }
    beside = f", tied with {len(partners)} other{'s' if len(partners) > 1 else ''}" if partners else ""
    tied_pairs = (
        "no pair is" if not ties else f"{ties} of {len(sweep.pairs)} pairs {'are' if ties > 1 else 'is'}"
    )
    return f"{best} has the smallest {label_of(sweep.rank_by)}{beside}; {tied_pairs} tied."


def sweep_charts(sweep: Sweep) -> list[Chart]:
    """KL against size on disk, and against bits a weight where parameters are known."""
    by_size = [
        (candidate, float(candidate.bytes_on_disk))
        for candidate in sweep.ranking
        if candidate.bytes_on_disk is not None
    ]
    by_bits = [
        (candidate, candidate.bits_per_weight)
        for candidate in sweep.ranking
        if candidate.bits_per_weight is not None
    ]
    charts = [
        _scatter("size", "KL against size", "size on disk", sweep, by_size),
        _scatter("bits", "KL against bits a weight", "bits a weight on disk", sweep, by_bits),
    ]
    return [chart for chart in charts if chart is not None]


def _labels(
    points: Sequence[tuple[SweepCandidate, float]], sweep: Sweep, *, is_logarithmic: bool
) -> dict[int, tuple[str, str]]:
    """The label of each candidate's dot and its place, by the candidate's number.

    A label is above, beside or below its dot, on the side with more room. One that would lie on another is left out:
    the name is shown when the pointer is on the dot, and in the table below the chart.
    """
    xs = [math.log(x) if is_logarithmic and x > 0 else x for _, x in points]
    heights = [candidate.numbers[sweep.rank_by].value for candidate, _ in points]
    logs = [math.log(value) for value in heights if value > 0]
    to_lines = CHART_LINES / max(max(logs, default=0) - min(logs, default=0), math.log(10))
    left, right = min(xs), max(xs)
    taken: list[tuple[float, float, float]] = []
    labels: dict[int, tuple[str, str]] = {}
    names = names_of_candidates(sweep, 24)
    for (candidate, _), x, value in zip(points, xs, heights, strict=True):
        share = (x - left) / (right - left) if right > left else 0
        side, text = ("left" if share > 0.5 else "right"), names[candidate.number]
        width = len(text) / CHART_CHARACTERS
        start = share - width if side == "left" else share
        line = math.log(value) * to_lines if value > 0 else -math.inf
        labels[candidate.number] = ("", f"top {side}")
        for place, offset in (("top", 1), ("middle", 0), ("bottom", -1)):
            at = line + offset
            if all(
                abs(at - other) >= 1 or start > end or start + width < begin for other, begin, end in taken
            ):
                taken.append((at, start, start + width))
                labels[candidate.number] = (escape(text), f"{place} {side}")
                break
    return labels


def byte_axis(sizes: Sequence[float]) -> dict[str, Any]:
    """A logarithmic axis for numbers of bytes, with ticks such as "2 GB"."""
    positive = [size for size in sizes if size > 0]
    if not positive:
        return {"type": "log"}
    low, high = min(positive) / AXIS_MARGIN, max(positive) * AXIS_MARGIN
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks: list[float] = []
    for digits in TICK_DIGITS:
        ticks = [digit * 10.0**power for power in powers for digit in digits]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) >= MIN_BYTE_TICKS:
            break
    axis: dict[str, Any] = {
        "type": "log",
        "tickvals": ticks,
        "ticktext": list(map(format_round_bytes, ticks)),
    }
    if high < NARROW * low:
        axis["range"] = [math.log10(low), math.log10(high)]
    return axis


def _kl_axis(values: Sequence[float]) -> dict[str, Any]:
    """A logarithmic axis for values and the ends of their intervals, of at least a power of ten, which has ticks."""
    axis = log_axis(values)
    logs = [math.log10(value) for value in values if math.isfinite(value) and value > 0]
    if logs and max(logs) - min(logs) < 1:
        middle = (min(logs) + max(logs)) / 2
        axis["range"] = [middle - 0.55, middle + 0.55]
    return axis


def _scatter(
    name: str, title: str, x_title: str, sweep: Sweep, points: Sequence[tuple[SweepCandidate, float]]
) -> Chart | None:
    """A chart of KL against ``x``, with the Pareto front as a line; None without points."""
    if not points:
        return None
    points = sorted(points, key=lambda point: point[1])
    on_front = [point for point in points if point[0].is_on_pareto_front]
    labels = _labels(points, sweep, is_logarithmic=name == "size")
    names = names_of_candidates(sweep)
    data = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": "Pareto front",
            "x": [x for _, x in on_front],
            "y": [candidate.numbers[sweep.rank_by].value for candidate, _ in on_front],
            "line": {"color": MUTED, "width": 1, "shape": "hv"},
            "hoverinfo": "skip",
        }
    ]
    for color, is_on_front, label in ((ACCENT, True, "on the front"), (INK, False, "not on the front")):
        chosen = [point for point in points if point[0].is_on_pareto_front == is_on_front]
        if chosen:
            data.append(
                dots(
                    [candidate.numbers[sweep.rank_by] for candidate, _ in chosen],
                    [x for _, x in chosen],
                    name=label,
                    color=color,
                    mode="markers+text",
                    text=[labels[candidate.number][0] for candidate, _ in chosen],
                    textposition=[labels[candidate.number][1] for candidate, _ in chosen],
                    hovertext=[escape(names[candidate.number]) for candidate, _ in chosen],
                    hovertemplate="%{hovertext}: %{y:.4~g}<extra></extra>",
                )
            )
    numbers = [candidate.numbers[sweep.rank_by] for candidate, _ in points]
    values = [number.value for number in numbers]
    y_axis = _kl_axis([*values, *(end for number in numbers for end in number.ci95)])
    axes = {"xaxis": byte_axis([x for _, x in points]) if name == "size" else {}, "yaxis": y_axis}
    return Chart(
        name=name,
        title=title,
        figure=figure(
            data,
            height=420,
            x=x_title,
            y=f"{label_of(sweep.rank_by)}, nats per token",
            showlegend=True,
            **axes,
        ),
        description="; ".join(
            f"{names[candidate.number]}: {format_with_interval(candidate.numbers[sweep.rank_by])} nats at "
            f"{format_bytes(candidate.bytes_on_disk) if name == 'size' else format_bits(candidate) + ' bits a weight'}"
            for candidate, _ in points
        )
        + "."
        + (" A KL of 0 has no place on a logarithmic axis." if 0.0 in values else ""),
        header=(
            "Candidate",
            "bytes on disk" if name == "size" else x_title,
            label_of(sweep.rank_by),
            "Pareto front",
        ),
        rows=tuple(
            (
                candidate.name,
                format_count(int(x)) if name == "size" else format_bits(candidate),
                format_with_interval(candidate.numbers[sweep.rank_by]),
                "yes" if candidate.is_on_pareto_front else "no",
            )
            for candidate, x in points
        ),
    )
