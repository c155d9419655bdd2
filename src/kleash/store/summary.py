"""What a person reads of a result: numbers as text, a summary of tables, and its HTML in notebooks."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import singledispatch
from html import escape
from importlib import import_module
from typing import Any, ClassVar

from kleash.errors import on_one_line, printable
from kleash.estimate import Estimate
from kleash.store.codec import encode, to_json

NO_INTERVAL = "no interval: one cluster alone does not show how much clusters differ"
UNKNOWN_INTERVAL = "unknown"
NUMBER_HEADER = ("", "value", "95 % interval", "standard error", "unit")
"""Header of a table whose rows are numbers."""
GATE = "gate"
"""Beginning of the labels of facts about gates, which the terminal prints after the others, with their numbers."""
TEXT_ROWS, REPR_LINES = 5, 6
"""Rows of a table in a summary as text, and lines of a ``repr``."""
MAX_WORDS = 40
"""Characters of a text that is a number or a few words, and no sentence."""
LINE = "1px solid rgba(128,128,128,.4)"
"""A line that is seen on a light and on a dark page."""
CELL = "padding:.15em .6em;text-align:{align};vertical-align:top;white-space:{wrap};border-bottom:" + LINE


def to_display_unit(number: Estimate) -> tuple[Estimate, str]:
    """``number`` in the unit in which it is displayed, and that unit: probabilities in percent."""
    if number.unit != "probability":
        return number, "" if number.unit == "none" else number.unit
    low, high = number.ci95
    percentages = replace(
        number,
        value=100 * number.value,
        standard_error=100 * number.standard_error,
        ci95=(100 * low, 100 * high),
    )
    return percentages, "%"


def cells(number: Estimate) -> tuple[str, str, str, str]:
    """Value, 95 % interval, standard error and unit as text; unknown ones are empty.

    So is an interval with an infinite end and without a standard error, as of one cluster, which says nothing.
    """
    number, unit = to_display_unit(number)
    low, high = (number.format(end) for end in number.ci95)
    is_one_cluster = math.isnan(number.standard_error) and any(map(math.isinf, number.ci95))
    has_interval = not is_one_cluster and not any(map(math.isnan, number.ci95))
    error = number.format(number.standard_error) if number.has_error else ""
    return number.rounded, f"{low} to {high}" if has_interval else "", error, unit


def with_error(number: Estimate) -> str:
    """The value with its standard error, if it has one, and its unit: "0.218 ± 0.0097 nats"."""
    value, _, error, unit = cells(number)
    return f"{value} ± {error} {unit}".rstrip() if error else f"{value} {unit}".rstrip()


def with_interval(number: Estimate) -> str:
    """The value with its unit and its 95 % interval: "0.218 nats (95 % interval 0.199 to 0.237)"."""
    value, interval, _, unit = cells(number)
    text = f"{value} {unit}".rstrip()
    if interval or number.clusters != 1:
        return f"{text} (95 % interval {interval or UNKNOWN_INTERVAL})"
    return f"{text} ({NO_INTERVAL})"


class Name(str):
    """A text that is no sentence of kleash, such as a path: shown as it is, in the style of code."""

    __slots__ = ()


@dataclass(frozen=True, kw_only=True)
class SummaryTable:
    """A table of texts."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    """As wide as the header; a ``Name`` is a text of others."""
    title: str = ""

    @property
    def is_left(self) -> tuple[bool, ...]:
        """Whether each column is aligned to the left: the first one, and those of sentences."""
        return tuple(
            place == 0 or any(len(row[place]) > MAX_WORDS for row in self.rows)
            for place in range(len(self.header))
        )


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a person reads of a result."""

    headline: str
    """The result in one line."""
    facts: tuple[tuple[str, str], ...] = ()
    """What it is about: label and text."""
    tables: tuple[SummaryTable, ...] = ()
    warnings: tuple[str, ...] = ()


@singledispatch
def summarize(result: object) -> Summary:
    """The summary of a result of kleash; ``kleash.store.result_summaries`` has those of all kinds.

    Raises:
        TypeError: if ``result`` is none.
    """
    raise TypeError(f"{type(result).__name__} is no result of kleash")


def plain_text(text: str) -> str:
    """``text`` in characters that every encoding of Unicode has: what is left of undecodable bytes becomes U+FFFD."""
    return re.sub("[\ud800-\udfff]", "\ufffd", text)


