"""The page of a sweep: KL against size with the Pareto front, the ranking, all pairs, and what the KL comes from."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from kleash.estimate import Estimate
from kleash.jobs import SweepJob
from kleash.jobs.option_groups import in_order_of_help
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
    command_line,
    format_bytes,
    format_count,
    format_percent,
    format_with_interval,
    keep_end,
    make_visible,
    short_names,
)
from kleash.reports.gate_verdicts import describe_sweep_gate
from kleash.reports.page import write_page
from kleash.store.result_summaries import attribution_table
from kleash.store.statistics import kl_directions, label_of
from kleash.store.summary import summarize
from kleash.store.sweep import QUANTILE, Attribution, Sweep, SweepCandidate, SweepPair

Point = tuple[int, SweepCandidate, float]
"""A candidate in a chart of KL against a size: its place in the ranking, and the size."""

PAGE = "sweep.html"
MAX_CANDIDATES = 40
"""Candidates in the chart of the ranking."""
MAX_NAME = 22
"""Characters of a name in that chart, so that its place and letters are on it, too."""
CHANGE = "change of the KL, nats per token"
MAX_LABELLED_LAYERS = 14
"""Layers of which each has a label on the axis; of more, every second, fourth, ... has."""
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
    columns = (*kl_directions(sweep.rank_by), *COLUMNS)
    return write_page(
        path,
        "sweep.html",
        sweep=sweep,
        summary=summarize(sweep),
        names=names_of_candidates(sweep),
        columns={
            name: f"{label_of(name)}, nats" if name.startswith("kl_") else label_of(name)
            for name in columns
            if any(name in each.numbers for each in sweep.ranking)
        },
        quantile=lambda candidate, name: candidate.numbers.get(f"{name}_{QUANTILE}"),
        rank_label=label_of(sweep.rank_by),
        charts=sweep_charts(sweep),
        pairs=pairs_in_order(sweep),
        gate=describe_sweep_gate(sweep),
        command=command_line(("kleash", "sweep"), in_order_of_help(SweepJob), sweep.job),
        attributions=[attribution_context(sweep, each) for each in sweep.attributions],
    )


def attribution_context(sweep: Sweep, attribution: Attribution) -> dict[str, Any]:
    """An attribution as the template takes it."""
    name = names_of_candidates(sweep)[attribution.candidate]
    return {
        "record": attribution,
        "chart": attribution_chart(sweep, attribution, name) if attribution.has_changes else None,
        "title": f"{name} by {attribution.grouping}",
        "sentence": describe_attribution(attribution, name),
    }


def pairs_in_order(sweep: Sweep) -> list[SweepPair]:
    """The pairs in the order of the ranking, each as the mean of the nearer candidate minus that of the farther.

    The differences have the simultaneous intervals, and no warnings of the sweep.
    """
    places = {candidate.number: place for place, candidate in enumerate(sweep.ranking)}
    pairs: list[SweepPair] = []
    for pair in sweep.pairs:
        nearer, farther = sorted((pair.first, pair.second), key=places.__getitem__)
        sign = 1 if nearer == pair.first else -1
        low, high = sorted(sign * end for end in pair.simultaneous_ci95)
        warnings = tuple(each for each in pair.difference.warnings if each not in sweep.warnings)
        difference = replace(
            pair.difference, value=sign * pair.difference.value, ci95=(low, high), warnings=warnings
        )
        pairs.append(replace(pair, first=nearer, second=farther, difference=difference))
    return sorted(pairs, key=lambda pair: (places[pair.first], places[pair.second]))


def sweep_charts(sweep: Sweep) -> list[Chart]:
    """The ranking with intervals, KL against size on disk, and against bits a weight where parameters are known."""
    sized = {
        "size": ("KL against size", "size on disk", lambda each: each.bytes_on_disk),
        "bits": ("KL against bits a weight", "bits a weight on disk", lambda each: each.bits_per_weight),
    }
    charts = [_ranking_chart(sweep)] if sweep.ranking else []
    for name, (title, x_title, x_of) in sized.items():
        points = [
            (place, candidate, float(x_of(candidate)))
            for place, candidate in enumerate(sweep.ranking, 1)
            if x_of(candidate) is not None
        ]
        if points:
            charts.append(_scatter(name, title, x_title, sweep, sorted(points, key=itemgetter(2))))
    return charts


def _ranking_chart(sweep: Sweep) -> Chart:
    """A row for each candidate, the smallest KL first."""
    ranking, names = sweep.ranking[:MAX_CANDIDATES], names_of_candidates(sweep, MAX_NAME)
    left_out = len(sweep.ranking) - len(ranking)
    numbers = [candidate.numbers[sweep.rank_by] for candidate in ranking]
    labels = [
        f"{place}  {keep_end(names[candidate.number], MAX_NAME)}  {candidate.letters}".rstrip()
        for place, candidate in enumerate(ranking, 1)
    ]
    return Chart(
        name="ranking",
        title=f"{label_of(sweep.rank_by)} of each candidate",
        panels=(partial(_draw_ranking, numbers=numbers, labels=labels, rank_by=label_of(sweep.rank_by)),),
        height=row_height(len(ranking)),
        description="The smallest first, with 95 % intervals."
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
    has_zero = any(candidate.numbers[rank_by].value == 0 for _, candidate, _ in points)
    return Chart(
        name=name,
        title=title,
        panels=(
            partial(_draw_scatter, points=points, rank_by=rank_by, x_title=x_title, is_bytes=name == "size"),
        ),
        height=3.6,
        description="Numbers beside the dots are places in the ranking."
        + (" A KL of 0 has no place on a logarithmic axis." if has_zero else ""),
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
                format_count(int(x)) if name == "size" else f"{x:.2f}",
                format_with_interval(candidate.numbers[rank_by]),
                "yes" if candidate.is_on_pareto_front else "no",
            )
            for place, candidate, x in points
        ),
    )


def _draw_scatter(axes: Any, *, points: Sequence[Point], rank_by: str, x_title: str, is_bytes: bool) -> None:
    """Draw the candidates with their places in the ranking, and the Pareto front as a line."""
    numbers = [candidate.numbers[rank_by] for _, candidate, _ in points]
    front = [
        (x, candidate.numbers[rank_by].value) for _, candidate, x in points if candidate.is_on_pareto_front
    ]
    line(axes, [x for x, _ in front], [y for _, y in front], color=MUTED, drawstyle="steps-post", linewidth=1)
    for color, is_on_front, label in ((ACCENT, True, "on the Pareto front"), (INK, False, "not on it")):
        chosen = [
            (candidate.numbers[rank_by], x)
            for _, candidate, x in points
            if candidate.is_on_pareto_front == is_on_front
        ]
        if chosen:
            dots(axes, chosen, color=color, label=label)
    log_axis(axes, "y", shown_ends(numbers))
    if is_bytes:
        log_axis(axes, "x", [x for _, _, x in points], partial(format_bytes, is_round=True))
    label_points(axes, [(str(place), x, candidate.numbers[rank_by].value) for place, candidate, x in points])
    name_axes(axes, x_title, f"{label_of(rank_by)}, nats per token")


def names_of_candidates(sweep: Sweep, length: int = 40) -> dict[int, str]:
    """A short name of each candidate, by its number."""
    shown = short_names([candidate.name for candidate in sweep.candidates], length)
    return {candidate.number: name for candidate, name in zip(sweep.candidates, shown, strict=True)}


def describe_attribution(attribution: Attribution, name: str) -> str:
    """Which group the KL of a candidate that was attributed comes from, in a sentence."""
    statistic = label_of(attribution.statistic)
    if not attribution.has_changes:
        return f"All weights of {name} are those of the reference."
    first = next((group for group in attribution.largest_first if group.simultaneous_ci95[1] < 0), None)
    if first is None:
        return f"No group of weights alone lowers the {statistic} of {name} by more than the noise of the sample."
    share = attribution.share_of(first)
    removed = f"{format_percent(share)} of" if share < 1 else "all of"
    return (
        f"Swapping {first.name} back to the reference's weights removes {removed} the {statistic} of {name}."
    )


def attribution_chart(sweep: Sweep, attribution: Attribution, name: str) -> Chart:
    """The change of each group: by layer from left to right, or a row for each kind of module."""
    is_by_layer = attribution.grouping == "layers"
    groups = attribution.groups if is_by_layer else tuple(attribution.largest_first)
    numbers = [group.simultaneous_change for group in groups]
    names = [group.name for group in groups]
    table = attribution_table(sweep, attribution)
    return Chart(
        name=f"attribution-{attribution.candidate}-{attribution.grouping}",
        title=f"{name} by {attribution.grouping}",
        panels=(partial(_draw_layers if is_by_layer else _draw_modules, names=names, changes=numbers),),
        height=3.0 if is_by_layer else row_height(len(groups)),
        description="Change with each group swapped back, with simultaneous 95 % intervals; below 0 the group's "
        "weights add to the KL.",
        header=table.header,
        rows=table.rows,
    )


def _draw_layers(axes: Any, *, names: Sequence[str], changes: Sequence[Estimate]) -> None:
    """Draw the layers from left to right; other groups are named on a line of their own."""
    labels = [name.removeprefix("layer ") for name in names]
    step = 2 ** max(0, math.ceil(math.log2(max(1, len(names)) / MAX_LABELLED_LAYERS)))
    ticks = [at for at, label in enumerate(labels) if not label.isdigit() or int(label) % step == 0]
    texts = [labels[at] if labels[at].isdigit() else f"\n{make_visible(labels[at])}" for at in ticks]
    dots(axes, zip(changes, range(len(changes)), strict=True))
    axes.axhline(0, color=INK, linewidth=1)
    axes.set_xticks(ticks, texts)
    axes.grid(visible=False, axis="x")
    name_axes(axes, "layer", CHANGE)


def _draw_modules(axes: Any, *, names: Sequence[str], changes: Sequence[Estimate]) -> None:
    """Draw a row for each kind of module."""
    row_dots(axes, names, {CHANGE: changes})
    axes.axvline(0, color=INK, linewidth=1)
    name_axes(axes, CHANGE, "")
