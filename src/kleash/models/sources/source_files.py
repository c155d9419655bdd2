"""Finding source files, detecting their format, and reading their records."""

import atexit
import json
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from shutil import copyfileobj, rmtree
from stat import S_ISDIR, S_ISFIFO, S_ISREG
from tempfile import mkdtemp
from typing import BinaryIO, Literal

from kleash.errors import SourceError
from kleash.jobs.reading import DatasetOptions, ReadOptions, SourceKind
from kleash.models.sources.columns import (
    ColumnChoice,
    choose_columns,
    named_columns,
    rename_columns,
)
from kleash.models.sources.compression import open_unpacked, uncompressed_suffix
from kleash.models.sources.dataset_folders import find_dataset
from kleash.models.sources.source_records import (
    COPY_OF_PIPE,
    COPY_OF_STANDARD_INPUT,
    SourceRecord,
    read_jsonl,
    read_plain_documents,
    read_plain_lines,
    read_text_lines,
    shorten,
    source_label,
)
from kleash.models.sources.tabular import (
    ARROW_FILE,
    ARROW_STREAM,
    find_delimiter,
    read_arrow,
    read_csv,
    read_json_array,
    read_parquet,
)
from kleash.shipped import shipped_prompts, shipped_text

SourceFormat = Literal["jsonl", "json array", "csv", "parquet", "arrow", "plain text"]

STANDARD_INPUT = "-"
OPEN_FILE = re.compile(r"/(dev|proc/self)/fd/[0-9]+")
"""Path of a file that this process has open, as a shell writes <(...)."""
HUB_ADDRESS = re.compile(r"(?:https?://(?:www\.)?huggingface\.co/|hf://)datasets/([\w.-]+/[\w.-]+)")
"""Address of a data set on the hub."""
SHIPPED = {"shipped:prompts": shipped_prompts, "shipped:text": shipped_text}
FORMAT_NAMES: Mapping[SourceFormat, str] = {
    "jsonl": "JSONL",
    "json array": "a JSON array",
    "csv": "CSV",
    "parquet": "Parquet",
    "arrow": "Arrow",
    "plain text": "plain text",
}
"""How errors call a format."""
FORMATS: Mapping[SourceKind, tuple[SourceFormat, ...]] = {
    "prompts": ("jsonl", "json array", "csv", "parquet", "plain text"),
    "text": ("jsonl", "json array", "csv", "parquet", "plain text"),
    "responses": ("jsonl", "json array", "csv", "parquet"),
    "pairs": ("jsonl", "json array", "csv", "parquet"),
    "rollouts": ("jsonl", "json array", "parquet"),
    "whole text": ("plain text",),
}
"""What is in a source -> the formats that it may have, besides Arrow, which is read wherever Parquet is."""
FORMAT_BY_SUFFIX: dict[str, SourceFormat] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
    ".txt": "plain text",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
}
"""Formats of files by suffix, which takes precedence over their content."""
REFUSED_COMPRESSION_BY_START = {b"BZh": "bzip2", b"\xfd7zXZ": "xz"}
"""Compression programs whose files are not read, by the first bytes of the files."""
REFUSED_BY_START = {
    b"PK\x03\x04": "a zip archive (as .xlsx, .docx and .npz are)",
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
    **dict.fromkeys((".pkl", ".pickle", ".pt", ".pth"), "a pickle"),
    **dict.fromkeys((".xml", ".toml", ".ini", ".ipynb"), "a structured file of another kind"),
}
"""Formats that cannot be read, by suffix."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """The files of a source, and how their records are read."""

    name: str
    """As it was asked for."""
    kind: SourceKind
    """What is in it."""
    paths: tuple[Path, ...]
    """One file, or those of a split of a data set."""
    reading: ReadOptions
    notes: tuple[str, ...] = ()
    """What was decided when it was found."""

    def columns(self) -> tuple[ColumnChoice, ...]:
        """The columns that are read as fields of another name (``choose_columns``); empty without records.

        Raises:
            SourceError: if the first record cannot be read, or lacks a column that an option names.
        """
        first = next(self.raw_records(), None)
        return () if first is None else choose_columns(first, self.kind, self.reading)

    def records(self) -> Iterator[SourceRecord]:
        """Iterate over the records, with the fields that their columns stand for.

        Raises:
            SourceError: if a file is damaged, or a column that an option names is not there.
        """
        choices = self.columns()
        for record in self.raw_records():
            yield rename_columns(record, choices) if choices else record

    def raw_records(self) -> Iterator[SourceRecord]:
        """Iterate over the records as they lie in the files."""
        named = named_columns(self.reading)
        for path in self.paths:
            yield from read_records(path, self.kind, named)

    def sha256(self) -> str:
        """The SHA-256 of the file's bytes; of several files, that of their hashes in order."""
        hashes = [_hash_file(path) for path in self.paths]
        return hashes[0] if len(hashes) == 1 else sha256("\n".join(hashes).encode()).hexdigest()


