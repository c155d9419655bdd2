"""Records of source files, readers of JSONL and plain text, and checks with errors that name file and line."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from kleash.errors import SourceError, summarise_error
from kleash.sources.compression import compression_of, open_unpacked

MAX_SHOWN_CHARACTERS = 60
MAX_SHOWN_FIELDS = 16
COPY_OF_STANDARD_INPUT = "kleash-standard-input"
"""File name of the copy of standard input."""
COPY_OF_PIPE = "kleash-pipe"
"""File name of the copy of a pipe."""


@dataclass(frozen=True, kw_only=True)
class SourceRecord:
    """A record of a source: a line of JSONL, a row of a table, or a line or document of plain text."""

    number: int
    """Number of its line, row or entry in the file, from 1."""
    location: str
    """File and line, for errors."""
    text: str
    """The plain text; not used if the record has fields."""
    fields: dict[str, Any] | None = None
    """Values by name; None in plain text."""
    columns: dict[str, Any] | None = None
    """Values by their names in the source, where ``fields`` has others."""
    is_rendered: bool = False
    """Whether a chat template wrote the text, with all its special tokens."""
    first_prompt: tuple[int, ...] | list[dict[str, Any]] | None = None
    """Token ids or messages before the first response of a conversation of several, which share a prompt id."""


def parse_json(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: if it is no JSON, or an object in it has two values of one name.
        RecursionError: if it is nested too deeply.
    """
    return _DECODER.decode(text)


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these names and values."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{shorten(next(name for name in names if names.count(name) > 1))} is there twice")
    return fields


_DECODER = json.JSONDecoder(object_pairs_hook=_unique_names)


def without_nulls(value: Any) -> Any:
    """A value without the null keys that Parquet adds to objects of a column."""
    if isinstance(value, dict):
        return {name: without_nulls(part) for name, part in value.items() if part is not None}
    return [without_nulls(part) for part in value] if isinstance(value, list) else value


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
            fields = parse_json(text)
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
    """Read the documents of plain text, which blank lines separate, one at a time."""
    lines: list[str] = []
    first = 0
    for number, text in read_text_lines(path):
        if text.strip():
            first = first if lines else number
            lines.append(text)
        elif lines:
            yield SourceRecord(
                number=first, location=f"{source_label(path)}, line {first}", text="\n".join(lines)
            )
            lines = []
    if lines:
        yield SourceRecord(
            number=first, location=f"{source_label(path)}, line {first}", text="\n".join(lines)
        )


def get_field(record: SourceRecord, name: str, types: type | tuple[type, ...], expected: str) -> Any:
    """The field ``name`` of a record, with its type checked; None if it is missing or null.

    Args:
        record: with fields.
        name: of the field.
        types: the accepted types; bool is not accepted as a number.
        expected: these types in words, for the error.

    Raises:
        SourceError: if it has another type, or is text with a lone surrogate.
    """
    assert record.fields is not None
    value = record.fields.get(name)
    accepted = types if isinstance(types, tuple) else (types,)
    if isinstance(value, str) and str in accepted:
        return check_unicode(record, repr(name), value)
    if value is None or (isinstance(value, accepted) and not isinstance(value, bool)):
        return value
    raise SourceError(f"{record.location}: expected {name!r} to be {expected} and found {show_value(value)}")


def describe_fields(record: SourceRecord) -> str:
    """The names of a record's fields, as its source has them, for errors."""
    columns = record.columns or record.fields or {}
    shown = ", ".join(
        shorten(str(name)) + (" (null)" if value is None else "")
        for name, value in list(columns.items())[:MAX_SHOWN_FIELDS]
    )
    more = len(columns) - MAX_SHOWN_FIELDS
    return f"{shown} and {more} more" if more > 0 else shown or "an empty object"


def check_unicode(record: SourceRecord, what: str, text: str) -> str:
    """Check that ``text`` has no lone surrogate such as "\\ud83d", which JSON can hold; return it.

    Raises:
        SourceError: if it has one, which no tokenizer accepts.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        surrogate = f"\\u{ord(text[error.start]):04x}"
        raise SourceError(
            f"{record.location}: {what} holds half a character, {surrogate}, at place {error.start}: something cut it "
            "in two; leave the half out"
        ) from error
    return text


def shorten(text: str) -> str:
    """The first 60 characters of ``text``, quoted, for error messages."""
    text = text.strip()
    return repr(text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[:MAX_SHOWN_CHARACTERS]}…")


def show_value(value: Any) -> str:
    """The first 60 characters of a value as JSON, for error messages."""
    return shorten(json.dumps(value, default=str))


def check_names(names: list[str], label: str) -> None:
    """Check that no two columns have the same name; columns without a name are left out.

    Raises:
        SourceError: if two have.
    """
    duplicate_names = sorted({name for name in names if name and names.count(name) > 1})
    if duplicate_names:
        raise SourceError(f"{label} has the column {shorten(duplicate_names[0])} more than once; keep one")


def is_message_list(value: Any) -> bool:
    """Whether a value is a list of messages: objects with a role, or a speaker as in ShareGPT's conversations."""
    is_list = isinstance(value, list) and bool(value)
    return is_list and all(
        isinstance(entry, dict) and ("role" in entry or "from" in entry) for entry in value
    )


def is_finite_number(value: Any) -> bool:
    """Whether a value is a finite number that fits a float; integers in JSON can be too large for one."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(float(value))
    except OverflowError:
        return False


def source_label(path: Path) -> str:
    """The name of a source file for error messages."""
    return {COPY_OF_STANDARD_INPUT: "standard input", COPY_OF_PIPE: "the pipe"}.get(path.name, str(path))


def read_text_lines(path: Path, *, keep_ends: bool = False) -> Iterator[tuple[int, str]]:
    """Number and text of each line of a UTF-8 file, unpacked and without a byte-order mark.

    Args:
        path: the file.
        keep_ends: whether to keep the line endings.

    Raises:
        SourceError: if the file cannot be read, is not UTF-8, or holds NUL bytes.
    """
    number = 0
    label = source_label(path)
    try:
        with open_unpacked(path, label) as file:
            for number, raw in enumerate(file, start=1):
                line = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
                if number == 1 and compression_of(raw) is not None:
                    raise SourceError(f"{label} is compressed twice; unpack it once")
                if b"\0" in line:
                    raise SourceError(
                        f"{label}, line {number}: it holds a NUL byte, so the file is UTF-16 or no text; save it as "
                        "UTF-8"
                    )
                text = line.decode("utf-8")
                yield number, text if keep_ends else text.removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise SourceError(
            f"{label}, line {number}: expected UTF-8 and found byte 0x{error.object[error.start]:02x}; "
            "save the file as UTF-8"
        ) from error
    except OSError as error:
        raise SourceError(f"{label} cannot be read: {error.strerror or error}") from error
