"""The summaries of a measurement and a comparison on the terminal."""

import math
from pathlib import Path

from rich.console import Console
from rich.measure import Measurement as Width
from rich.padding import Padding
from rich.table import Table

from kleash.cli.numbers import terminal_sentence
from kleash.cli.terminal import Terminal, on_one_line, remark, say
from kleash.reports.gate_verdicts import describe_gate
from kleash.reports.measurement import describe_sample_size
from kleash.store import ComparedRun, Comparison, Gate, Measurement
from kleash.store.anchors import scale_sentence
from kleash.store.measurement_summary import (
    all_warnings,
    headline,
    headline_name,
    left_out_sentences,
    summary_numbers,
    upper_bound,
)
from kleash.store.number import cells, with_error
from kleash.store.result_summaries import comparison_warnings
from kleash.store.statistics import PERPLEXITIES, kl_directions, label_of
from kleash.uncertainty import Estimate

MAX_TABLE_COLUMNS = 200
COLOURS = {"passed": "green", "failed": "red", "undecided": "yellow"}
"""Verdict of a gate -> its colour."""
NO_INTERVAL = "no interval: one cluster alone does not show how much clusters differ"


def print_measurement(measurement: Measurement, folder: Path) -> None:
    """Print the numbers of a measurement with intervals, its warnings, and the path of the report."""
    console = Terminal()
    console.print()
    label = label_of(headline_name(measurement))
    say(console, f"{label} per token: {interval_first(headline(measurement))}", style="bold")
    upper = upper_bound(measurement)
    if upper is not None:
        label = label_of(f"{measurement.headline}_upper")
        shown = interval_first(upper) if math.isfinite(upper.value) else str(upper.value)
        say(console, f"{label} per token: {shown}", style="bold")
    for role, model in measurement.models.items():
        device = f" on {measurement.device}" if measurement.device else ""
        say(console, f"{role}: {model.path} ({model.dtype}{device})")
    console.print(on_one_line(measurement.estimand), style="dim")
    sample_size = describe_sample_size(measurement).replace("\u202f", ",")
    console.print(f"{measurement.counts.tokens:,} tokens in {sample_size}", style="dim")
    print_table(console, _measurement_table(measurement))
    if measurement.headline in measurement.quantiles:
        say(console, _quantiles_line(measurement))
    if scale := scale_sentence(measurement):
        say(console, f"for scale: {scale}")
    for sentence in left_out_sentences(measurement):
        remark(console, "left out", sentence)
    for warning in all_warnings(measurement):
        remark(console, "warning", warning)
    if measurement.gate is not None:
        print_gate(measurement.gate)
    say(console, f"report: {folder / 'report.html'}")


def print_gate(gate: Gate, name: str = "") -> None:
    """Print the verdict of a gate with the numbers that decided it.

    Args:
        gate: the gate.
        name: of the run, where several are compared.
    """
    sentence = terminal_sentence(describe_gate(gate))
    remark(Terminal(), f"gate, {name}" if name else "gate", sentence, COLOURS[gate.verdict])


def interval_first(number: Estimate) -> str:
    """The 95 % interval, the value and its standard error; without an interval, the value and the reason."""
    value, interval, error, unit = cells(number)
    unit = f" {unit}" if unit else ""
    if not interval:
        return f"{value}{unit} ({NO_INTERVAL})"
    return f"{interval}{unit} (95 % interval), mean {value}, standard error {error or 'unknown'}"


def print_table(console: Console, table: Table) -> None:
    """Print a table in its full width; on a narrower terminal lines are broken, and no text is cut off."""
    width = Width.get(console, console.options.update(max_width=MAX_TABLE_COLUMNS), table).maximum
    Terminal(width=max(width, console.width)).print(Padding(table, (1, 0)))


def _quantiles_line(measurement: Measurement) -> str:
    """Quantiles of the KL over tokens and the share of the top 1 %, on one line."""
    quantiles = measurement.quantiles[measurement.headline]
    levels = [("median", "50"), ("99 %", "99"), ("99.9 %", "99.9"), ("largest", "max")]
    values = ", ".join(f"{label} {quantiles[level].value:.3g}" for label, level in levels)
    share = measurement.top_percent_share
    top_share = "" if math.isnan(share) else f"; the 1 % with the most hold {share:.0%} of the KL"
    return f"tokens: {values} nats{top_share}"


def _measurement_table(measurement: Measurement) -> Table:
    """The table of a measurement's numbers."""
    table = Table(box=None, pad_edge=False)
    for heading in ("", "mean", "95 % interval", "standard error", ""):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    is_one_cluster = measurement.counts.clusters < 2
    for label, number in summary_numbers(measurement):
        _row(table, label, number, is_one_cluster=is_one_cluster)
    return table


def _row(table: Table, title: str, number: Estimate, *, is_one_cluster: bool) -> None:
    """Add a number's row; with one cluster the interval is unknown, even if the number has bounds."""
    value, interval, error, unit = cells(number)
    interval = interval if interval and not is_one_cluster else "unknown"
    table.add_row(title, value, interval, error or "unknown", unit)


def print_comparison(comparison: Comparison, page: Path) -> None:
    """Print each run's KL and perplexities and their differences from the first run."""
    console = Terminal()
    for name in kl_directions(comparison.headline):
        print_table(console, _kl_table(comparison, name))
    if any(name in run.numbers for run in comparison.runs for name in PERPLEXITIES):
        print_table(console, _perplexity_table(comparison))
    say(
        console,
        "± is one standard error; a difference whose interval contains 0 is not significant",
        style="dim",
    )
    for warning in comparison_warnings(comparison):
        remark(console, "warning", warning)
    for run in comparison.runs:
        if run.gate is not None:
            print_gate(run.gate, run.name)
    say(console, f"page: {page}")


def _kl_table(comparison: Comparison, name: str) -> Table:
    """The table of each run's KL of a direction and its difference from the first run."""
    table = Table(box=None, pad_edge=False)
    for heading in (
        "run",
        label_of(name).replace(" ‖ ", " ‖\n"),
        "difference from\nthe first",
        "95 % interval",
        comparison.paired_noun,
    ):
        table.add_column(heading, justify="left" if heading == "run" else "right", no_wrap=True)
    first, *later_runs = comparison.runs
    table.add_row(first.name, _kl_cell(first, name), "", "", str(first.counts.prompts))
    for run, difference in zip(later_runs, comparison.differences, strict=True):
        number = difference.differences.get(name)
        shown = "unknown" if number is None else with_error(number)
        interval = "unknown" if number is None else cells(number)[1] or "unknown"
        shared_prompts = f"{difference.shared_prompts} shared"
        table.add_row(run.name, _kl_cell(run, name), shown, interval, shared_prompts)
    return table


def _kl_cell(run: ComparedRun, name: str) -> str:
    """A run's KL of a direction with its standard error, or the range between its bounds."""
    if name in run.numbers:
        return with_error(run.numbers[name])
    low, high = (run.numbers[f"{name}_{end}"] for end in ("lower", "upper"))
    return f"{low.rounded} to {high.rounded} {low.unit}"


def _perplexity_table(comparison: Comparison) -> Table:
    """The table of each run's perplexities."""
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
    for index, run in enumerate(comparison.runs):
        values = [with_error(run.numbers[name]) if name in run.numbers else "" for name in PERPLEXITIES]
        number = comparison.differences[index - 1].differences.get(PERPLEXITIES[0]) if index else None
        difference = ("", "") if number is None else (with_error(number), cells(number)[1] or "unknown")
        table.add_row(run.name, *values, *difference)
    return table
