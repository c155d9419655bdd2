"""Printing a result: its summary and the verdicts of its gates on the terminal, or a format of ``--format``."""

import sys
from dataclasses import replace
from pathlib import Path
from textwrap import wrap

from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.table import Column, Table

from kleash.cli.terminal import Terminal, remark, say, terminal_sentence
from kleash.errors import OptionError, on_one_line
from kleash.reports.formatting import as_sentence, keep_end, repeating_command
from kleash.reports.gate_verdicts import describe_gate, describe_sweep_gate
from kleash.reports.text_formats import model_card, to_csv, to_markdown
from kleash.store import Comparison, Measurement, MismatchRecord, TrainingResult
from kleash.store.measurement import Verdict
from kleash.store.number_rows import NumericResult, number_rows
from kleash.store.summary import GATE, Name, Summary, SummaryTable, summarize
from kleash.store.sweep import Sweep

MAX_TABLE_COLUMNS = 200
FOLDED = 14
"""Columns of the names in a table that is wider than the terminal."""
MAX_ROWS = 40
"""Rows of a table that are printed."""
MAX_NAME = 40
"""Characters of a name in a table, of which the end is printed."""
COLOURS = {"passed": "green", "failed": "red", "undecided": "yellow"}
"""Verdict of a gate -> its colour."""


def print_summary(result: NumericResult | TrainingResult, page: Path | None = None) -> None:
    """Print the headline of a result, its facts, tables, warnings and gates, and the path of its page."""
    print_texts(summarize(result))
    print_gates(result)
    if page is not None:
        say(Terminal(), f"page: {page}")


def print_texts(summary: Summary) -> None:
    """Print the headline of a summary, its facts but gates, its tables and warnings."""
    console = Terminal()
    console.print()
    say(console, summary.headline, style="bold")
    for label, text in summary.facts:
        if not label.startswith(GATE):
            remark(console, label, text, "dim")
    for table in summary.tables:
        _print_summary_table(console, table)
    for warning in summary.warnings:
        remark(console, "warning", warning)


def print_gates(result: NumericResult | TrainingResult) -> None:
    """Print the verdict of each gate of a result with the numbers that decided it."""
    for label, gate, sentence in gates_of(result):
        remark(Terminal(), label, terminal_sentence(sentence), COLOURS[gate.verdict])


def _print_summary_table(console: Console, table: SummaryTable) -> None:
    """Print a table, in a terminal with its first column folded; one with sentences as a paragraph for each row."""
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
        room = console.width if console.is_terminal else MAX_TABLE_COLUMNS
        names, *columns = ([*map(_cell, column)] for column in zip(table.header, *rows, strict=True))
        for part in _parts(names, columns, room):
            headings, *cells = zip(*part, strict=True)
            printed = Table(
                Column(headings[0], overflow="fold"),
                *(Column(heading, justify="right", no_wrap=True) for heading in headings[1:]),
                box=None,
                pad_edge=False,
            )
            for row in cells:
                printed.add_row(*row)
            width = max(_width(part, FOLDED), min(_width(part, room), room), console.width)
            Terminal(width=width).print(Padding(printed, (1, 0)))
    if len(table.rows) > MAX_ROWS:
        say(console, f"{len(table.rows) - MAX_ROWS} more rows: --json", style="dim")


def _parts(names: list[str], columns: list[list[str]], room: int) -> list[list[list[str]]]:
    """The columns of a table, each below its heading, in parts for which there is room, all with the names.

    The names can be folded; where that is not enough, the headings are, before a table is parted.
    """
    if _width([names, *columns], FOLDED) > room:
        columns = [
            ["\n".join(wrap(heading, max([1, *map(cell_len, cells)]), break_long_words=False)), *cells]
            for heading, *cells in columns
        ]
    parts = [[names]]
    for column in columns:
        if len(parts[-1]) > 1 and _width([*parts[-1], column], FOLDED) > room:
            parts.append([names])
        parts[-1].append(column)
    return parts


def _width(columns: list[list[str]], longest_name: int) -> int:
    """The width of a table, of whose names so much stands on one line."""
    names, *widths = (
        max(cell_len(line) for text in column for line in text.split("\n")) for column in columns
    )
    return min(names, longest_name) + sum(width + 2 for width in widths)


def _cell(text: str) -> str:
    """A text of a table on one line, with the end of a long name."""
    return on_one_line(keep_end(text, MAX_NAME) if isinstance(text, Name) and len(text) > MAX_NAME else text)


def print_formatted(result: NumericResult | TrainingResult, output_format: str) -> None:
    """Print a result on standard output, and the verdicts of gates on standard error where the format has none.

    Args:
        result: what is printed.
        output_format: one of those that the job of the result allows.

    Raises:
        OptionError: if the result lacks what the format needs.
        RunFolderError: if a file that the format needs is missing or damaged.
    """
    sys.stdout.write(formatted(result, output_format))
    if output_format not in ("json", "markdown"):
        for sentence in gate_sentences(result):
            print(f"kleash: {sentence}", file=sys.stderr)


def formatted(result: NumericResult | TrainingResult, output_format: str) -> str:
    """A result in a format; arguments and errors as for ``print_formatted``."""
    match output_format:
        case "json":
            return result.to_json()
        case "csv" if isinstance(result, NumericResult):
            return to_csv(number_rows(result))
        case "markdown" if isinstance(result, NumericResult):
            return to_markdown(_summary_with_command(result), tuple(map(as_sentence, gate_sentences(result))))
        case "model-card" if isinstance(result, Measurement):
            return model_card(result)
        case "llama.cpp" if isinstance(result, Measurement):
            from kleash.measuring.llama_cpp_summary import llama_cpp_text

            return llama_cpp_text(result)
        case _:
            where = "; of a sweep, name the folder of a candidate" if isinstance(result, Sweep) else ""
            raise OptionError(f"--format {output_format} is for one measurement{where}")


def _summary_with_command(result: NumericResult) -> Summary:
    """The summary of a result with the version of kleash and the command that repeats it, where they are recorded."""
    summary = summarize(result)
    facts = (fact for fact in summary.facts if not fact[0].startswith(GATE))  # sentences follow
    command = (("command", Name(repeating_command(result))),) if isinstance(result, Measurement) else ()
    return replace(summary, facts=(*facts, ("kleash", result.kleash), *command))


def gate_sentences(result: NumericResult | TrainingResult) -> list[str]:
    """The verdicts of a result's gates, in sentences with the spaces and minus signs of the terminal."""
    return [f"{label}: {terminal_sentence(sentence)}" for label, _, sentence in gates_of(result)]


def gates_of(result: NumericResult | TrainingResult) -> list[tuple[str, Verdict, str]]:
    """The gates of a result: a label, which names the run where there are several, the verdict, and its sentence."""
    if isinstance(result, Sweep):
        return [] if result.gate is None else [(GATE, result.gate, describe_sweep_gate(result))]
    gates = [(GATE, result.gate)] if isinstance(result, Measurement | MismatchRecord) else []
    if isinstance(result, Comparison):
        gates = [(f"{GATE}, {run.name}", run.gate) for run in result.runs]
    return [(label, gate, describe_gate(gate)) for label, gate in gates if gate is not None]
