"""Finding source files, detecting their format, and reading their records."""

import atexit
import json
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from shutil import copyfileobj, rmtree
from stat import S_ISDIR, S_ISREG
from tempfile import mkdtemp
from typing import Literal

from kleash.errors import SourceError
from kleash.models.sources.records import (
    COPY_OF_STANDARD_INPUT,
    SourceRecord,
    read_jsonl,
    read_plain_documents,
    read_plain_lines,
    read_text_lines,
    shorten,
    source_label,
)
from kleash.models.sources.tabular import find_delimiter, read_csv, read_json_array, read_parquet
from kleash.shipped import shipped_prompts, shipped_text

SourceFormat = Literal["jsonl", "json array", "csv", "parquet", "plain text"]

STANDARD_INPUT = "-"
SHIPPED = {"shipped:prompts": shipped_prompts, "shipped:text": shipped_text}
ACCEPTED_FORMATS = "JSONL, a JSON array, CSV, Parquet or plain text"
SUFFIXES: dict[str, SourceFormat] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
    ".txt": "plain text",
    ".parquet": "parquet",
    ".pq": "parquet",
}
"""What a suffix says of a file, whatever its content looks like."""
FIELDS = frozenset(
    {
        *("prompt", "messages", "prompt_token_ids", "text", "response", "response_token_ids"),
        *("completion", "chosen", "rejected"),
    }
)
"""Names of fields that are read from a record, by which the header of a table is known."""
PACKED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ": "xz"}
"""How packed files begin."""
REFUSED_STARTS = {
    b"PK\x03\x04": "a zip archive (as .xlsx, .docx and .npz are)",
    b"ARROW1": "an Arrow file",
    b"ORC": "an ORC file",
    b"Obj\x01": "an Avro file",
    b"SQLite format 3": "a SQLite database",
    b"%PDF": "a PDF file",
    b"\x93NUMPY": "a NumPy array",
    b"\x89HDF": "an HDF5 file",
    b"\xd0\xcf\x11\xe0": "an old Office document",
    b"\x80\x02": "a pickle",
    b"\x80\x03": "a pickle",
    b"\x80\x04": "a pickle",
    b"\x80\x05": "a pickle",
    b"\xff\xfe": "UTF-16 text",
    b"\xfe\xff": "UTF-16 text",
}
"""How files begin that are neither text nor a table that is read."""
REFUSED_SUFFIXES = {
    **dict.fromkeys((".yaml", ".yml"), "YAML"),
    **dict.fromkeys((".xlsx", ".xls", ".ods"), "a spreadsheet"),
    **dict.fromkeys((".arrow", ".feather", ".ipc"), "an Arrow file"),
    **dict.fromkeys((".pkl", ".pickle", ".pt", ".pth"), "a pickle"),
    **dict.fromkeys((".xml", ".toml", ".ini", ".ipynb"), "a structured file of another kind"),
}
"""Suffixes of files that hold records in a form that is not read."""


def source_path(name: str) -> Path:
    """The file called ``name``, one that ships with kleash, or a copy of standard input.

    Args:
        name: a path, "shipped:prompts", "shipped:text", or "-" for standard input.

    Raises:
        SourceError: if there is no such file, or nothing in it, or it cannot be read twice.
    """
    if name == STANDARD_INPUT:
        return _standard_input()
    path = SHIPPED[name]() if name in SHIPPED else Path(name).expanduser()
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise SourceError(f"there is no file {name}") from error
    except (OSError, ValueError) as error:  # a whole prompt is too long a name; no name holds a NUL
        reason = getattr(error, "strerror", None) or error
        raise SourceError(
            f"{shorten(name)} cannot be read ({reason}); give the name of a file of {ACCEPTED_FORMATS}"
        ) from error
    if S_ISDIR(status.st_mode):
        raise SourceError(f"{name} is a folder; give a file of {ACCEPTED_FORMATS}")
    if not S_ISREG(status.st_mode):
        raise SourceError(
            f"{name} is a pipe or a device, and a source is read more than once; write it to a file first, or "
            f"give {STANDARD_INPUT} and pipe it to standard input"
        )
    if status.st_size == 0:
        raise SourceError(f"{name} is empty; give a file of {ACCEPTED_FORMATS}")
    return path


