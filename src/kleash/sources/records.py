"""Records of source files, checks of their fields with errors that name file and line, and lines of text."""

import gzip
import io
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard, TypeVar, cast

from kleash.errors import SourceError, summarise_error
from kleash.extras import import_extra
from kleash.store.codec import parse_json

Entry = TypeVar("Entry")
MAX_SHOWN_CHARACTERS = 60
MAX_SHOWN_FIELDS = 16
COPY_OF_STANDARD_INPUT = "kleash-standard-input"
"""File name of the copy of standard input."""
COMPRESSIONS = {
    "gzip": re.compile(rb"\x1f\x8b"),
    "zstd": re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"),
}
"""Program -> first bytes of its files; pzstd begins with a frame that is skipped (RFC 8878, 3.1.2)."""
COMPRESSED_SUFFIXES = frozenset({".gz", ".gzip", ".zst", ".zstd"})


@dataclass(frozen=True, kw_only=True)
class SourceRecord:
    """A record of a source: a line of JSONL, a row of a table, or a line or document of plain text."""

    location: str
    """File and line, for errors."""
    fields: dict[str, Any]
    """Values by name; plain text is the field "prompt", or "text" if documents are read."""
    columns: dict[str, Any] | None = None
    """The values by their names in the source, where ``fields`` has other names."""
    first_prompt: tuple[int, ...] | list[dict[str, Any]] | None = None
    """Token ids or messages before the first response of a conversation of several, which share a prompt id."""

    @property
    def source_fields(self) -> dict[str, Any]:
        """Values by their names in the source."""
        return self.fields if self.columns is None else self.columns

    def with_fields(self, fields: dict[str, Any]) -> "SourceRecord":
        """The record with other fields, made of those in the source."""
        return replace(self, fields=fields, columns=self.source_fields)

    def error(self, problem: str) -> SourceError:
        """The error about this record."""
        return SourceError(f"{self.location}: {problem}")


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these names and values."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{shorten(next(name for name in names if names.count(name) > 1))} is there twice")
    return fields


parse_unique_json = partial(parse_json, make_object=_unique_names)
"""``parse_json``, which also raises ValueError if an object in the text has two values of one name."""


def parse_if_json(value: Any) -> Any:
    """A value, of JSON if it is a text that is."""
    try:
        return parse_json(value) if isinstance(value, str) else value
    except ValueError:
        return value


def read_jsonl(path: Path) -> Iterator[SourceRecord]:
    """Read the objects of a JSONL file, skipping blank lines.

    Raises:
        SourceError: at the first line that is not a JSON object, or not UTF-8.
    """
    for number, text in read_text_lines(path):
        if not text.strip():
            continue
        location, reason = f"{source_label(path)}, line {number}", ""
        try:
            fields = parse_unique_json(text)
        except ValueError as error:
            fields, reason = None, f" ({summarise_error(error)})"
        if not isinstance(fields, dict):
            raise SourceError(f"{location}: expected a JSON object and found {shorten(text)}{reason}")
        yield SourceRecord(location=location, fields=fields)


def read_plain_lines(path: Path) -> Iterator[SourceRecord]:
    """Read the non-blank lines of plain text as prompts, without line endings.

    Raises:
        SourceError: if a line is not UTF-8, or the lines end with carriage returns alone: all would be one prompt.
    """
    for number, text in read_text_lines(path):
        record = SourceRecord(location=f"{source_label(path)}, line {number}", fields={"prompt": text})
        if "\r" in text.strip("\r"):
            raise record.error("it holds a carriage return within; save it with line feeds, or as JSONL")
        if text.strip():
            yield record


def read_plain_documents(path: Path) -> Iterator[SourceRecord]:
    """Read the documents of plain text, which blank lines separate, one at a time."""
    lines: list[str] = []
    first = 0
    for number, text in chain(read_text_lines(path), [(0, "")]):
        if text.strip():
            first = first if lines else number
            lines.append(text)
        elif lines:
            yield SourceRecord(
                location=f"{source_label(path)}, line {first}", fields={"text": "\n".join(lines)}
            )
            lines = []


def get_field(
    record: SourceRecord,
    name: str,
    types: type | tuple[type, ...],
    expected: str,
    is_allowed: Callable[[Any], bool] = lambda value: True,
) -> Any:
    """The field ``name`` of a record, with its type and value checked; None if it is missing or null.

    Args:
        record: the record.
        name: of the field.
        types: the accepted types; bool is not accepted as a number.
        expected: what it must be in words, for the error.
        is_allowed: whether a value of these types is one.

    Raises:
        SourceError: if it has another type or value, or is text with a lone surrogate.
    """
    value = record.fields.get(name)
    if value is not None and (
        not isinstance(value, types) or isinstance(value, bool) or not is_allowed(value)
    ):
        raise record.error(f"expected {name!r} to be {expected} and found {show_value(value)}")
    return check_unicode(record, name, value) if isinstance(value, str) else value


