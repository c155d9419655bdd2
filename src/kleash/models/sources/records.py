"""Records of source files, readers of JSONL and plain text, and checks with errors that name file and line."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from kleash.errors import SourceError
from kleash.models.compat import summarise_error

SHOWN = 60
COPY_OF_STANDARD_INPUT = "kleash-standard-input"
"""File name of the copy of standard input."""


@dataclass(frozen=True, kw_only=True)
class SourceRecord:
    """One record of a source: a line of JSONL, a row of a table, a line or a document of plain text."""

    number: int
    """From 1."""
    location: str
    """File and line, for errors."""
    text: str
    fields: dict[str, Any] | None = None
    """The fields of a record; None in plain text."""


def read_jsonl(path: Path) -> Iterator[SourceRecord]:
    """Read the objects of a JSONL file, skipping blank lines.

    Raises:
        SourceError: at the first line that is not a JSON object, or not UTF-8.
    """
    for number, text in read_text_lines(path):
        if not text.strip():
            continue
        location = f"{source_label(path)}, line {number}"
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise SourceError(
                f"{location}: expected a JSON object and found {shorten(text)} ({summarise_error(error)})"
            ) from error
        if not isinstance(fields, dict):
            raise SourceError(f"{location}: expected a JSON object and found {shorten(text)}")
        yield SourceRecord(number=number, location=location, text=text, fields=fields)


def read_plain_lines(path: Path) -> Iterator[SourceRecord]:
    """Read the non-blank lines of plain text, without line endings.

    Raises:
        SourceError: if a line is not UTF-8, or the lines end with carriage returns alone.
    """
    for number, text in read_text_lines(path):
        location = f"{source_label(path)}, line {number}"
        if "\r" in text.strip("\r"):
            raise SourceError(
                f"{location}: it holds a carriage return that is not at its end; save the file with line feeds, or "
                "as JSONL if the prompt contains it"
            )
        if text.strip():
            yield SourceRecord(number=number, location=location, text=text)


def read_plain_documents(path: Path) -> Iterator[SourceRecord]:
    """Read documents separated by blank lines, one at a time."""
    held: list[str] = []
    first = 0
    for number, text in read_text_lines(path):
        if text.strip():
            first = first if held else number
            held.append(text)
        elif held:
            yield SourceRecord(
                number=first, location=f"{source_label(path)}, line {first}", text="\n".join(held)
            )
            held = []
    if held:
        yield SourceRecord(number=first, location=f"{source_label(path)}, line {first}", text="\n".join(held))


def get_field(record: SourceRecord, name: str, kind: type | tuple[type, ...], what: str) -> Any:
    """The field ``name`` of a record, checked; None if the record has none or null.

    Raises:
        SourceError: if it is of another kind than ``what`` says, or text with half a character in it.
    """
    assert record.fields is not None
    value = record.fields.get(name)
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if isinstance(value, str) and str in kinds:
        return check_unicode(record, repr(name), value)
    if value is None or (isinstance(value, kinds) and not isinstance(value, bool)):
        return value
    raise SourceError(f"{record.location}: expected {name!r} to be {what} and found {show_value(value)}")


def check_unicode(record: SourceRecord, what: str, text: str) -> str:
    """``text``, if it is made of whole characters: JSON can also write half of one, such as "\\ud83d".

    Raises:
        SourceError: if it is not; no tokenizer takes it.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise SourceError(
            f"{record.location}: {what} holds half a character, {half}, at place {error.start}: something cut it in "
            "two; leave the half out"
        ) from error
    return text


def shorten(text: str) -> str:
    """The start of ``text``, quoted, for error messages."""
    text = text.strip()
    return repr(text if len(text) <= SHOWN else f"{text[:SHOWN]}…")


def show_value(value: Any) -> str:
    """The start of a field's value as JSON, for error messages."""
    return shorten(json.dumps(value, default=str))


def is_finite_number(value: Any) -> bool:
    """Whether a field's value is a number that a float can hold; JSON also writes whole numbers of any length."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(float(value))
    except OverflowError:
        return False


def source_label(path: Path) -> str:
    """The name of a source file for error messages."""
    return "standard input" if path.name == COPY_OF_STANDARD_INPUT else str(path)


def read_text_lines(path: Path, *, ends: bool = False) -> Iterator[tuple[int, str]]:
    """Number and text of each line of a UTF-8 file; a byte-order mark is not part of the text.

    Args:
        path: the file.
        ends: keep the characters that end a line.

    Raises:
        SourceError: if the file cannot be read, is not UTF-8, or holds NUL bytes.
    """
    number = 0
    label = source_label(path)
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                line = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
                if b"\0" in line:
                    raise SourceError(
                        f"{label}, line {number}: it holds a NUL byte, so the file is UTF-16 or no text; save it as "
                        "UTF-8"
                    )
                text = line.decode("utf-8")
                yield number, text if ends else text.removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise SourceError(
            f"{label}, line {number}: expected UTF-8 and found byte 0x{error.object[error.start]:02x}; "
            "save the file as UTF-8"
        ) from error
    except OSError as error:
        raise SourceError(f"{label} cannot be read: {error.strerror or error}") from error
