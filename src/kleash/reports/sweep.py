"""The page of a sweep: KL against size with the Pareto front, the ranking with letters, and all pairs."""

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

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
from kleash.reports.gate_verdicts import describe_sweep_gate
from kleash.reports.page import write_page
from kleash.store.measurement_summary import merge_warnings
from kleash.store.number import Number
from kleash.store.statistics import kl_directions, label_of
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
CHART_LINES, CHART_CHARACTERS = 16, 32
"""Lines of text that fit above each other in a chart of KL against size, and letters beside each other on a phone."""
OFFSETS: Mapping[str, float] = {"top": 1.0, "bottom": -1.0, "middle": 0.0}
"""Places of a label beside its dot, in Plotly's words, and their lines above it."""
LABEL_CHARACTERS = 16
DOT_SHARE = 0.008
"""Half the width of a dot, as a share of the chart's."""
ROOM_BESIDE = 0.08
"""What a label may go beyond the first and the last dot, as a share of the distance between them."""
LISTED = 4
"""Candidates that the description of a chart names one by one."""
COLUMNS = ("top1_agreement", "perplexity_ratio")
"""Statistics in the table of candidates beside the KL in both directions."""


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
    columns = (*kl_directions(sweep.rank_by), *COLUMNS)
    present = [name for name in columns if any(name in candidate.numbers for candidate in ranking)]
    context = {
        "sweep": sweep,
        "ranking": ranking,
        "names": names,
        "columns": present,
        "quantile": lambda candidate, name: candidate.numbers.get(f"{name}_{QUANTILE}"),
        "warnings": [*sweep.warnings, *warnings_of_candidates(sweep)],
        "rank_label": label_of(sweep.rank_by),
        "charts": sweep_charts(sweep),
        "size": lambda candidate: format_bytes(candidate.bytes_on_disk),
        "bits": format_bits,
        "pairs": [
            (describe_pair(pair, names), nearer_minus_farther(pair, sweep.warnings))
            for pair in sorted(sweep.pairs, key=lambda pair: _ranks(pair, ranking))
        ],
        "headline": describe_ranking(sweep),
        "gate": describe_sweep_gate(sweep),
        "attributions": [
            {
                "chart": attribution_chart(attribution, name) if attribution.has_changes else None,
                "title": f"{name} by {attribution.grouping}",
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


def warnings_of_candidates(sweep: Sweep) -> list[str]:
    """The warnings about the statistic that ranks, each with the names of the candidates that have it."""
    names = names_of_candidates(sweep)
    return merge_warnings(
        ((names[candidate.number], candidate.numbers[sweep.rank_by]) for candidate in sweep.ranking),
        sweep.warnings,
    )


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

    A label is above, below or beside its dot, on the side with more room. One that would lie on a dot, on another label
    or on the line of the Pareto front, or beyond the chart, is left out: the name is shown when the pointer is on the
    dot, and in the table below the chart.

    Args:
        points: candidates and their places on the other axis, in its order.
        sweep: of the candidates.
        is_logarithmic: whether the other axis is.
    """
    names = names_of_candidates(sweep, LABEL_CHARACTERS, without=".gguf")
    shares, lines = _places(points, sweep.rank_by, is_logarithmic=is_logarithmic)
    taken = [
        Box(share - DOT_SHARE, share + DOT_SHARE, line - 0.4, line + 0.4)
        for share, line in zip(shares, lines, strict=True)
    ]
    front = [
        (share, line)
        for (candidate, _), share, line in zip(points, shares, lines, strict=True)
        if candidate.is_on_pareto_front
    ]
    for (left, line), (right, next_line) in pairwise(front):
        taken += [Box(left, right, line, line), Box(right, right, next_line, line)]
    labels: dict[int, tuple[str, str]] = {}
    for (candidate, _), share, line in zip(points, shares, lines, strict=True):
        text = names[candidate.number]
        sides = ("left", "right") if share > 0.5 else ("right", "left")
        labels[candidate.number] = ("", f"top {sides[0]}")
        if math.isinf(line):
            continue
        for place, side in product(OFFSETS, sides):
            box = _label_box(len(text), share, line + OFFSETS[place], side)
            if box.is_within_chart and not any(map(box.overlaps, taken)):
                taken.append(box)
                labels[candidate.number] = (escape(text), f"{place} {side}")
                break
    return labels


class Box(NamedTuple):
    """A rectangle of a chart: shares of its width, and lines of text above each other."""

    left: float
    right: float
    bottom: float
    top: float

    @property
    def is_within_chart(self) -> bool:
        """Whether it does not go beyond the chart on a side."""
        return self.left >= -ROOM_BESIDE and self.right <= 1 + ROOM_BESIDE

    def overlaps(self, other: "Box") -> bool:
        """Whether a point is within both; the other may be a line."""
        return (
            self.left < other.right
            and other.left < self.right
            and self.bottom < other.top
            and other.bottom < self.top
        )


def _places(
    points: Sequence[tuple[SweepCandidate, float]], rank_by: str, *, is_logarithmic: bool
) -> tuple[list[float], list[float]]:
    """The places of dots in a chart: shares of its width, and lines of text; -inf for a KL of 0."""
    xs = [math.log(x) if is_logarithmic and x > 0 else x for _, x in points]
    left, right = min(xs), max(xs)
    values = [candidate.numbers[rank_by].value for candidate, _ in points]
    logs = [math.log(value) for value in values if value > 0 and math.isfinite(value)]
    to_lines = CHART_LINES / max(max(logs, default=0) - min(logs, default=0), math.log(10))
    return (
        [(x - left) / (right - left) if right > left else 0.0 for x in xs],
        [math.log(value) * to_lines if value > 0 and math.isfinite(value) else -math.inf for value in values],
    )


def _label_box(characters: int, share: float, line: float, side: str) -> Box:
    """The rectangle of a label on a side of a dot."""
    width = characters / CHART_CHARACTERS
    left = share - width if side == "left" else share
    return Box(left, left + width, line - 0.5, line + 0.5)


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
        description=_describe_points(name, sweep, points),
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


def _describe_points(name: str, sweep: Sweep, points: Sequence[tuple[SweepCandidate, float]]) -> str:
    """A chart of KL against size in words: each candidate, or of many the ends of the Pareto front."""
    names = names_of_candidates(sweep)

    def describe(candidate: SweepCandidate) -> str:
        number = format_with_interval(candidate.numbers[sweep.rank_by])
        size = (
            format_bytes(candidate.bytes_on_disk)
            if name == "size"
            else f"{format_bits(candidate)} bits a weight"
        )
        return f"{names[candidate.number]}, {number} nats at {size}"

    front = [candidate for candidate, _ in points if candidate.is_on_pareto_front]
    if len(points) <= LISTED or not front:
        text = f"{'; '.join(describe(candidate) for candidate, _ in points)}."
    elif len(front) == 1:
        text = f"1 of {len(points)} candidates is on the Pareto front: {describe(front[0])}."
    else:
        text = (
            f"{len(front)} of {len(points)} candidates are on the Pareto front, from {describe(front[0])}, to "
            f"{describe(front[-1])}."
        )
    has_zero = any(candidate.numbers[sweep.rank_by].value == 0 for candidate, _ in points)
    return text + (" A KL of 0 has no place on a logarithmic axis." if has_zero else "")