def find_source(name: str, kind: SourceKind, options: DatasetOptions | None = None) -> Source:
    """Find the files of a source.

    Args:
        name: a file, "shipped:prompts", "shipped:text", or "-" for standard input; a folder that ``save_to_disk``
            wrote, or in the layout of the hub; or the name of a data set on the hub.
        kind: what is in it, a key of ``FORMATS``.
        options: how it is read, such as a job; None for the defaults.

    Raises:
        SourceError: if there is no such file or data set, or it is empty or cannot be read twice.
    """
    reading = ReadOptions.of(options)
    if name != STANDARD_INPUT and name not in SHIPPED:
        dataset = find_dataset(name, reading)
        if dataset is not None:
            return Source(name=name, kind=kind, paths=dataset.paths, reading=reading, notes=dataset.notes)
    path = source_path(name, kind)
    for option in ("split", "dataset_config"):
        value = getattr(reading, option)
        if value is not None:
            raise SourceError(
                f"{source_label(path)} is one file, which has no {shorten(value)}; leave "
                f"--{option.replace('_', '-')} out"
            )
    return Source(name=name, kind=kind, paths=(path,), reading=reading)


def is_read_once(name: str) -> bool:
    """Whether a source is standard input or a pipe, of which this process keeps a copy."""
    return name == STANDARD_INPUT or OPEN_FILE.fullmatch(name) is not None


def _hash_file(path: Path) -> str:
    """The SHA-256 of a file's bytes."""
    digest = sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def accepted_formats(kind: SourceKind) -> str:
    """The formats of ``FORMATS`` for errors: "JSONL, a JSON array or Parquet"."""
    *names, last = (FORMAT_NAMES[source_format] for source_format in FORMATS[kind])
    return f"{', '.join(names)} or {last}" if names else last


def source_path(name: str, kind: SourceKind) -> Path:
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
        hub_name = HUB_ADDRESS.match(name)
        hint = f"; give the name of the data set on the hub, {hub_name[1]}" if hub_name else ""
        raise SourceError(f"there is no file {name}{hint}") from error
    except (OSError, ValueError) as error:  # such as a prompt given as a name: too long, or with a NUL
        reason = getattr(error, "strerror", None) or error
        raise SourceError(
            f"{shorten(name)} cannot be read ({reason}); give the name of a file of {accepted_formats(kind)}"
        ) from error
    if S_ISDIR(status.st_mode):
        raise SourceError(f"{name} is a folder; give a file of {accepted_formats(kind)}")
    if S_ISFIFO(status.st_mode) and OPEN_FILE.fullmatch(str(path)):
        path = _copy_of_pipe(str(path))
        status = path.stat()
    if not S_ISREG(status.st_mode):
        raise SourceError(
            f"{name} is a pipe or a device, and a source is read more than once; write it to a file first, or "
            f"give {STANDARD_INPUT} and pipe it to standard input"
        )
    if status.st_size == 0:
        raise SourceError(f"{source_label(path)} is empty; give a file of {accepted_formats(kind)}")
    return path


def read_records(path: Path, kind: SourceKind, named: Collection[str] = ()) -> Iterator[SourceRecord]:
    """Read the records of a file; in plain text, each line is a record, and of ``kind`` "text" each document.

    Args:
        path: the file.
        kind: what is in it, a key of ``FORMATS``.
        named: names of columns that options give, by which the header of a table is recognised.

    Raises:
        SourceError: if the file is damaged, or its format cannot be read.
    """
    source_format = detect_format(path, kind, named)
    if source_format == "jsonl":
        return read_jsonl(path)
    if source_format == "json array":
        return read_json_array(path)
    if source_format == "csv":
        return read_csv(path, named)
    if source_format == "parquet":
        return read_parquet(path)
    if source_format == "arrow":
        return read_arrow(path)
    return read_plain_documents(path) if kind == "text" else read_plain_lines(path)


