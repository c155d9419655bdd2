"""The formats of source files, and detecting that of a file."""

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Literal

from kleash.errors import SourceError, summarise_error
from kleash.jobs.reading import SourceKind
from kleash.sources.compression import open_unpacked, uncompressed_suffix
from kleash.sources.csv_files import find_delimiter
from kleash.sources.source_records import read_text_lines, source_label
from kleash.sources.tabular import ARROW_FILE, ARROW_STREAM

SourceFormat = Literal["jsonl", "json array", "csv", "parquet", "arrow", "plain text"]

FORMAT_NAMES: Mapping[SourceFormat, str] = {
    "jsonl": "JSONL",
    "json array": "a JSON array",
    "csv": "CSV",
    "parquet": "Parquet",
    "arrow": "Arrow",
    "plain text": "plain text",
}
"""How errors call a format."""
JSON_START = re.compile(r'\s*(\{\s*"|\[\s*\{\s*")')
"""Beginning of an object, or of an array of objects."""
TAR_MARK = slice(257, 262), b"ustar"
"""Place of bytes in a tar archive, and the bytes."""
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
REFUSED_COMPRESSION_BY_START = {
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x5d\x00\x00": "lzma",
    b"\x04\x22\x4d\x18": "lz4",
    b"\x1f\x9d": "compress",
    b"7z\xbc\xaf": "7-Zip",
    b"Rar!\x1a": "rar",
}
"""Compression programs whose files are not read, by the first bytes of the files."""
REFUSED_BY_START = {
    b"PK\x03\x04": "a zip archive (as .xlsx, .docx and .npz are)",
    b"FEA1": "a Feather file of version 1",
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


def accepted_formats(kind: SourceKind) -> str:
    """The formats of ``FORMATS`` for errors: "JSONL, a JSON array or Parquet"."""
    *names, last = (FORMAT_NAMES[source_format] for source_format in FORMATS[kind])
    return f"{', '.join(names)} or {last}" if names else last


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
    if start[TAR_MARK[0]] == TAR_MARK[1]:
        raise SourceError(f"{label} is a tar archive; unpack it first, and name a file or the folder")
    if start.startswith(b"PAR1"):
        return "parquet"
    if start.startswith((ARROW_FILE, ARROW_STREAM)):
        return "arrow"
    for prefix, program in REFUSED_COMPRESSION_BY_START.items():
        if start.startswith(prefix):
            raise SourceError(f"{label} is packed by {program}; unpack it first")
    for prefix, refused_format in REFUSED_BY_START.items():
        if start.startswith(prefix) and not (prefix == b"ORC" and _is_text(start)):
            raise SourceError(f"{label} is {refused_format}; give {accepted_formats(kind)}, in UTF-8")
    if suffix in REFUSED_BY_SUFFIX:
        raise SourceError(
            f"{label} is {REFUSED_BY_SUFFIX[suffix]} by its suffix; give {accepted_formats(kind)}"
            + (" (a .txt file is read as plain text)" if "plain text" in FORMATS[kind] else "")
        )
    if FORMAT_BY_SUFFIX.get(suffix) == "parquet":
        if start.startswith(b"PARE"):
            raise SourceError(f"{label} is encrypted; give a file that is not")
        raise SourceError(f"{label} is not a Parquet file, which begins with PAR1; make or fetch it again")
    if FORMAT_BY_SUFFIX.get(suffix) == "arrow":
        raise SourceError(
            f"{label} is not an Arrow file, which begins with ARROW1 or 0xffffffff; make it again"
        )
    return FORMAT_BY_SUFFIX.get(suffix) or _format_by_content(path, suffix, named)


def _is_text(start: bytes) -> bool:
    """Whether the first bytes of a file are text, apart from a character that is cut in two at their end."""
    try:
        start[:-3].decode()
    except UnicodeDecodeError:
        return False
    return min(start) >= ord("\t")


def _format_by_content(path: Path, suffix: str, named: Collection[str]) -> SourceFormat:
    """The format of a file whose suffix is unknown or ".json", by its first line that is not blank, or as JSON."""
    for _, text in read_text_lines(path):
        if not text.strip():
            continue
        if _is_object(text):
            return "jsonl"
        if suffix == ".json" or (text.lstrip().startswith(("[", "{")) and _is_json(path)):
            return "json array"
        return "csv" if find_delimiter(text, named, names_only=True) else "plain text"
    return "jsonl" if suffix == ".json" else "plain text"


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _is_json(path: Path) -> bool:
    """Whether a file is an object, or an array of objects and texts; plain text may begin with brackets, too.

    Raises:
        SourceError: if it begins as JSON with objects does, and cannot be read.
    """
    label = source_label(path)
    text = "".join(line for _, line in read_text_lines(path, keep_ends=True))
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        if JSON_START.match(text):
            raise SourceError(
                f"{label} begins as JSON and cannot be read ({summarise_error(error)}); mend it, or name the file .txt "
                "if it is plain text"
            ) from error
        return False
    is_array = isinstance(content, list) and bool(content)
    return isinstance(content, dict) or (is_array and all(isinstance(entry, dict | str) for entry in content))


def _first_bytes(path: Path) -> bytes:
    """The first 512 bytes of a file, or of its content if it is compressed."""
    try:
        with open_unpacked(path, source_label(path)) as file:
            return file.read(512)
    except OSError as error:
        raise SourceError(f"{source_label(path)} cannot be read: {error.strerror or error}") from error