def check_unicode(record: SourceRecord, name: str, text: str) -> str:
    """Check that the text of a field has no lone surrogate such as "\\ud83d", which JSON can hold; return it.

    Raises:
        SourceError: if it has one, which no tokenizer accepts.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise record.error(
            f"{name!r} holds half a character, \\u{ord(text[error.start]):04x}, at place {error.start}: something cut "
            "it in two; leave the half out"
        ) from error
    return text


def describe_fields(record: SourceRecord) -> str:
    """The names of a record's fields, as its source has them, for errors."""
    names = [
        shorten(name) + (" (null)" if value is None else "") for name, value in record.source_fields.items()
    ]
    return first_names(names, MAX_SHOWN_FIELDS) or "an empty object"


def first_names(names: Sequence[str], number: int) -> str:
    """So many names, and how many more there are."""
    shown = ", ".join(names[:number])
    return f"{shown} and {len(names) - number} more" if len(names) > number else shown


def shorten(text: str) -> str:
    """The first 60 characters of ``text``, quoted, for error messages."""
    text = text.strip()
    return repr(text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[:MAX_SHOWN_CHARACTERS]}…")


def show_value(value: Any) -> str:
    """The first 60 characters of a value as JSON, for error messages."""
    return shorten(json.dumps(value, default=str))


def is_list_of(value: Any, kind: type[Entry]) -> TypeGuard[list[Entry]]:
    """Whether a value is a list with at least one entry, all of type ``kind``; True and False are no numbers."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(entry, kind) and not isinstance(entry, bool) for entry in value)
    )


def is_message_list(value: Any) -> bool:
    """Whether a value is a list of messages: objects with a role, or a speaker as in ShareGPT's conversations."""
    return is_list_of(value, dict) and all("role" in entry or "from" in entry for entry in value)


def is_finite_number(value: Any) -> bool:
    """Whether a value is a finite number that fits a float; integers in JSON can be too large for one."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def without_nulls(value: Any) -> Any:
    """A value without the null keys that a data set adds to objects, of which each has the keys of all."""
    if isinstance(value, dict):
        return {name: without_nulls(part) for name, part in value.items() if part is not None}
    return [without_nulls(part) for part in value] if isinstance(value, list) else value


def source_label(path: Path) -> str:
    """The name of a source file for error messages."""
    return "standard input" if path.name == COPY_OF_STANDARD_INPUT else str(path)


def uncompressed_suffix(path: Path) -> str:
    """The suffix of a file in lower case, without that of its compression: ".jsonl" of "a.jsonl.gz"."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in COMPRESSED_SUFFIXES else suffix


def compression_of(file: BinaryIO) -> str | None:
    """The program that compressed a file, which is at its beginning; None if it is not compressed."""
    start = file.read(4)
    file.seek(0)
    return next((program for program, pattern in COMPRESSIONS.items() if pattern.match(start)), None)


@contextmanager
def open_unpacked(path: Path) -> Iterator[BinaryIO]:
    """Context with a file that is open for reading, unpacked if gzip or zstd compressed it.

    Raises:
        SourceError: if it cannot be opened, or what is read of it is damaged.
        MissingExtraError: if it is compressed by zstd and pyarrow is not installed.
    """
    label = source_label(path)
    try:
        with path.open("rb") as file:
            program = compression_of(file)
            if program is None:
                yield file
            elif program == "gzip":
                yield cast("BinaryIO", gzip.GzipFile(fileobj=file))
            else:
                stream: Any = import_extra("pyarrow", "models").CompressedInputStream(file, program)
                yield io.BufferedReader(stream)
    except (OSError, EOFError, zlib.error) as error:
        raise SourceError(
            f"{label} cannot be read: {getattr(error, 'strerror', None) or summarise_error(error)}"
        ) from error


def first_line(path: Path) -> str:
    """The first line of a text file that is not blank, without its end; "" if there is none."""
    return next((text for _, text in read_text_lines(path) if text.strip()), "")


def read_text_lines(path: Path, *, keep_ends: bool = False) -> Iterator[tuple[int, str]]:
    """Number and text of each line of a UTF-8 file, unpacked and without a byte-order mark.

    Args:
        path: the file.
        keep_ends: whether to keep the line endings.

    Raises:
        SourceError: if the file cannot be read, or holds a byte that no text in UTF-8 has. This refuses every file that
            is neither text nor one of the tables that are read, such as archives, spreadsheets and UTF-16.
    """
    number, label = 0, source_label(path)
    try:
        with open_unpacked(path) as file:
            for number, raw in enumerate(file, start=1):
                text = (raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw).decode("utf-8")
                if "\0" in text:
                    raise UnicodeDecodeError("utf-8", b"\0", 0, 1, "no text holds it")
                yield number, text if keep_ends else text.removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise SourceError(
            f"{label}, line {number}: expected UTF-8 and found byte 0x{error.object[error.start]:02x}; give text in "
            "UTF-8, Parquet or Arrow, unpacked or with .gz or .zst"
        ) from error
