"""The summary of a result on the terminal, and the verdicts of its gates."""

from pathlib import Path

from rich.console import Console
from rich.measure import Measurement as Width
from rich.padding import Padding
from rich.table import Table

from kleash.cli.formats import gates_of
from kleash.cli.terminal import Terminal, on_one_line, remark, say, terminal_sentence
from kleash.store.number_rows import NumericResult
from kleash.store.summary_tables import SummaryTable, summarize

MAX_TABLE_COLUMNS = 200
MAX_ROWS = 40
"""Rows of a table that are printed."""
COLOURS = {"passed": "green", "failed": "red", "undecided": "yellow"}
"""Verdict of a gate -> its colour."""


def print_summary(result: NumericResult, page: Path | None = None) -> None:
    """Print the headline of a result, its facts, tables, warnings and gates, and the path of its page."""
    console, summary = Terminal(), summarize(result)
    console.print()
    say(console, summary.headline, style="bold")
    for label, text in summary.facts:
        if not label.startswith("gate"):
            remark(console, label, text, "dim")
    for table in summary.tables:
        _print_summary_table(console, table)
    for warning in summary.warnings:
        remark(console, "warning", warning)
    print_gates(result)
    if page is not None:
        say(console, f"page: {page}")


def print_gates(result: NumericResult) -> None:
    """Print the verdict of each gate of a result with the numbers that decided it."""
    for label, gate, sentence in gates_of(result):
        remark(Terminal(), label, terminal_sentence(sentence), COLOURS[gate.verdict])


def _print_summary_table(console: Console, table: SummaryTable) -> None:
    """Print a table; one with sentences as a paragraph for each row."""
    if table.title:
        say(console, f"{table.title}:")
    rows, (_, *has_sentences) = table.rows[:MAX_ROWS], table.is_left
    if any(has_sentences):
        for title, *texts in rows:
            console.print()
            say(console, title, style="bold")
            for heading, text in zip(table.header[1:], texts, strict=True):
                say(console, f"   {heading}: {text}")
    else:
        columns = Table(box=None, pad_edge=False)
        for heading, is_left in zip(table.header, table.is_left, strict=True):
            columns.add_column(heading, justify="left" if is_left else "right", no_wrap=True)
        for row in rows:
            columns.add_row(*map(on_one_line, row))
        print_table(console, columns)
    if len(table.rows) > MAX_ROWS:
        say(console, f"{len(table.rows) - MAX_ROWS} more rows: --format json", style="dim")


def print_table(console: Console, table: Table) -> None:
    """Print a table in its full width; on a narrower terminal lines are broken, and no text is cut off."""
    width = Width.get(console, console.options.update(max_width=MAX_TABLE_COLUMNS), table).maximum
    Terminal(width=max(width, console.width)).print(Padding(table, (1, 0)))
