"""What a person reads at the end of a run."""

import math
from pathlib import Path

from rich.console import Console
from rich.measure import Measurement as Width
from rich.padding import Padding
from rich.table import Table

from kleash.cli.numbers import cells, named, with_error
from kleash.cli.terminal import Terminal, remark, say
from kleash.reports.comparison import paired_noun
from kleash.reports.measurement import (
    all_warnings,
    describe_sample_size,
    headline,
    merge_warnings,
    statistic_rows,
)
from kleash.store import PERPLEXITIES, Comparison, Measurement, Number
from kleash.store.statistics import label_of

WIDEST = 200
KL = "kl_policy_reference"
NO_INTERVAL = "no interval: one cluster alone does not show how much clusters differ"


def print_measurement(measurement: Measurement, folder: Path) -> None:
    """The numbers with their intervals, the warnings about them, and where the rest lies."""
    console = Terminal()
    console.print()
    say(console, f"{named(KL)} per token: {interval_first(headline(measurement))}", style="bold")
    for role, model in measurement.models.items():
        where = f" on {measurement.device}" if measurement.device else ""
        say(console, f"{role}: {model.path} ({model.dtype}{where})")
    console.print(measurement.estimand, style="dim")
    amount = describe_sample_size(measurement).replace("\u202f", ",")
    console.print(f"{measurement.counts.tokens:,} tokens in {amount}", style="dim")
    _print_whole(console, _numbers(measurement))
    say(console, _tail(measurement))
    for warning in all_warnings(measurement):
        remark(console, "warning", named(warning))
    say(console, f"report: {folder / 'report.html'}")


def interval_first(number: Number) -> str:
    """The 95 % interval, then the value and its standard error; in words where there is no interval."""
    value, interval, error, unit = cells(number)
    unit = f" {unit}" if unit else ""
    if not interval:
        return f"{value}{unit} ({NO_INTERVAL})"
    return f"{interval}{unit} (95 % interval), mean {value}, standard error {error or 'unknown'}"


def _print_whole(console: Console, table: Table) -> None:
    """A table no narrower than its numbers: a terminal that is narrower breaks the lines, and nothing is cut off."""
    needed = Width.get(console, console.options.update(max_width=WIDEST), table).maximum
    Terminal(width=max(needed, console.width)).print(Padding(table, (1, 0)))


def _tail(measurement: Measurement) -> str:
    """How unevenly the KL is spread over tokens: a mean alone hides that."""
    ladder = measurement.quantiles[KL]
    rungs = [("median", "50"), ("99 %", "99"), ("99.9 %", "99.9"), ("largest", "max")]
    steps = ", ".join(f"{name} {ladder[rung].value:.3g}" for name, rung in rungs)
    share = measurement.top_percent_share
    part = "" if math.isnan(share) else f"; the 1 % with the most hold {share:.0%} of the KL"
    return f"tokens: {steps} nats{part}"


def _numbers(measurement: Measurement) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("", "mean", "95 % interval", "standard error", ""):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    alone = measurement.counts.clusters < 2
    for row in statistic_rows(measurement):
        if row.in_summary:
            _row(table, row.label, row.number, alone=alone)
    if measurement.per_sequence is not None:
        _row(table, "KL per sequence", measurement.per_sequence.kl_policy_reference, alone=alone)
    if measurement.noise_floor is not None:
        _row(table, "Noise floor (rounding alone)", measurement.noise_floor, alone=alone)
    if measurement.dtype_gap is not None:
        _row(table, "Gap to float32", measurement.dtype_gap, alone=alone)
    for name, record in measurement.estimators.items():
        _row(table, f"Estimator {name}, same tokens", record.number, alone=alone)
    return table


def _row(table: Table, title: str, number: Number, *, alone: bool) -> None:
    """A number's row; with one cluster ``alone`` there is no interval, whatever bounds the number has."""
    value, interval, error, unit = cells(number)
    known = interval if interval and not alone else "unknown"
    table.add_row(named(title), value, known, error or "unknown", unit)


def print_comparison(comparison: Comparison, page: Path) -> None:
    """Each run's KL and perplexities, and how they differ from the first run's."""
    console = Terminal()
    _print_whole(console, _compared(comparison, paired_noun(comparison)))
    if any(name in run.numbers for run in comparison.runs for name in PERPLEXITIES):
        _print_whole(console, _perplexities(comparison))
    say(console, "± is one standard error; a difference whose interval holds 0 may be none", style="dim")
    for warning in dict.fromkeys(comparison_warnings(comparison)):
        remark(console, "warning", named(warning))
    say(console, f"picture: {page}")


def comparison_warnings(comparison: Comparison) -> list[str]:
    """What is held against the comparison, its differences and its runs."""
    of_differences = [
        f"{each.name} minus {each.minus}: {warning}"
        for each in comparison.differences
        for warning in merge_warnings((label_of(name), number) for name, number in each.differences.items())
    ]
    return [
        *comparison.warnings,
        *(warning for each in comparison.differences for warning in each.warnings),
        *of_differences,
        *(f"{run.name}: {warning}" for run in comparison.runs for warning in run.warnings),
    ]


def _compared(comparison: Comparison, noun: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("run", "KL(policy ||\nreference)", "difference from\nthe first", "95 % interval", noun):
        table.add_column(heading, justify="left" if heading == "run" else "right", no_wrap=True)
    first, *later_runs = comparison.runs
    table.add_row(first.name, with_error(first.numbers[KL]), "", "", str(first.counts.prompts))
    for run, difference in zip(later_runs, comparison.differences, strict=True):
        number = difference.differences[KL]
        interval = cells(number)[1] or "unknown"
        shared = f"{difference.shared_prompts} shared"
        table.add_row(run.name, with_error(run.numbers[KL]), with_error(number), interval, shared)
    return table


def _perplexities(comparison: Comparison) -> Table:
    table = Table(box=None, pad_edge=False)
    headings = (
        "run",
        "perplexity of\nthe policy",
        "of the\nreference",
        "ratio",
        "difference of the\npolicy's",
        "",
    )
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "run" else "right", no_wrap=True)
    for place, run in enumerate(comparison.runs):
        values = [with_error(run.numbers[name]) if name in run.numbers else "" for name in PERPLEXITIES]
        number = comparison.differences[place - 1].differences.get(PERPLEXITIES[0]) if place else None
        difference = ("", "") if number is None else (with_error(number), cells(number)[1] or "unknown")
        table.add_row(run.name, *values, *difference)
    return table
