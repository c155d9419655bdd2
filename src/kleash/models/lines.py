"""Reading text files line by line, with errors that say where."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Any

from kleash.errors import SourceError
from kleash.models.quiet import first_line
from kleash.shipped import shipped_prompts, shipped_text

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
SHIPPED = {"shipped:prompts": shipped_prompts, "shipped:text": shipped_text}
PACKED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
"""How packed files begin."""
SHOWN = 60


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a source, or one document of several."""

    number: int
    """From 1."""
    where: str
    """File and line, for errors."""
    text: str
    record: dict[str, Any] | None = None
    """What the line says, in JSONL; None in plain text."""


def source_path(name: str) -> Path:
    """The file called ``name``, or one that ships with kleash.

    Raises:
        SourceError: if there is no such file, or nothing in it, or it cannot be read twice.
    """
    path = SHIPPED[name]() if name in SHIPPED else Path(name).expanduser()
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise SourceError(f"there is no file {name}") from error
    except (OSError, ValueError) as error:  # a whole prompt is too long a name; no name holds a NUL
        reason = getattr(error, "strerror", None) or error
        raise SourceError(
            f"{shorten(name)} cannot be read ({reason}); give the name of a file of JSONL or plain text"
        ) from error
    if S_ISDIR(found.st_mode):
        raise SourceError(f"{name} is a folder; give a file of JSONL or plain text")
    if not S_ISREG(found.st_mode):
        raise SourceError(
            f"{name} is a pipe or a device, and a source is read more than once; write it to a file first"
        )
    if found.st_size == 0:
        raise SourceError(f"{name} is empty; give a file of JSONL or plain text")
    return path


def is_jsonl(path: Path) -> bool:
    """Whether the file is JSONL: by its suffix, or, where that says nothing, by its first line that is not
    blank.

    A .txt file is plain text whatever it holds.
    """
    if path.suffix.lower() in JSON_SUFFIXES:
        return True
    if path.suffix.lower() == ".txt":
        return False
    for _, text in _raw_lines(path):
        if text.strip():
            try:
                return isinstance(json.loads(text), dict)
            except (ValueError, RecursionError):
                return False
    return False


def json_lines(path: Path) -> Iterator[Line]:
    """The objects of a JSONL file; blank lines are passed over.

    Raises:
        SourceError: at the first line that is not a JSON object, or not UTF-8.
    """
    for number, text in _raw_lines(path):
        if not text.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise SourceError(
                f"{where}: expected a JSON object and found {shorten(text)} ({first_line(error)})"
            ) from error
        if not isinstance(record, dict):
            raise SourceError(f"{where}: expected a JSON object and found {shorten(text)}")
        yield Line(number=number, where=where, text=text, record=record)


def plain_lines(path: Path) -> Iterator[Line]:
    """The lines of plain text that are not blank, without their ends."""
    for number, text in _raw_lines(path):
        if text.strip():
            yield Line(number=number, where=f"{path}, line {number}", text=text)


def plain_documents(path: Path) -> Iterator[Line]:
    """What stands between blank lines; only one document is held at a time."""
    held: list[str] = []
    first = 0
    for number, text in _raw_lines(path):
        if text.strip():
            first = first if held else number
            held.append(text)
        elif held:
            yield Line(number=first, where=f"{path}, line {first}", text="\n".join(held))
            held = []
    if held:
        yield Line(number=first, where=f"{path}, line {first}", text="\n".join(held))


def field(line: Line, name: str, kind: type | tuple[type, ...], what: str) -> Any:
    """The field ``name`` of a JSONL line, checked; None if the line has none or null.

    Raises:
        SourceError: if it is of another kind than ``what`` says, or text with half a character in it.
    """
    assert line.record is not None
    value = line.record.get(name)
    if isinstance(value, str) and kind is str:
        return whole(line, repr(name), value)
    if value is None or (isinstance(value, kind) and not isinstance(value, bool)):
        return value
    raise SourceError(f"{line.where}: expected {name!r} to be {what} and found {shorten(json.dumps(value))}")


def whole(line: Line, what: str, text: str) -> str:
    """``text``, if it is made of whole characters: JSON can also write half of one, such as "\\ud83d".

    Raises:
        SourceError: if it is not; no tokenizer takes it.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise SourceError(
            f"{line.where}: {what} holds half a character, {half}, at place {error.start}: something cut it in two; "
            "leave the half out"
        ) from error
    return text


def shorten(text: str) -> str:
    """The beginning of ``text``, as it can stand inside a sentence."""
    text = text.strip()
    return repr(text if len(text) <= SHOWN else f"{text[:SHOWN]}…")


def _raw_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Number and text of each line, without its end; a byte-order mark is not part of the text."""
    number = 0
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                text = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
                yield number, text.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        for start, packer in PACKED.items():
            if number == 1 and error.object.startswith(start):
                raise SourceError(f"{path} is packed by {packer}; unpack it first") from error
        raise SourceError(
            f"{path}, line {number}: expected UTF-8 and found byte 0x{error.object[error.start]:02x}; "
            "save the file as UTF-8"
        ) from error
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror or error}") from error
