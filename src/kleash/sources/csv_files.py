"""Reader of CSV, a record for each row."""

import csv
import re
import sys
from collections.abc import Collection, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from kleash.errors import SourceError, summarise_error
from kleash.sources.columns import CONVERSATIONS, FIELDS, USUAL_COLUMNS
from kleash.sources.records import (
    SourceRecord,
    is_list_of,
    is_message_list,
    parse_json,
    read_text_lines,
    shorten,
    source_label,
)
from kleash.sources.tables import check_names

DELIMITERS = ",;\t|"
JSON_COLUMNS = frozenset(
    {
        *("messages", "prompt_token_ids", "response_token_ids", "logprobs"),
        *("prompt_id", "sample_id", "temperature"),
    }
)
"""Columns of a CSV whose cells are JSON: lists and numbers."""
MESSAGE_COLUMNS = frozenset({"prompt", "completion", "chosen", "rejected", *CONVERSATIONS})
"""Columns whose cells are text, or a list of messages as JSON."""
LIST_COLUMNS = frozenset({"responses", "completions", "outputs", "generations"})
"""Columns whose cells are text, or a list of texts as JSON."""
PYTHON_MESSAGES = re.compile(r"\s*\[\s*\{\s*'(role|content|from|value)'")
LIST_OF_TEXTS = re.compile(r"\s*\[\s*['\"]")
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
        cells = next(csv.reader(text.splitlines(), delimiter=delimiter), [])
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
    # the default refuses documents above 131 072 characters
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    label = source_label(path)
    lines = (text for _, text in read_text_lines(path, keep_ends=True))
    first_lines = list[str]()
    for line in lines:
        first_lines.append(line)
        if line.strip():
            break
    first = first_lines[-1].rstrip("\r\n") if first_lines else ""
    delimiter = find_delimiter(first, named)
    if delimiter is None and named:  # the error about the missing column then lists those that are there
        delimiter = max(DELIMITERS, key=first.count)
    if delimiter is None:
        raise SourceError(
            f"{label} is read as CSV, and its first line, {shorten(first)}, names no column that is known; say which "
            "is read (--prompt-column, --response-column, --text-column), or name the file .txt if it is plain text"
        )
    rows = _rows(chain(first_lines, lines), delimiter, label)
    header = next(([cell.strip() for cell in cells] for _, cells in rows if any(map(str.strip, cells))), [])
    check_names(header, label)
    for location, cells in rows:
        if len(cells) != len(header):
            raise SourceError(
                f"{location}: expected {len(header)} cells, as in the header, and found {len(cells)}"
            )
        fields = {
            name: _value(name, cell, location, name in named)
            for name, cell in zip(header, cells, strict=True)
            if name
        }
        yield SourceRecord(location=location, fields=fields)


def _rows(lines: Iterator[str], delimiter: str, label: str) -> Iterator[tuple[str, list[str]]]:
    """Location and cells of each row of a CSV, which may span lines; blank lines are skipped."""
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    number = 1
    try:
        for cells in reader:
            if cells:
                yield f"{label}, line {number}", cells
            number = reader.line_num + 1
    except csv.Error as error:
        raise SourceError(f"{label}, line {reader.line_num}: it is not CSV ({error})") from error


def _value(name: str, cell: str, location: str, is_named: bool) -> Any:
    """The value of a cell of a CSV: JSON, a list of messages or texts, text, or None.

    Args:
        name: of its column.
        cell: its text.
        location: for errors.
        is_named: whether an option names the column.
    """
    is_json, column = name in JSON_COLUMNS, name.lower()
    if not cell.strip() and (is_json or name == "finish_reason"):
        return None
    is_list = column in LIST_COLUMNS and LIST_OF_TEXTS.match(cell) is not None
    may_be_messages = (is_named or column in MESSAGE_COLUMNS) and cell.lstrip().startswith("[")
    if not (is_json or is_list or may_be_messages):
        return cell
    try:
        value = parse_json(cell)
    except ValueError as error:
        if (is_json and name != "prompt_id") or is_list or PYTHON_MESSAGES.match(cell):
            raise SourceError(
                f"{location}: expected {name!r} to be JSON and found {shorten(cell)} ({summarise_error(error)}); lists "
                "that Python prints are none: save the data as JSONL or Parquet"
            ) from error
        return cell
    return value if is_json or is_message_list(value) or (is_list and is_list_of(value, str)) else cell
