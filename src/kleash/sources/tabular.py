"""Readers of Parquet, Arrow and JSON arrays, a record for each row."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from kleash.errors import SourceError, summarise_error
from kleash.extras import import_extra
from kleash.sources.compression import FREE_BYTES, LARGEST_RATIO, compression_of, open_unpacked
from kleash.sources.source_records import (
    SourceRecord,
    check_names,
    is_message_list,
    parse_json,
    read_text_lines,
    shorten,
    show_value,
    source_label,
    without_nulls,
)

SIGNATURE_BYTES = 28
"""Bytes of the signature of an encrypted Parquet file whose footer is not (parquet-format, Encryption.md, 5.2)."""
TABLE_BATCH_ROWS = 256
"""Rows of a Parquet or Arrow file that are held in memory at once as records."""
ARROW_FILE = b"ARROW1"
"""First bytes of Arrow's file format."""
ARROW_STREAM = b"\xff\xff\xff\xff"
"""First bytes of Arrow's stream format."""


def read_parquet(path: Path) -> Iterator[SourceRecord]:
    """Read the rows of a Parquet file as records by column, a few hundred at a time.

    Raises:
        SourceError: if the file is damaged.
        MissingExtraError: if pyarrow is not installed.
    """
    parquet, label = import_extra("pyarrow.parquet", "models"), source_label(path)
    source = _seekable(path, label)
    with _reading(label, "cannot be read as Parquet"), parquet.ParquetFile(source) as file:
        _check_not_encrypted(file.metadata, source, label)
        _check_unpacked_size(file.metadata, label)
        check_names(file.schema_arrow.names, label)
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


def _check_not_encrypted(metadata: Any, source: Any, label: str) -> None:
    """Check that a Parquet file has no encrypted columns, whose metadata end the process when pyarrow reads them.

    The footer of such a file has a signature after its metadata.

    Raises:
        SourceError: if it has.
    """
    with source.open("rb") if isinstance(source, Path) else nullcontext(source) as file:
        file.seek(-8, 2)
        footer_bytes = int.from_bytes(file.read(4), "little")
        file.seek(0)
    if footer_bytes == metadata.serialized_size + SIGNATURE_BYTES:
        raise SourceError(f"{label} is encrypted; give a file that is not")


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
        content = parse_json(text)
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


def _drop_null_keys(value: Any) -> Any:
    """A column's value; null keys of messages and of objects in them, which Parquet adds, are removed.

    "content" remains.
    """
    if not is_message_list(value):
        return value
    return [
        {
            name: without_nulls(part)
            for name, part in entry.items()
            if part is not None or name in ("content", "value")
        }
        for entry in value
    ]