def counted(number: int, noun: str) -> str:
    """A number with its noun in the singular or plural."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


class JSONRecord:
    """A record as it stands in JSON."""

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return encode(self)

    def to_json(self) -> str:
        """As JSON text; non-finite numbers are strings."""
        return to_json(self)


class Result(JSONRecord):
    """A result in JSON, and as a prompt and a notebook show it: headline, facts, tables and warnings."""

    views: ClassVar[str] = ".to_dict()"
    """What shows more of it than its ``repr``."""

    def __eq__(self, other: object) -> bool:
        """Whether the other is the same result: of its class, and the same in JSON, where NaN is equal to NaN."""
        return isinstance(other, type(self)) and self.to_json() == other.to_json()

    def __repr__(self) -> str:
        """The first lines of the summary, and what says more."""
        summary = summarize(self)
        lines = to_text(summary).split("\n")[: REPR_LINES - 1]
        numbers = {
            "warning": len(summary.warnings),
            "note": sum(label == "note" for label, _ in summary.facts),
        }
        more = ", ".join(counted(number, noun) for noun, number in numbers.items() if number)
        return "\n".join([*lines, "; ".join(filter(None, (more, f"see {self.views}")))])

    def _repr_html_(self) -> str:
        """The summary as HTML, which a notebook shows."""
        return to_html(summarize(self))


class MeasuredResult(Result):
    """A result of numbers, which has a summary as text, data frames and perhaps a picture."""

    views: ClassVar[str] = ".summary() and .to_pandas()"

    def summary(self) -> str:
        """What a person reads of it, as text: headline, facts, first numbers, notes and warnings."""
        return to_text(summarize(self))

    def to_pandas(self) -> Any:
        """Its numbers as a ``pandas.DataFrame``; of a measurement its tokens and sequences, as ``RunFrames``.

        Raises:
            RunFolderError: if a file of the measurement is missing or damaged.
            MissingExtraError: if pandas is not installed.
        """
        return _function_of_reports("frames", "to_pandas")(self)

    def plot(self) -> Any:
        """A Matplotlib figure of it, as ``kleash report --picture`` writes it.

        Raises:
            OptionError: if it is neither a measurement nor a sweep, or nothing in it can be drawn.
            MissingExtraError: if Matplotlib is not installed.
        """
        return _function_of_reports("pictures", "plot")(self)


def _function_of_reports(module: str, name: str) -> Callable[[Any], Any]:
    """A function of ``kleash.reports``, which stands above this floor and is imported at a call."""
    return getattr(import_module(f"kleash.reports.{module}"), name)


def to_text(summary: Summary) -> str:
    """A summary as lines of text; of its tables, the first rows of the first."""
    facts = [f"{label}: {text}" for label, text in summary.facts]
    rows: list[str] = []
    for table in summary.tables[:1]:
        if table.header == NUMBER_HEADER:  # whose first row is the headline
            rows = [f"{row[0]}: {row[1]} {row[4]} (95 % interval {row[2]})" for row in table.rows[1:2]]
        else:
            rows = ["  ".join(row) for row in (table.header, *table.rows[:TEXT_ROWS])]
    warnings = [f"warning: {text}" for text in summary.warnings]
    return "\n".join(map(on_one_line, [summary.headline, *rows, *facts, *warnings]))


def to_html(summary: Summary) -> str:
    """A summary as HTML. All texts are escaped, and right-to-left texts stay in their places."""
    facts = "".join(
        f"<div>{_text(label)}: {_text(text)}</div>" for label, text in summary.facts if label != "estimand"
    )
    details = "".join(f"<div>{_text(text)}</div>" for label, text in summary.facts if label == "estimand")
    warnings = "".join(f"<li>{_text(warning)}</li>" for warning in summary.warnings)
    count = counted(len(summary.warnings), "warning")
    parts = (
        f'<div style="font-weight:600;margin-bottom:.3em">{_text(summary.headline)}</div>',
        f'<div style="opacity:.8;font-size:92%">{facts}</div>' if facts else "",
        *map(_table, summary.tables),
        f"<details open><summary>{count}</summary><ul>{warnings}</ul></details>" if warnings else "",
        f'<details style="opacity:.8;font-size:92%"><summary>what was measured</summary>{details}</details>'
        if details
        else "",
    )
    return f'<div style="color:inherit;background:none;max-width:72em;overflow-x:auto">{"".join(parts)}</div>'


def _table(table: SummaryTable) -> str:
    """A table as HTML, its title above it."""
    styles = [
        CELL.format(align="left", wrap="normal") if is_left else CELL.format(align="right", wrap="nowrap")
        for is_left in table.is_left
    ]
    header = "".join(
        f'<th style="{style};white-space:normal">{_text(text)}</th>'
        for style, text in zip(styles, table.header, strict=True)
    )
    rows = "".join(
        "<tr>"
        + "".join(f'<td style="{style}">{_text(text)}</td>' for style, text in zip(styles, row, strict=True))
        + "</tr>"
        for row in table.rows
    )
    title = f'<div style="margin-top:.5em">{_text(table.title)}</div>' if table.title else ""
    return (
        f'{title}<table style="border-collapse:collapse;margin:.5em 0;color:inherit;'
        f'font-variant-numeric:tabular-nums"><thead><tr>{header}</tr></thead><tbody>{rows}</tbody></table>'
    )


def _text(text: str) -> str:
    """A text, escaped; a ``Name`` in the style of code, which can be broken into lines anywhere."""
    escaped = f"<bdi>{escape(plain_text(printable(text)))}</bdi>"
    return (
        f'<code style="overflow-wrap:anywhere;display:inline-block;min-width:12ch">{escaped}</code>'
        if isinstance(text, Name)
        else escaped
    )
