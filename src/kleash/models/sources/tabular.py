"""Readers of CSV, Parquet, Arrow and JSON arrays, a record for each row."""

import csv
import json
import re
import shutil
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kleash.errors import SourceError
from kleash.extras import import_extra
from kleash.models.compat import summarise_error
from kleash.models.sources.columns import CONVERSATIONS, FIELDS, USUAL_COLUMNS
from kleash.models.sources.compression import FREE_BYTES, LARGEST_RATIO, compression_of, open_unpacked
from kleash.models.sources.source_records import (
    SourceRecord,
    read_text_lines,
    shorten,
    show_value,
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
PYTHON_MESSAGES = re.compile(r"\s*\[\s*\{\s*'(role|content|from|value)'")
EXCEL_SEPARATOR = re.compile(r"sep=.")
"""First line of a CSV that Excel wrote to say what separates its cells."""
COLUMN_NAME = re.compile(r"(\w[\w.-]*)?")
"""A column's name; empty for an index that pandas writes."""
TABLE_BATCH_ROWS = 256
"""Rows of a Parquet or Arrow file that are held in memory at once as records."""
ARROW_FILE = b"ARROW1"
"""First bytes of Arrow's file format."""
ARROW_STREAM = b"\xff\xff\xff\xff"
"""First bytes of Arrow's stream format."""


def find_delimiter(text: str, named: Collection[str] = (), *, names_only: bool = False) -> str | None:
    """The delimiter of a CSV's header; None if no cell of it is the name of a known column.

    Args:
        text: the first line.
        named: names of columns that options give, which are known besides the usual ones.
        names_only: whether every cell must look like a name, and one be a field's or a named column's, or two of usual
            names, so that a sentence with a known word is no header.
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
        if any(name in FIELDS or name in named for name in names) or usual > int(names_only):
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
    _check_names(header, label)
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
        if header or not (line.strip() == "" or EXCEL_SEPARATOR.fullmatch(line.strip())):
            header += line
            if header.count('"') % 2 == 0:
                break
    return header, count


def read_parquet(path: Path) -> Iterator[SourceRecord]:
    """Read the rows of a Parquet file as records by column, a few hundred at a time.

    Raises:
        SourceError: if the file is damaged.
        MissingExtraError: if pyarrow is not installed.
    """
    parquet, label = import_extra("pyarrow.parquet", "models"), source_label(path)
    with _reading(label, "cannot be read as Parquet"), parquet.ParquetFile(_seekable(path, label)) as file:
        _check_unpacked_size(file.metadata, label)
        _check_names(file.schema_arrow.names, label)
        yield from _rows(file.iter_batches(batch_size=TABLE_BATCH_ROWS, use_threads=False), label)


def read_arrow(path: Path) -> Iterator[SourceRecord]:
    """Read the rows of an Arrow file, of the stream format (as ``save_to_disk`` writes it) or the file format.

    Raises:
        SourceError: if the file is damaged.
        MissingExtraError: if pyarrow is not installed.
    """
    pyarrow, label = import_extra("pyarrow", "models"), source_label(path)
    ipc = import_extra("pyarrow.ipc", "models")
    with _reading(label, "is an Arrow file that cannot be read"):
        source = _seekable(path, label)
        with pyarrow.memory_map(str(source)) if isinstance(source, Path) else source as file:
            is_stream = bytes(file.read(len(ARROW_FILE))) != ARROW_FILE
            file.seek(0)
            if is_stream:
                reader = ipc.open_stream(file)
                batches: Iterator[Any] = iter(reader)
            else:
                reader = ipc.open_file(file)
                batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
            _check_names(reader.schema.names, label)
            yield from _rows(_checked_slices(batches), label)


def _check_names(names: list[str], label: str) -> None:
    """Check that no two columns have the same name; columns without a name are left out.

    Raises:
        SourceError: if two have.
    """
    duplicate_names = sorted({name for name in names if name and names.count(name) > 1})
    if duplicate_names:
        raise SourceError(f"{label} has the column {shorten(duplicate_names[0])} more than once; keep one")


def _checked_slices(batches: Iterator[Any]) -> Iterator[Any]:
    """Batches of at most ``TABLE_BATCH_ROWS`` rows, whose offsets lie within their buffers."""
    for batch in batches:
        batch.validate(full=True)
        for start in range(0, batch.num_rows, TABLE_BATCH_ROWS):
            yield batch.slice(start, TABLE_BATCH_ROWS)


def _rows(batches: Iterator[Any], label: str) -> Iterator[SourceRecord]:
    """The rows of Arrow batches as records."""
    number = 0
    for batch in batches:
        for row in batch.to_pylist():
            number += 1
            fields = {name: _drop_null_keys(value) for name, value in row.items()}
            yield SourceRecord(number=number, location=f"{label}, row {number}", text="", fields=fields)


@contextmanager
def _reading(label: str, problem: str) -> Iterator[None]:
    """Context in which pyarrow's errors become a SourceError that says "``label`` ``problem``"."""
    errors = (
        import_extra("pyarrow", "models").ArrowException,
        OSError,
        ValueError,
        OverflowError,
        MemoryError,
    )
    try:
        yield
    except SourceError:
        raise
    except errors as error:
        raise SourceError(f"{label} {problem}: {summarise_error(error)}; make or fetch it again") from error


def _seekable(path: Path, label: str) -> Any:
    """The path, or a pyarrow file with the unpacked content if it is compressed as a whole.

    The content is in pyarrow's own memory: a thread of pyarrow that lets go of an object of Python's while the
    interpreter ends aborts the process (apache/arrow 34314).
    """
    with path.open("rb") as file:
        if compression_of(file.read(4)) is None:
            return path
    pyarrow = import_extra("pyarrow", "models")
    content = pyarrow.BufferOutputStream()
    with open_unpacked(path, label) as unpacked:
        shutil.copyfileobj(unpacked, content)
    return pyarrow.BufferReader(content.getvalue())


def _check_unpacked_size(metadata: Any, label: str) -> None:
    """Check that no column of a Parquet file unpacks to more than its size makes plausible.

    Raises:
        SourceError: if one does.
    """
    for group in range(metadata.num_row_groups):
        for index in range(metadata.num_columns):
            column = metadata.row_group(group).column(index)
            if column.total_uncompressed_size > FREE_BYTES + LARGEST_RATIO * column.total_compressed_size:
                raise SourceError(
                    f"{label} has a column, {shorten(column.path_in_schema)}, that unpacks to more than "
                    f"{LARGEST_RATIO} times its size, as files do that are made to fill a memory; save it again "
                    "without compression if you trust it"
                )


def read_json_array(path: Path) -> Iterator[SourceRecord]:
    """Read the entries of a JSON array: objects are records, strings are plain text. Holds the whole file in memory.

    Raises:
        SourceError: if the file is not an array of objects and strings.
    """
    label = source_label(path)
    text = "\n".join(line for _, line in read_text_lines(path))
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{label} is neither JSONL nor a JSON array ({summarise_error(error)})") from error
    if not isinstance(content, list):
        what = f"one object, with {_names_of(content)}" if isinstance(content, dict) else show_value(content)
        raise SourceError(f"{label} holds {what}; give an array of objects, or JSONL with an object a line")
    for number, entry in enumerate(content, start=1):
        location = f"{label}, entry {number}"
        if isinstance(entry, dict):
            yield SourceRecord(number=number, location=location, text="", fields=entry)
        elif isinstance(entry, str):
            yield SourceRecord(number=number, location=location, text=entry)
        else:
            raise SourceError(f"{location}: expected an object or a text and found {show_value(entry)}")


def _names_of(content: dict[str, Any]) -> str:
    """The first names of an object, for errors."""
    names = list(map(shorten, content))
    return ", ".join([*names[:4], f"{len(names) - 4} more"] if len(names) > 4 else names) or "no names"


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
            return json.loads(cell)
        except (ValueError, RecursionError) as error:
            raise SourceError(
                f"{location}: expected {name!r} to be JSON and found {shorten(cell)} ({summarise_error(error)})"
            ) from error
    if (is_named or name.lower() in TEXT_OR_MESSAGES_COLUMNS) and cell.lstrip().startswith("["):
        if PYTHON_MESSAGES.match(cell):
            raise SourceError(
                f"{location}: {name!r} is a list of messages as Python prints it, {shorten(cell)}; save the data as "
                "JSONL or Parquet"
            )
        try:
            value = json.loads(cell)
        except (ValueError, RecursionError):
            return cell
        if _is_message_list(value):
            return value
    return cell if cell or name != "finish_reason" else None


def _is_message_list(value: Any) -> bool:
    """Whether a value is a list of messages: objects with a role, or a speaker as in ShareGPT's conversations."""
    is_list = isinstance(value, list) and bool(value)
    return is_list and all(
        isinstance(entry, dict) and ("role" in entry or "from" in entry) for entry in value
    )


def _drop_null_keys(value: Any) -> Any:
    """A column's value; null keys of messages, which Parquet adds, are removed except "content"."""
    if _is_message_list(value):
        return [
            {name: part for name, part in entry.items() if part is not None or name == "content"}
            for entry in value
        ]
    return value