def read_whole_text(name: str) -> str:
    """The whole text of a file of plain text, unpacked and without a byte-order mark.

    Args:
        name: a path, "shipped:text", or "-" for standard input.

    Raises:
        SourceError: if the file is missing, empty, not UTF-8, or of another format.
    """
    path = source_path(name, "whole text")
    detect_format(path, "whole text")
    return "".join(line for _, line in read_text_lines(path, keep_ends=True))


def detect_format(path: Path, kind: SourceKind, named: Collection[str] = ()) -> SourceFormat:
    """The format of a source, by its first bytes, its suffix, or its first line that is not blank.

    A .txt file is plain text, a .jsonl file is JSONL and a .csv file is a table, whatever their content. Of a
    compressed file, the content and the suffix are those of the file that was compressed.

    Args:
        path: the file.
        kind: what is in it, a key of ``FORMATS``.
        named: names of columns that options give, by which the header of a table is recognised.

    Raises:
        SourceError: if the format cannot be read, or is none of ``FORMATS[kind]``, with its name.
    """
    source_format = _detected_format(path, kind, named)
    if kind == "whole text" and source_format != "plain text":
        raise SourceError(
            f"{source_label(path)} is {FORMAT_NAMES[source_format]}, and plain text is needed; write its texts to a "
            ".txt file"
        )
    if source_format not in (*FORMATS[kind], "arrow"):
        raise SourceError(
            f"{source_label(path)} is read as {FORMAT_NAMES[source_format]}, and {kind} come as "
            f"{accepted_formats(kind)}; convert it"
        )
    return source_format


def _detected_format(path: Path, kind: SourceKind, named: Collection[str]) -> SourceFormat:
    """``detect_format`` for all formats that any source may have."""
    start, suffix, label = _first_bytes(path), uncompressed_suffix(path), source_label(path)
    if start.startswith(b"PAR1"):
        return "parquet"
    if start.startswith((ARROW_FILE, ARROW_STREAM)):
        return "arrow"
    for prefix, program in REFUSED_COMPRESSION_BY_START.items():
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
    if FORMAT_BY_SUFFIX.get(suffix) == "arrow":
        raise SourceError(
            f"{label} is not an Arrow file, which begins with ARROW1 or 0xffffffff; make it again"
        )
    return FORMAT_BY_SUFFIX.get(suffix) or _format_by_content(path, suffix, named)


def _format_by_content(path: Path, suffix: str, named: Collection[str]) -> SourceFormat:
    """The format of a file whose suffix is unknown or ".json", by its first line that is not blank."""
    for _, text in read_text_lines(path):
        if not text.strip():
            continue
        if _is_object(text):
            return "jsonl"
        if suffix == ".json" or (text.lstrip().startswith("[") and _is_array_of_objects(path)):
            return "json array"
        return "csv" if find_delimiter(text, named, names_only=True) else "plain text"
    return "jsonl" if suffix == ".json" else "plain text"


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _is_array_of_objects(path: Path) -> bool:
    try:
        with open_unpacked(path, source_label(path)) as file:
            content = json.loads(file.read().decode("utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, list) and bool(content) and all(isinstance(entry, dict) for entry in content)


def _first_bytes(path: Path) -> bytes:
    """The first 16 bytes of a file, or of its content if it is compressed."""
    try:
        with open_unpacked(path, source_label(path)) as file:
            return file.read(16)
    except OSError as error:
        raise SourceError(f"{source_label(path)} cannot be read: {error.strerror or error}") from error


def _standard_input(kind: SourceKind) -> Path:
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
        return _copied(stream, COPY_OF_STANDARD_INPUT)
    except (OSError, ValueError) as error:
        raise SourceError(
            f"standard input cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from error


@lru_cache(maxsize=8)
def _copy_of_pipe(name: str) -> Path:
    """Copy a pipe that this process has open to a file, since it can be read only once; deleted as that of ``-``."""
    try:
        with Path(name).open("rb") as pipe:
            return _copied(pipe, COPY_OF_PIPE)
    except OSError as error:
        raise SourceError(f"{name} cannot be read: {error.strerror or error}") from error


def _copied(stream: BinaryIO, name: str) -> Path:
    """Copy a stream to a file of this name, in a folder that is deleted when the process ends."""
    folder = Path(mkdtemp(prefix="kleash-"))
    atexit.register(rmtree, folder, ignore_errors=True)
    path = folder / name
    with path.open("xb") as copy:
        copyfileobj(stream, copy)
    return path
