"""Readers of Parquet, Arrow and JSON arrays, a record for each row."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kleash.errors import SourceError, summarise_error
from kleash.extras import import_extra
from kleash.sources.compression import FREE_BYTES, LARGEST_RATIO, compression_of, open_unpacked
from kleash.sources.records import (
    SourceRecord,
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


def check_names(names: list[str], label: str) -> None:
    """Check that no two columns have the same name; columns without a name are left out.

    Raises:
        SourceError: if two have.
    """
    duplicate_names = sorted({name for name in names if name and names.count(name) > 1})
    if duplicate_names:
        raise SourceError(f"{label} has the column {shorten(duplicate_names[0])} more than once; keep one")


def read_parquet(path: Path) -> Iterator[SourceRecord]:
    """Read the rows of a Parquet file as records by column, a few hundred at a time.

    Raises:
        SourceError: if the file is damaged.
        MissingExtraError: if pyarrow is not installed.
    """
    parquet, label = import_extra("pyarrow.parquet", "models"), source_label(path)
    with _opened(path, label, "Parquet") as source, parquet.ParquetFile(source) as file:
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
        fields = {name: _drop_null_keys(value) for name, value in row.items()}
        yield SourceRecord(location=f"{label}, row {number}", fields=fields)


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
        if is_compressed:
            content = pyarrow.BufferOutputStream()
            with open_unpacked(path, label) as unpacked:
                shutil.copyfileobj(unpacked, content)
            yield pyarrow.BufferReader(content.getvalue())
        else:
            with (pyarrow.memory_map if kind == "Arrow" else pyarrow.OSFile)(str(path)) as source:
                yield source
    except SourceError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
        raise SourceError(
            f"{label} cannot be read as {kind}: {summarise_error(error)}; make or fetch it again"
        ) from error


def _check_not_encrypted(metadata: Any, source: Any, label: str) -> None:
    """Check that a Parquet file has no encrypted columns, whose metadata end the process when pyarrow reads them.

    The footer of such a file has a signature after its metadata.

    Raises:
        SourceError: if it has.
    """
    source.seek(source.size() - 8)
    if int.from_bytes(source.read(4), "little") == metadata.serialized_size + SIGNATURE_BYTES:
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
        content = parse_json("\n".join(line for _, line in read_text_lines(path)))
    except ValueError as error:
        raise SourceError(f"{label} is neither JSONL nor a JSON array ({summarise_error(error)})") from error
    if not isinstance(content, list):
        raise SourceError(
            f"{label} holds {show_value(content)}; give an array of objects, or JSONL with an object a line"
        )
    for number, entry in enumerate(content, start=1):
        location = f"{label}, entry {number}"
        if not isinstance(entry, dict | str):
            raise SourceError(f"{location}: expected an object or a text and found {show_value(entry)}")
        fields = entry if isinstance(entry, dict) else {text_field: entry}
        yield SourceRecord(location=location, fields=fields)