def read_records(path: Path) -> Iterator[SourceRecord]:
    """The records of a source whose plain text is a record a line.

    Raises:
        SourceError: if the file is of a kind that is not read, or where it is damaged.
    """
    return _read(path, documents=False)


def read_documents(path: Path) -> Iterator[SourceRecord]:
    """The records of a source whose plain text is documents with blank lines between them.

    Raises:
        SourceError: if the file is of a kind that is not read, or where it is damaged.
    """
    return _read(path, documents=True)


def detect_format(path: Path) -> SourceFormat:
    """The kind of a source: by how its bytes begin, its suffix, or the first line that is not blank.

    A .txt file is plain text, a .jsonl file is JSONL and a .csv file a table whatever they hold.

    Raises:
        SourceError: if it is of a kind that is not read, which the error names.
    """
    start, suffix, label = _start(path), path.suffix.lower(), source_label(path)
    if start.startswith(b"PAR1"):
        return "parquet"
    for packed, packer in PACKED.items():
        if start.startswith(packed):
            raise SourceError(f"{label} is packed by {packer}; unpack it first")
    for begins, what in REFUSED_STARTS.items():
        if start.startswith(begins):
            raise SourceError(f"{label} is {what}; give {ACCEPTED_FORMATS}, in UTF-8")
    if suffix in REFUSED_SUFFIXES:
        raise SourceError(
            f"{label} is {REFUSED_SUFFIXES[suffix]} by its suffix; give {ACCEPTED_FORMATS} "
            "(a .txt file is read as plain text)"
        )
    if SUFFIXES.get(suffix) == "parquet":
        raise SourceError(f"{label} is not a Parquet file, which begins with PAR1; make or fetch it again")
    return SUFFIXES.get(suffix) or _kind_by_content(path, suffix)


def _read(path: Path, *, documents: bool) -> Iterator[SourceRecord]:
    kind = detect_format(path)
    if kind == "jsonl":
        return read_jsonl(path)
    if kind == "json array":
        return read_json_array(path)
    if kind == "csv":
        return read_csv(path, FIELDS)
    if kind == "parquet":
        return read_parquet(path)
    return read_plain_documents(path) if documents else read_plain_lines(path)


def _kind_by_content(path: Path, suffix: str) -> SourceFormat:
    """The kind of a file whose suffix says nothing, or only that it is JSON of some form."""
    for _, text in read_text_lines(path):
        if not text.strip():
            continue
        if _is_object(text):
            return "jsonl"
        if suffix == ".json" or (text.lstrip().startswith("[") and _is_array_of_objects(path)):
            return "json array"
        return "csv" if find_delimiter(text, FIELDS, names_only=True) else "plain text"
    return "jsonl" if suffix == ".json" else "plain text"


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _is_array_of_objects(path: Path) -> bool:
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, list) and bool(content) and all(isinstance(entry, dict) for entry in content)


def _start(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(16)
    except OSError as error:
        raise SourceError(f"{source_label(path)} cannot be read: {error.strerror or error}") from error


@lru_cache(maxsize=1)
def _standard_input() -> Path:
    """A copy of standard input, which can be read only once; it is deleted when the process ends."""
    stream = getattr(sys.stdin, "buffer", None)
    try:
        if stream is None:
            raise SourceError("standard input is closed; pipe a file to it, or give the file's name")
        if stream.isatty():
            raise SourceError("standard input is a terminal; pipe a file to it, or give the file's name")
        folder = Path(mkdtemp(prefix="kleash-"))
        atexit.register(rmtree, folder, ignore_errors=True)
        path = folder / COPY_OF_STANDARD_INPUT
        with path.open("xb") as copy:
            copyfileobj(stream, copy)
    except (OSError, ValueError) as error:
        raise SourceError(
            f"standard input cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from error
    if path.stat().st_size == 0:
        raise SourceError(f"standard input is empty; pipe {ACCEPTED_FORMATS} to it")
    return path
