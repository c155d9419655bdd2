"""Finding source files, detecting their format, and reading their records."""

import atexit
import json
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from shutil import copyfileobj, rmtree
from stat import S_ISDIR, S_ISREG
from tempfile import mkdtemp
from typing import Literal

from kleash.errors import SourceError
from kleash.models.sources.source_records import (
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
FORMAT_NAMES: Mapping[SourceFormat, str] = {
    "jsonl": "JSONL",
    "json array": "a JSON array",
    "csv": "CSV",
    "parquet": "Parquet",
    "plain text": "plain text",
}
"""How errors call a format."""
FORMATS: Mapping[str, tuple[SourceFormat, ...]] = {
    "prompts": ("jsonl", "json array", "csv", "parquet", "plain text"),
    "text": ("jsonl", "json array", "csv", "parquet", "plain text"),
    "responses": ("jsonl", "json array", "csv", "parquet"),
    "pairs": ("jsonl", "json array", "csv", "parquet"),
    "rollouts": ("jsonl", "json array", "parquet"),
}
"""What is in a source -> the formats that it may have."""
FORMAT_BY_SUFFIX: dict[str, SourceFormat] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
    ".txt": "plain text",
    ".parquet": "parquet",
    ".pq": "parquet",
}
"""Formats of files by suffix, which takes precedence over their content."""
FIELDS = frozenset(
    {
        *("prompt", "messages", "prompt_token_ids", "text", "response", "response_token_ids"),
        *("completion", "chosen", "rejected"),
    }
)
"""Names of fields that are read from a record; the header of a table contains at least one."""
COMPRESSION_BY_START = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
}
"""Compression programs by the first bytes of their files."""
REFUSED_BY_START = {
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
"""Formats that cannot be read, by the first bytes of their files."""
REFUSED_BY_SUFFIX = {
    **dict.fromkeys((".yaml", ".yml"), "YAML"),
    **dict.fromkeys((".xlsx", ".xls", ".ods"), "a spreadsheet"),
    **dict.fromkeys((".arrow", ".feather", ".ipc"), "an Arrow file"),
    **dict.fromkeys((".pkl", ".pickle", ".pt", ".pth"), "a pickle"),
    **dict.fromkeys((".xml", ".toml", ".ini", ".ipynb"), "a structured file of another kind"),
}
"""Formats that cannot be read, by suffix."""


def accepted_formats(kind: str) -> str:
    """The formats of ``FORMATS`` for errors: "JSONL, a JSON array or Parquet"."""
    *names, last = (FORMAT_NAMES[source_format] for source_format in FORMATS[kind])
    return f"{', '.join(names)} or {last}"


def source_path(name: str, kind: str) -> Path:
    """The path of a source: the file ``name``, a shipped file, or a copy of standard input.

    Args:
        name: a path, "shipped:prompts", "shipped:text", or "-" for standard input.
        kind: what is in it, a key of ``FORMATS``.

    Raises:
        SourceError: if there is no such file, or it is empty, or it cannot be read twice.
    """
    if name == STANDARD_INPUT:
        return _standard_input(kind)
    path = SHIPPED[name]() if name in SHIPPED else Path(name).expanduser()
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise SourceError(f"there is no file {name}") from error
    except (OSError, ValueError) as error:  # such as a prompt given as a name: too long, or with a NUL
        reason = getattr(error, "strerror", None) or error
        raise SourceError(
            f"{shorten(name)} cannot be read ({reason}); give the name of a file of {accepted_formats(kind)}"
        ) from error
    if S_ISDIR(status.st_mode):
        raise SourceError(f"{name} is a folder; give a file of {accepted_formats(kind)}")
    if not S_ISREG(status.st_mode):
        raise SourceError(
            f"{name} is a pipe or a device, and a source is read more than once; write it to a file first, or "
            f"give {STANDARD_INPUT} and pipe it to standard input"
        )
    if status.st_size == 0:
        raise SourceError(f"{name} is empty; give a file of {accepted_formats(kind)}")
    return path


def read_records(path: Path, kind: str) -> Iterator[SourceRecord]:
    """Read the records of a source; in plain text, each line is a record.

    Raises:
        SourceError: if the file is damaged, or its format cannot be read.
    """
    return _read(path, kind, documents=False)


def read_documents(path: Path, kind: str) -> Iterator[SourceRecord]:
    """Read the records of a source; in plain text, blank lines separate records.

    Raises:
        SourceError: if the file is damaged, or its format cannot be read.
    """
    return _read(path, kind, documents=True)


def detect_format(path: Path, kind: str) -> SourceFormat:
    """The format of a source, by its first bytes, its suffix, or its first line that is not blank.

    A .txt file is plain text, a .jsonl file is JSONL and a .csv file is a table, whatever their content.

    Args:
        path: of the file.
        kind: what is in it, a key of ``FORMATS``.

    Raises:
        SourceError: if the format cannot be read, or is none of ``FORMATS[kind]``, with its name.
    """
    source_format = _detected_format(path, kind)
    if source_format not in FORMATS[kind]:
        raise SourceError(
            f"{source_label(path)} is read as {FORMAT_NAMES[source_format]}, and {kind} come as "
            f"{accepted_formats(kind)}; convert it"
        )
    return source_format


def _detected_format(path: Path, kind: str) -> SourceFormat:
    """``detect_format`` for all formats that any source may have."""
    start, suffix, label = _first_bytes(path), path.suffix.lower(), source_label(path)
    if start.startswith(b"PAR1"):
        return "parquet"
    for prefix, program in COMPRESSION_BY_START.items():
        if start.startswith(prefix):
            raise SourceError(f"{label} is packed by {program}; unpack it first")
    for prefix, refused_format in REFUSED_BY_START.items():
        if start.startswith(prefix):
            raise SourceError(f"{label} is {refused_format}; give {accepted_formats(kind)}, in UTF-8")
    if suffix in REFUSED_BY_SUFFIX:
        raise SourceError(
            f"{label} is {REFUSED_BY_SUFFIX[suffix]} by its suffix; give {accepted_formats(kind)}"
            + (" (a .txt file is read as plain text)" if "plain text" in FORMATS[kind] else "")
        )
    if FORMAT_BY_SUFFIX.get(suffix) == "parquet":
        raise SourceError(f"{label} is not a Parquet file, which begins with PAR1; make or fetch it again")
    return FORMAT_BY_SUFFIX.get(suffix) or _format_by_content(path, suffix)


def _read(path: Path, kind: str, *, documents: bool) -> Iterator[SourceRecord]:
    """Read a source by its format; plain text as documents or as lines."""
    source_format = detect_format(path, kind)
    if source_format == "jsonl":
        return read_jsonl(path)
    if source_format == "json array":
        return read_json_array(path)
    if source_format == "csv":
        return read_csv(path, FIELDS)
    if source_format == "parquet":
        return read_parquet(path)
    return read_plain_documents(path) if documents else read_plain_lines(path)


def _format_by_content(path: Path, suffix: str) -> SourceFormat:
    """The format of a file whose suffix is unknown or ".json", by its first line that is not blank."""
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


def _first_bytes(path: Path) -> bytes:
    """The first 16 bytes of a file."""
    try:
        with path.open("rb") as file:
            return file.read(16)
    except OSError as error:
        raise SourceError(f"{source_label(path)} cannot be read: {error.strerror or error}") from error


def _standard_input(kind: str) -> Path:
    """The copy of standard input; raises SourceError if it is empty."""
    path = _copy_of_standard_input()
    if path.stat().st_size == 0:
        raise SourceError(f"standard input is empty; pipe {accepted_formats(kind)} to it")
    return path


@lru_cache(maxsize=1)
def _copy_of_standard_input() -> Path:
    """Copy standard input to a file, since it can be read only once; the file is deleted when the process ends."""
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
    return path
