"""What a person reads at the end of a run."""

import math
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement as Width
from rich.padding import Padding
from rich.table import Table

from kleash.records import Comparison, Measurement, Number

WIDEST = 200
PER_TOKEN = {
    "kl_policy_reference": "KL(policy || reference)",
    "kl_reference_policy": "KL(reference || policy)",
    "jensen_shannon": "Jensen-Shannon",
    "total_variation": "total variation",
    "entropy_policy": "entropy of the policy",
    "entropy_reference": "entropy of the reference",
}


def print_measurement(measurement: Measurement, folder: Path) -> None:
    """The numbers with their intervals, what to doubt about them, and where the rest lies."""
    console = Console(highlight=False)
    counts = measurement.counts
    console.print()
    console.print(
        f"[bold]{measurement.per_token['kl_policy_reference']}[/bold] per token: KL(policy || reference)",
        soft_wrap=True,
    )
    console.print(escape(measurement.estimand), style="dim")
    console.print(
        f"{counts.tokens:,} tokens in {counts.sequences:,} sequences, {counts.clusters:,} independent clusters",
        style="dim",
    )
    _print_whole(console, _numbers(measurement))
    console.print(_tail(measurement), soft_wrap=True)
    for doubt in _all_doubts(measurement):
        console.print(f"[yellow]doubt:[/yellow] {escape(doubt)}", soft_wrap=True)
    console.print(f"report: {escape(str(folder / 'report.html'))}", soft_wrap=True)


def _print_whole(console: Console, table: Table) -> None:
    """A table no narrower than its numbers: a terminal that is narrower breaks the lines, and nothing is cut off."""
    needed = Width.get(console, console.options.update(max_width=WIDEST), table).maximum
    Console(highlight=False, width=max(needed, console.width)).print(Padding(table, (1, 0)))


def _tail(measurement: Measurement) -> str:
    """How unevenly the KL is spread over tokens: a mean alone hides that."""
    ladder = measurement.quantiles["kl_policy_reference"]
    rungs = [("median", "50"), ("99 %", "99"), ("99.9 %", "99.9"), ("largest", "max")]
    steps = ", ".join(f"{name} {ladder[rung].value:.3g}" for name, rung in rungs)
    share = measurement.top_percent_share
    held = "" if math.isnan(share) else f"; the 1 % with the most hold {share:.0%} of the KL"
    return f"tokens: {steps} nats{held}"


def _numbers(measurement: Measurement) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("mean", justify="right", no_wrap=True)
    table.add_column("95 % interval", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for name, title in PER_TOKEN.items():
        _row(table, title, measurement.per_token[name])
    _row(table, "same likeliest token", measurement.top1_agreement)
    _row(table, "perplexity, policy / reference", measurement.perplexity["ratio"])
    if measurement.per_sequence is not None:
        _row(table, "KL per sequence", measurement.per_sequence.kl_policy_reference)
    if measurement.noise_floor is not None:
        _row(table, "noise floor (rounding alone)", measurement.noise_floor)
    if measurement.dtype_gap is not None:
        _row(table, "dtype gap (against float32)", measurement.dtype_gap)
    if measurement.estimators:
        table.add_section()
        for name, record in measurement.estimators.items():
            _row(table, f"{name} on these tokens", record.number)
    return table


def _row(table: Table, title: str, number: Number) -> None:
    low, high = (number.format(end) for end in number.ci95)
    table.add_row(title, number.rounded, f"{low} to {high}", number.unit if number.unit == "nats" else "")


def _all_doubts(measurement: Measurement) -> list[str]:
    headline = measurement.per_token["kl_policy_reference"]
    return list(dict.fromkeys([*measurement.doubts, *headline.doubts]))


def print_comparison(comparison: Comparison, page: Path) -> None:
    """Each run's KL, and how it differs from the first."""
    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False)
    for heading in (
        "run",
        "KL(policy ||\nreference)",
        "difference from\nthe first",
        "95 % interval",
        "prompts",
    ):
        table.add_column(heading, justify="left" if heading == "run" else "right", no_wrap=True)
    first, *others = comparison.runs
    name = "kl_policy_reference"
    table.add_row(escape(first.name), str(first.numbers[name]), "", "", str(first.counts.prompts))
    for run, difference in zip(others, comparison.differences, strict=True):
        number = difference.differences[name]
        low, high = (number.format(end) for end in number.ci95)
        table.add_row(
            escape(run.name),
            str(run.numbers[name]),
            str(number),
            f"{low} to {high}",
            f"{difference.shared_prompts} shared",
        )
    _print_whole(console, table)
    for doubt in dict.fromkeys(
        [*comparison.doubts, *(d for each in comparison.differences for d in each.doubts)]
    ):
        console.print(f"[yellow]doubt:[/yellow] {escape(doubt)}", soft_wrap=True)
    console.print(f"picture: {escape(str(page))}", soft_wrap=True)
