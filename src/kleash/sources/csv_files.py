"""Reader of CSV, a record for each row."""

import csv
import re
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from kleash.errors import SourceError, summarise_error
from kleash.sources.columns import CONVERSATIONS, FIELDS, USUAL_COLUMNS
from kleash.sources.source_records import (
    SourceRecord,
    check_names,
    is_message_list,
    parse_json,
    read_text_lines,
    shorten,
    source_label,
)

DELIMITERS = ",;\t|"
JSON_COLUMNS = frozenset(
    {
        *("messages", "prompt_token_ids", "response_token_ids", "logprobs"),
        *("prompt_id", "sample_id", "temperature"),
    }
)
"""Columns of a CSV whose cells are JSON: lists and numbers."""
TEXT_OR_MESSAGES_COLUMNS = frozenset({"prompt", "completion", "chosen", "rejected", *CONVERSATIONS})
"""Columns whose cells are text, or a list of messages as JSON."""
LIST_COLUMNS = frozenset({"responses", "completions", "outputs", "generations"})
"""Columns whose cells are text, or a list of texts as JSON."""
PYTHON_MESSAGES = re.compile(r"\s*\[\s*\{\s*'(role|content|from|value)'")
PYTHON_TEXTS = re.compile(r"\s*\[\s*['\"]")
EXCEL_SEPARATOR = re.compile(r"sep=.")
"""First line of a CSV that Excel wrote to say what separates its cells."""
COLUMN_NAME = re.compile(r"(\w[\w.-]*)?")
"""A column's name; empty for an index that pandas writes."""


def find_delimiter(text: str, named: Collection[str] = (), *, names_only: bool = False) -> str | None:
    """The delimiter of a CSV's header; None if no cell of it is the name of a known column.

    Args:
        text: the first line.
        named: names of columns that options give, which are known besides the usual ones.
        names_only: whether every cell must look like a name, and a cell that stands alone be a field's or a named
            column's, so that a sentence with a known word is no header.
    """
    for delimiter in DELIMITERS:
        try:
            cells = next(csv.reader(text.splitlines(keepends=True), delimiter=delimiter, strict=True), [])
        except csv.Error:
            continue
        names = [cell.strip() for cell in cells]
        usual = sum(name.lower() in USUAL_COLUMNS for name in names)
        if names_only and not all(COLUMN_NAME.fullmatch(cell) for cell in cells):
            continue
        if any(name in FIELDS or name in named for name in names) or usual > int(
            names_only and len(names) == 1
        ):
            return delimiter
    return None


def read_csv(path: Path, named: Collection[str] = ()) -> Iterator[SourceRecord]:
    """Read the rows of a CSV with a header, each as a record of text by column.

    Cells of ``JSON_COLUMNS`` are parsed as JSON; empty ones are null. Columns without a name, such as the index that
    pandas writes, are left out.

    Args:
        path: the file. The delimiter is a comma, a semicolon, a tab or a bar: the one that gives a known column.
        named: names of columns that options give. Without them, the header must contain a usual name.

    Raises:
        SourceError: if the header contains no known column or one twice, if a row has another number of cells than the
            header, or if the file is not UTF-8.
    """
    csv.field_size_limit(
        min(sys.maxsize, 2**31 - 1)
    )  # the default refuses documents above 131 072 characters
    label = source_label(path)
    lines = (text for _, text in read_text_lines(path, keep_ends=True))
    first, header_line = _header(lines)
    if "\r" in first.rstrip("\r\n"):
        raise SourceError(f"{label} ends its lines with carriage returns alone; save it with line feeds")
    delimiter = find_delimiter(first.rstrip("\r\n"), named)
    if delimiter is None and named:  # the error about the missing column then lists those that are there
        delimiter = max(DELIMITERS, key=first.count)
    if delimiter is None:
        raise SourceError(
            f"{label} is read as CSV, and its first line, {shorten(first)}, names no column that is known; say which "
            "is read (--prompt-column, --response-column, --text-column), or name the file .txt if it is plain text"
        )
    header = [cell.strip() for cell in next(csv.reader(first.splitlines(keepends=True), delimiter=delimiter))]
    check_names(header, label)
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    while True:
        number = header_line + reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise SourceError(
                f"{label}, line {header_line + reader.line_num}: it is not CSV ({error})"
            ) from error
        if cells is None:
            return
        if not cells:
            continue
        location = f"{label}, line {number}"
        if len(cells) != len(header):
            raise SourceError(
                f"{location}: expected {len(header)} cells, as in the header, and found {len(cells)}"
            )
        fields = {
            name: _cell(name, cell, location, name in named)
            for name, cell in zip(header, cells, strict=True)
            if name
        }
        yield SourceRecord(number=number, location=location, text="", fields=fields)


def _header(lines: Iterator[str]) -> tuple[str, int]:
    """The header of a CSV, with the lines that its quoted names span, and the number of its last line.

    Blank lines before it are skipped, and the line "sep=;" that Excel reads.
    """
    header, count = "", 0
    for line in lines:
        count += 1
        if header or not (line.strip() == "" or EXCEL_SEPARATOR.fullmatch(line.rstrip("\r\n"))):
            header += line
            if header.count('"') % 2 == 0:
                break
    return header, count


def _cell(name: str, cell: str, location: str, is_named: bool) -> Any:
    """The value of a cell of a CSV: JSON, a list of messages, text, or None.

    Args:
        name: of its column.
        cell: its text.
        location: for errors.
        is_named: whether an option names the column.
    """
    if name in JSON_COLUMNS:
        if not cell.strip():
            return None
        try:
            return parse_json(cell)
        except (ValueError, RecursionError) as error:
            if name == "prompt_id":
                return cell
            raise SourceError(
                f"{location}: expected {name!r} to be JSON and found {shorten(cell)} ({summarise_error(error)})"
            ) from error
    if name.lower() in LIST_COLUMNS and PYTHON_TEXTS.match(cell):
        try:
            return parse_json(cell)
        except (ValueError, RecursionError) as error:
            raise SourceError(
                f"{location}: expected {name!r} to be text, or a list of texts as JSON, and found {shorten(cell)}; "
                "save the data as JSONL or Parquet"
            ) from error
    if (is_named or name.lower() in TEXT_OR_MESSAGES_COLUMNS) and cell.lstrip().startswith("["):
        if PYTHON_MESSAGES.match(cell):
            raise SourceError(
                f"{location}: {name!r} is a list of messages as Python prints it, {shorten(cell)}; save the data as "
                "JSONL or Parquet"
            )
        try:
            value = parse_json(cell)
        except (ValueError, RecursionError):
            return cell
        if is_message_list(value):
            return value
    return cell if cell or name != "finish_reason" else None
