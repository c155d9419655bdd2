"""The attributions of a sweep on its page and in the terminal: which groups of weights a candidate's KL comes from."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from kleash.estimate import Estimate
from kleash.reports.drawing import INK, Chart, dots, name_axes, row_dots, row_height
from kleash.reports.formatting import (
    UNKNOWN,
    format_count,
    format_percent,
    format_with_interval,
    make_visible,
    nan_as_minimum,
    short_names,
)
from kleash.store.attribution import Attribution, GroupChange
from kleash.store.statistics import label_of
from kleash.store.sweep import Sweep

CHANGE = "change of the KL, nats per token"
MAX_LABELLED_LAYERS = 14
"""Layers of which each has a label on the axis; of more, every second, fourth, ... has."""


def largest_first(attribution: Attribution) -> list[GroupChange]:
    """The groups in the order of what they add to the KL, the largest part first."""
    return sorted(attribution.groups, key=lambda group: nan_as_minimum(group.change.value))


def shown_attributions(sweep: Sweep) -> list[Attribution]:
    """The attributions of a sweep; where those of a candidate failed, the first alone."""
    shown = [attribution for attribution in sweep.attributions if not attribution.failure]
    failed = {
        attribution.candidate: attribution
        for attribution in reversed(sweep.attributions)
        if attribution.failure
    }
    return [*shown, *reversed(failed.values())]


def name_of_candidate(sweep: Sweep, attribution: Attribution) -> str:
    """The name of the candidate of an attribution."""
    return names_of_candidates(sweep).get(attribution.candidate, f"candidate {attribution.candidate}")


def names_of_candidates(sweep: Sweep, length: int = 40, without: str = "") -> dict[int, str]:
    """A short name of each candidate, by its number.

    Args:
        sweep: of the candidates.
        length: characters of a name.
        without: an ending that is left out, unless two names are equal then.
    """
    names = [candidate.name for candidate in sweep.candidates]
    stems = [name.removesuffix(without) or name for name in names]
    shown = short_names(stems if len(set(stems)) == len(set(names)) else names, length)
    return {candidate.number: name for candidate, name in zip(sweep.candidates, shown, strict=True)}


def added_warnings(sweep: Sweep, attribution: Attribution) -> list[str]:
    """The warnings of an attribution that the sweep itself does not have."""
    return [warning for warning in attribution.warnings if warning not in sweep.warnings]


def format_share(attribution: Attribution, group: GroupChange) -> str:
    """The part of the candidate's KL that is gone with a group swapped, such as "61.2 %"."""
    share = attribution.share_of(group)
    return UNKNOWN if math.isnan(share) else format_percent(share)


def describe_attribution(attribution: Attribution, name: str) -> str:
    """Which group a candidate's KL comes from, in a sentence."""
    statistic = label_of(attribution.statistic)
    if attribution.failure:
        return f"The {statistic} of {name} was not attributed: {attribution.failure}."
    if not attribution.has_changes:
        return f"All weights of {name} are those of the reference."
    clear = [group for group in largest_first(attribution) if group.simultaneous_ci95[1] < 0]
    if not clear:
        return f"No group of weights alone lowers the {statistic} of {name} by more than the noise of the sample."
    first = clear[0]
    share = attribution.share_of(first)
    removed = f"{format_percent(share)} of" if share < 1 else "all of"
    return (
        f"Swapping {first.name} back to the reference's weights removes {removed} the {statistic} of {name}."
    )


def describe_sum(attribution: Attribution) -> str:
    """Whether the changes of single groups add up to that of all groups together, in a sentence."""
    total, all_groups, interaction = (
        attribution.sum_of_changes,
        attribution.change_of_all,
        attribution.interaction,
    )
    if total is None or all_groups is None or interaction is None:
        return ""
    different = [group.name for group in attribution.groups if not group.is_identical]
    if len(different) < 2:
        return f"No weights but those of {different[0]} differ from the reference's." if different else ""
    low, high = interaction.ci95
    verdict = (
        f"they do not add up: the difference is {format_with_interval(interaction)}"
        if low > 0 or high < 0
        else f"the difference, {format_with_interval(interaction)}, is within the noise of the sample"
    )
    return (
        f"Single changes sum to {format_with_interval(total)} nats per token, and swapping all groups at once changes "
        f"the KL by {format_with_interval(all_groups)}; {verdict}. Errors of several groups can reinforce or cancel "
        "each other, so shares need not sum to 100 %."
    )


def describe_control(attribution: Attribution) -> str:
    """What a second pass without a swap changed, in a sentence."""
    if attribution.control is None:
        return ""
    is_zero = attribution.control.value == 0
    change = "exactly 0" if is_zero else f"{format_with_interval(attribution.control)} nats per token"
    return f"Control: a second pass without a swap changed {change}."


def attribution_chart(attribution: Attribution, name: str) -> Chart:
    """The change of each group: by layer from left to right, or a row for each kind of module."""
    is_by_layer = attribution.grouping == "layers"
    groups = attribution.groups if is_by_layer else tuple(largest_first(attribution))
    numbers = [group.simultaneous_change for group in groups]
    names = [group.name for group in groups]
    return Chart(
        name=f"attribution-{attribution.candidate}-{attribution.grouping}",
        title=f"{name} by {attribution.grouping}",
        panels=(partial(_draw_layers if is_by_layer else _draw_modules, names=names, changes=numbers),),
        height=3.0 if is_by_layer else row_height(len(groups)),
        description="Change with each group swapped back, with simultaneous 95 % intervals; below 0 the group's "
        "weights add to the KL.",
        header=("Group", "Weights", "Change", "Share of the KL"),
        rows=tuple(
            (
                group.name,
                format_count(group.parameters),
                "0 (identical)" if group.is_identical else format_with_interval(group.simultaneous_change),
                format_share(attribution, group),
            )
            for group in largest_first(attribution)
        ),
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
