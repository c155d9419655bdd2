"""The page of a sweep: KL against size with the Pareto front, the ranking with letters, and all pairs."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from kleash.estimate import Estimate
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
from kleash.reports.drawing import (
    ACCENT,
    INK,
    MUTED,
    Chart,
    dots,
    label_points,
    line,
    log_axis,
    name_axes,
    row_dots,
    row_height,
    shown_ends,
)
from kleash.reports.formatting import (
    UNKNOWN,
    format_bytes,
    format_count,
    format_round_bytes,
    format_with_interval,
)
from kleash.reports.gate_verdicts import describe_sweep_gate
from kleash.reports.page import write_page
from kleash.store.attribution import Attribution
from kleash.store.measurement_summary import merge_warnings
from kleash.store.statistics import kl_directions, label_of
from kleash.store.sweep import QUANTILE, Sweep, SweepCandidate, SweepPair

PAGE = "sweep.html"
MAX_CANDIDATES = 40
"""Candidates in the chart of the ranking."""
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
        MissingExtraError: if Jinja2 or Matplotlib is not installed.
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
        "attributions": [attribution_context(sweep, each) for each in shown_attributions(sweep)],
    }
    return write_page(path, "sweep.html", context)


def attribution_context(sweep: Sweep, attribution: Attribution) -> dict[str, Any]:
    """An attribution as the template takes it."""
    name = name_of_candidate(sweep, attribution)
    return {
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


def nearer_minus_farther(pair: SweepPair, shared_warnings: Collection[str]) -> Estimate:
    """The difference of a pair, at most 0, with its simultaneous interval and without warnings about all candidates."""
    low, high = pair.simultaneous_ci95
    is_first_nearer = pair.difference.value <= 0
    return replace(
        pair.difference,
        value=min(pair.difference.value, -pair.difference.value),
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
    """The ranking with intervals, KL against size on disk, and against bits a weight where parameters are known."""
    sized = {
        "size": ("KL against size", "size on disk", lambda each: each.bytes_on_disk),
        "bits": ("KL against bits a weight", "bits a weight on disk", lambda each: each.bits_per_weight),
    }
    charts = [_ranking_chart(sweep)] if sweep.ranking else []
    for name, (title, x_title, x_of) in sized.items():
        points = [
            Point(place, candidate, float(x_of(candidate)))
            for place, candidate in enumerate(sweep.ranking, 1)
            if x_of(candidate) is not None
        ]
        if points:
            charts.append(_scatter(name, title, x_title, sweep, sorted(points, key=lambda point: point.x)))
    return charts


class Point(NamedTuple):
    """A candidate in a chart of KL against ``x``, with its place in the ranking."""

    place: int
    candidate: SweepCandidate
    x: float


def _ranking_chart(sweep: Sweep) -> Chart:
    """A row for each candidate, the smallest KL first."""
    ranking, names = sweep.ranking[:MAX_CANDIDATES], names_of_candidates(sweep, 22)
    left_out = len(sweep.ranking) - len(ranking)
    numbers = [candidate.numbers[sweep.rank_by] for candidate in ranking]
    labels = [
        f"{place}  {names[candidate.number]}  {candidate.letters}".rstrip()
        for place, candidate in enumerate(ranking, 1)
    ]
    return Chart(
        name="ranking",
        title=f"{label_of(sweep.rank_by)} of each candidate",
        panels=(partial(_draw_ranking, numbers=numbers, labels=labels, rank_by=label_of(sweep.rank_by)),),
        height=row_height(len(ranking)),
        description="The smallest first, with 95 % intervals; candidates that share a letter are tied."
        + (f" The {left_out} farthest are not shown." if left_out else ""),
        header=("Place", "Candidate", label_of(sweep.rank_by)),
        rows=tuple(
            (str(place), candidate.name, format_with_interval(number))
            for place, (candidate, number) in enumerate(zip(ranking, numbers, strict=True), 1)
        ),
    )


def _draw_ranking(axes: Any, *, numbers: Sequence[Estimate], labels: Sequence[str], rank_by: str) -> None:
    """Draw a row for each candidate; a KL of 0, for which a logarithmic axis has no place, is a 0 at its left end."""
    row_dots(axes, labels, {rank_by: numbers})
    log_axis(axes, "x", shown_ends(numbers))
    if axes.get_xscale() == "log":
        for row, number in enumerate(numbers):
            if number.value == 0:
                axes.annotate("0", (0.01, row), xycoords=("axes fraction", "data"), va="center")
    name_axes(axes, "nats per token", "")


def _scatter(name: str, title: str, x_title: str, sweep: Sweep, points: Sequence[Point]) -> Chart:
    """A chart of KL against ``x``, with the Pareto front as a line."""
    rank_by = sweep.rank_by
    return Chart(
        name=name,
        title=title,
        panels=(
            partial(_draw_scatter, points=points, rank_by=rank_by, x_title=x_title, is_bytes=name == "size"),
        ),
        height=3.6,
        description=_describe_points(name, sweep, points),
        header=(
            "Place",
            "Candidate",
            "bytes on disk" if name == "size" else x_title,
            label_of(rank_by),
            "Pareto front",
        ),
        rows=tuple(
            (
                str(place),
                candidate.name,
                format_count(int(x)) if name == "size" else format_bits(candidate),
                format_with_interval(candidate.numbers[rank_by]),
                "yes" if candidate.is_on_pareto_front else "no",
            )
            for place, candidate, x in points
        ),
    )


def _draw_scatter(axes: Any, *, points: Sequence[Point], rank_by: str, x_title: str, is_bytes: bool) -> None:
    """Draw the candidates with their places in the ranking, and the Pareto front as a line."""
    numbers = [point.candidate.numbers[rank_by] for point in points]
    front = [
        (x, number.value)
        for (_, candidate, x), number in zip(points, numbers, strict=True)
        if candidate.is_on_pareto_front
    ]
    line(axes, [x for x, _ in front], [y for _, y in front], color=MUTED, drawstyle="steps-post", linewidth=1)
    for color, is_on_front, label in ((ACCENT, True, "on the Pareto front"), (INK, False, "not on it")):
        chosen = [
            (number, point.x)
            for point, number in zip(points, numbers, strict=True)
            if point.candidate.is_on_pareto_front == is_on_front
        ]
        if chosen:
            dots(axes, chosen, color=color, label=label)
    log_axis(axes, "y", shown_ends(numbers))
    if is_bytes:
        log_axis(axes, "x", [point.x for point in points], format_round_bytes)
    label_points(
        axes,
        [(str(point.place), point.x, number.value) for point, number in zip(points, numbers, strict=True)],
    )
    name_axes(axes, x_title, f"{label_of(rank_by)}, nats per token")


def _describe_points(name: str, sweep: Sweep, points: Sequence[Point]) -> str:
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

    candidates = [point.candidate for point in points]
    front = [candidate for candidate in candidates if candidate.is_on_pareto_front]
    if len(points) <= LISTED or not front:
        text = f"{'; '.join(map(describe, candidates))}."
    elif len(front) == 1:
        text = f"1 of {len(points)} candidates is on the Pareto front: {describe(front[0])}."
    else:
        text = (
            f"{len(front)} of {len(points)} candidates are on the Pareto front, from {describe(front[0])}, to "
            f"{describe(front[-1])}."
        )
    has_zero = any(candidate.numbers[sweep.rank_by].value == 0 for candidate in candidates)
    text += " Numbers beside the dots are places in the ranking."
    return text + (" A KL of 0 has no place on a logarithmic axis." if has_zero else "")
