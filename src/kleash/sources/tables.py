"""Readers of CSV, Parquet, Arrow and JSON arrays, a record for each row."""

import csv
import re
import shutil
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kleash.errors import SourceError, summarise_error
from kleash.extras import import_extra
from kleash.sources.columns import CONVERSATIONS, FIELDS, USUAL_COLUMNS
from kleash.sources.records import (
    SourceRecord,
    compression_of,
    first_line,
    is_list_of,
    is_message_list,
    open_unpacked,
    parse_unique_json,
    read_text_lines,
    shorten,
    show_value,
    source_label,
)

TABLE_BATCH_ROWS = 256
"""Rows of a Parquet or Arrow file that are held in memory at once as records."""
ARROW_FILE = b"ARROW1"
"""First bytes of Arrow's file format."""
ARROW_STREAM = b"\xff\xff\xff\xff"
"""First bytes of Arrow's stream format."""
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


def check_names(names: list[str], label: str) -> None:
    """Check that no two columns have the same name; columns without a name are left out.

    Raises:
        SourceError: if two have.
    """
    duplicate_names = sorted({name for name in names if name and names.count(name) > 1})
    if duplicate_names:
        raise SourceError(f"{label} has the column {shorten(duplicate_names[0])} more than once; keep one")


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
    first = first_line(path)
    delimiter = find_delimiter(first, named)
    if delimiter is None and named:  # the error about the missing column then lists those that are there
        delimiter = max(DELIMITERS, key=first.count)
    if delimiter is None:
        raise SourceError(
            f"{label} is read as CSV, and its first line, {shorten(first)}, names no column that is known; say which "
            "is read (--prompt-column, --response-column, --text-column), or name the file .txt if it is plain text"
        )
    rows = _csv_rows(path, delimiter)
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


def _csv_rows(path: Path, delimiter: str) -> Iterator[tuple[str, list[str]]]:
    """Location and cells of each row of a CSV, which may span lines; blank lines are skipped."""
    lines = (text for _, text in read_text_lines(path, keep_ends=True))
    label, number, reader = source_label(path), 1, csv.reader(lines, delimiter=delimiter, strict=True)
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
        value = parse_unique_json(cell)
    except ValueError as error:
        if (is_json and name != "prompt_id") or is_list or PYTHON_MESSAGES.match(cell):
            raise SourceError(
                f"{location}: expected {name!r} to be JSON and found {shorten(cell)} ({summarise_error(error)}); lists "
                "that Python prints are none: save the data as JSONL or Parquet"
            ) from error
        return cell
    return value if is_json or is_message_list(value) or (is_list and is_list_of(value, str)) else cell


def read_parquet(path: Path) -> Iterator[SourceRecord]:
    """Read the rows of a Parquet file as records by column, a few hundred at a time.

    Raises:
        SourceError: if the file is damaged.
        MissingExtraError: if pyarrow is not installed.
    """
    parquet, label = import_extra("pyarrow.parquet", "models"), source_label(path)
    with _opened(path, label, "Parquet") as source, parquet.ParquetFile(source) as file:
        check_names(file.schema_arrow.names, label)
        yield from _rows(file.iter_batches(batch_size=TABLE_BATCH_ROWS, use_threads=False), label)


def read_arrow(path: Path) -> Iterator[SourceRecord]:
    """Read the rows of an Arrow file, of the stream format (as ``save_to_disk`` writes it) or the file format.

    Raises:
        SourceError: if the file is damaged.
        MissingExtraError: if pyarrow is not installed.
    """
    ipc, label = import_extra("pyarrow.ipc", "models"), source_label(path)
    with _opened(path, label, "Arrow") as source:
        is_file = bytes(source.read(len(ARROW_FILE))) == ARROW_FILE
        source.seek(0)
        reader = ipc.open_file(source) if is_file else ipc.open_stream(source)
        batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else iter(reader)
        check_names(reader.schema.names, label)
        yield from _rows(_checked_slices(batches), label)


def _checked_slices(batches: Iterator[Any]) -> Iterator[Any]:
    """Batches of at most ``TABLE_BATCH_ROWS`` rows, whose offsets lie within their buffers."""
    for batch in batches:
        batch.validate(full=True)
        for start in range(0, batch.num_rows, TABLE_BATCH_ROWS):
            yield batch.slice(start, TABLE_BATCH_ROWS)


def _rows(batches: Iterator[Any], label: str) -> Iterator[SourceRecord]:
    """The rows of Arrow batches as records."""
    rows = (row for batch in batches for row in batch.to_pylist())
    for number, row in enumerate(rows, start=1):
        yield SourceRecord(location=f"{label}, row {number}", fields=row)


@contextmanager
def _opened(path: Path, label: str, kind: str) -> Iterator[Any]:
    """Context with a file of pyarrow, in which its errors become a SourceError.

    A file that is compressed as a whole is unpacked into pyarrow's own memory: a thread of pyarrow that lets go of an
    object of Python's while the interpreter ends aborts the process (apache/arrow 34314).
    """
    pyarrow = import_extra("pyarrow", "models")
    try:
        with path.open("rb") as file:
            is_compressed = compression_of(file) is not None
        if not is_compressed:
            source = pyarrow.OSFile(str(path))
        else:
            content = pyarrow.BufferOutputStream()
            with open_unpacked(path) as unpacked:
                shutil.copyfileobj(unpacked, content)
            source = pyarrow.BufferReader(content.getvalue())
        with source:
            yield source
    except SourceError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
        raise SourceError(
            f"{label} cannot be read as {kind}: {summarise_error(error)}; make or fetch it again"
        ) from error


def read_json_array(path: Path, text_field: str) -> Iterator[SourceRecord]:
    """Read the entries of a JSON array, objects or texts. Holds the whole file in memory.

    Args:
        path: the file.
        text_field: the field that an entry which is a text is read as.

    Raises:
        SourceError: if the file is not an array of objects and strings.
    """
    label = source_label(path)
    try:
        content = parse_unique_json("\n".join(line for _, line in read_text_lines(path)))
    except ValueError as error:
        raise SourceError(
            f"{label} begins as JSON and cannot be read ({summarise_error(error)}); mend it, or name the file .txt if "
            "it is plain text"
        ) from error
    if not isinstance(content, list):
        raise SourceError(
            f"{label} holds {show_value(content)}; give an array of objects, or JSONL with an object a line"
        )
    for number, entry in enumerate(content, start=1):
        location = f"{label}, entry {number}"
        if not isinstance(entry, (dict, str)):
            raise SourceError(f"{location}: expected an object or a text and found {show_value(entry)}")
        yield SourceRecord(
            location=location, fields=entry if isinstance(entry, dict) else {text_field: entry}
        )
