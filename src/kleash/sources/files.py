"""Finding source files, detecting their format, and reading their records."""

import atexit
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from hashlib import sha256
from pathlib import Path
from shutil import copyfileobj, rmtree
from tempfile import mkdtemp
from typing import Literal

from kleash.errors import SourceError
from kleash.jobs.option_groups import shown_endpoint
from kleash.jobs.reading import DatasetOptions, ReadOptions, SourceKind
from kleash.shipped import shipped_prompts, shipped_text
from kleash.sources.columns import choose_columns, describe_choices, named_columns, rename_columns
from kleash.sources.dataset_folders import find_dataset
from kleash.sources.records import (
    COPY_OF_STANDARD_INPUT,
    SourceRecord,
    first_line,
    open_unpacked,
    parse_if_json,
    read_jsonl,
    read_plain_documents,
    read_plain_lines,
    read_text_lines,
    shorten,
    source_label,
    uncompressed_suffix,
)
from kleash.sources.tables import (
    ARROW_FILE,
    ARROW_STREAM,
    find_delimiter,
    read_arrow,
    read_csv,
    read_json_array,
    read_parquet,
)
from kleash.store.file_hashes import hash_files, watch_files

STANDARD_INPUT = "-"
SHIPPED = {"shipped:prompts": shipped_prompts, "shipped:text": shipped_text}
SourceFormat = Literal["JSONL", "a JSON array", "CSV", "Parquet", "Arrow", "plain text"]
FORMATS: Mapping[SourceKind, tuple[SourceFormat, ...]] = {
    "prompts": ("JSONL", "a JSON array", "CSV", "Parquet", "plain text"),
    "text": ("JSONL", "a JSON array", "CSV", "Parquet", "plain text"),
    "responses": ("JSONL", "a JSON array", "CSV", "Parquet"),
    "pairs": ("JSONL", "a JSON array", "CSV", "Parquet"),
    "rollouts": ("JSONL", "a JSON array", "Parquet"),
    "whole text": ("plain text",),
}
"""What is in a source -> the formats that it may have, besides Arrow, which is read wherever Parquet is."""
FORMAT_BY_SUFFIX: Mapping[str, SourceFormat | None] = {
    **dict.fromkeys((".jsonl", ".ndjson"), "JSONL"),
    **dict.fromkeys((".csv", ".tsv"), "CSV"),
    ".txt": "plain text",
    **dict.fromkeys((".parquet", ".pq"), "Parquet"),
    **dict.fromkeys((".arrow", ".feather", ".ipc"), "Arrow"),
    **dict.fromkeys((".yaml", ".yml", ".xml", ".html", ".toml", ".ini", ".ipynb"), None),
}
"""Formats of files by suffix, which takes precedence over their content; None for text of a structure of its own."""
JSON_START = re.compile(r'\s*(\{|\[\s*\{?)\s*("|$)')
"""First line of an object, or of an array of objects or texts, in JSON."""


VERL_COLUMNS = frozenset(("input", "output", "gts", "score", "step"))
"""Columns of verl's log of rollouts."""
VERL_NOTE = (
    "verl leaves special tokens out of 'input' and 'output', so the models read other tokens than in the rollout if "
    "its prompts were rendered by a chat template"
)
SYSTEM_COLUMNS = ("system", "system_prompt")
"""Usual names of columns with a system prompt."""


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

    def records(self) -> Iterator[SourceRecord]:
        """Iterate over the records, with the fields that their columns stand for; the first decides which these are.

        Raises:
            SourceError: if a file is damaged, or a column that an option names is not there.
        """
        choices = None
        for record in self.raw_records():
            choices = choose_columns(record, self.kind, self.reading) if choices is None else choices
            yield rename_columns(record, choices)

    def raw_records(self) -> Iterator[SourceRecord]:
        """Iterate over the records as they lie in the files."""
        named = named_columns(self.reading)
        for path in self.paths:
            yield from read_records(path, self.kind, named)

    def sha256(self) -> str:
        """The SHA-256 of the file's bytes; of several files, that of their hashes in order."""
        hashes = hash_files(self.paths)
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
    if not name.strip():
        raise SourceError(f"the name of the source is empty; give a file of {accepted_formats(kind)}")
    if name != STANDARD_INPUT and name not in SHIPPED:
        dataset = find_dataset(name, reading)
        if dataset is not None:
            paths, notes = dataset
            watch_files(paths)
            return Source(name=name, kind=kind, paths=paths, reading=reading, notes=notes)
    path = source_path(name, kind)
    for option in ("split", "dataset_config"):
        value = getattr(reading, option)
        if value is not None:
            raise SourceError(
                f"{source_label(path)} is one file, which has no {shorten(value)}; leave "
                f"--{option.replace('_', '-')} out"
            )
    return Source(name=name, kind=kind, paths=(path,), reading=reading)


def describe_source(kind: SourceKind, name: str, options: DatasetOptions | None = None) -> tuple[str, ...]:
    """The notes about the files of a source and its columns, of which the first record decides.

    Args:
        kind: what the source is read for.
        name: of the source.
        options: how it is read, such as a job; None for the defaults.

    Raises:
        SourceError: if the first record cannot be read.
    """
    source = find_source(name, kind, options)
    first = next(source.raw_records(), None)
    if first is None:
        return source.notes
    choices = choose_columns(first, kind, source.reading)
    unread = [
        f"the column {name!r} is not read; put it into the messages, as the first, of the role system"
        for name in SYSTEM_COLUMNS
        if isinstance(first.fields.get(name), str) and first.fields[name].strip()
    ]
    is_of_verl = (
        kind == "responses" and first.fields.keys() >= VERL_COLUMNS and not named_columns(source.reading)
    )
    return (*source.notes, *describe_choices(choices, kind), *unread, *((VERL_NOTE,) if is_of_verl else ()))


def source_path(name: str, kind: SourceKind) -> Path:
    """The path of a source: the file ``name``, a shipped file, or a copy of standard input.

    Args:
        name: a path, "shipped:prompts", "shipped:text", or "-" for standard input.
        kind: what is in it, a key of ``FORMATS``.

    Raises:
        SourceError: if there is no such file, or it is empty, or it cannot be read twice.
    """
    if name == STANDARD_INPUT:
        path = _copy_of_standard_input()
    else:
        path = SHIPPED[name]() if name in SHIPPED else Path(name).expanduser()
    hint = "; texts themselves stand in a file, or in Python in a list" if " " in name else ""
    try:
        size = path.stat().st_size
    except (FileNotFoundError, NotADirectoryError) as error:
        raise SourceError(f"there is no file {shown_endpoint(name)}{hint}") from error
    except (OSError, ValueError) as error:  # such as a prompt given as a name: too long, or with a NUL
        raise SourceError(
            f"{shorten(name)} cannot be read ({getattr(error, 'strerror', None) or error}); give the name of a file "
            f"of {accepted_formats(kind)}{hint}"
        ) from error
    if not path.is_file():
        raise SourceError(
            f"{name} is a {'folder' if path.is_dir() else 'pipe or device'}; give a file of {accepted_formats(kind)}, "
            f"or {STANDARD_INPUT} and pipe it to standard input"
        )
    if size == 0:
        raise SourceError(f"{source_label(path)} is empty; give a file of {accepted_formats(kind)}")
    watch_files([path])
    return path


@lru_cache(maxsize=1)
def _copy_of_standard_input() -> Path:
    """Copy standard input to a file, since it can be read only once; the file is deleted when the process ends."""
    stream = getattr(sys.stdin, "buffer", None)
    if stream is None or stream.isatty():
        problem = "closed" if stream is None else "a terminal"
        raise SourceError(f"standard input is {problem}; pipe a file to it, or give the file's name")
    folder = Path(mkdtemp(prefix="kleash-"))
    atexit.register(rmtree, folder, ignore_errors=True)
    path = folder / COPY_OF_STANDARD_INPUT
    with path.open("xb") as copy:
        copyfileobj(stream, copy)
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
    readers: Mapping[SourceFormat, Callable[[Path], Iterator[SourceRecord]]] = {
        "JSONL": read_jsonl,
        "a JSON array": partial(read_json_array, text_field="text" if kind == "text" else "prompt"),
        "CSV": partial(read_csv, named=named),
        "Parquet": read_parquet,
        "Arrow": read_arrow,
        "plain text": read_plain_documents if kind == "text" else read_plain_lines,
    }
    return readers[detect_format(path, kind, named)](path)


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


def accepted_formats(kind: SourceKind) -> str:
    """The formats of ``FORMATS`` for errors: "JSONL, a JSON array or Parquet"."""
    *names, last = FORMATS[kind]
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
        SourceError: if the format is none of ``FORMATS[kind]``, or the file cannot be read.
    """
    label, suffix = source_label(path), uncompressed_suffix(path)
    with open_unpacked(path) as file:
        start = file.read(len(ARROW_FILE))
    if start.startswith(b"PAR1"):
        source_format = "Parquet"
    elif start.startswith((ARROW_FILE, ARROW_STREAM)):
        source_format = "Arrow"
    elif suffix in FORMAT_BY_SUFFIX:
        source_format = FORMAT_BY_SUFFIX[suffix]
    else:
        source_format = _format_by_content(path, suffix, named)
    if source_format is None or source_format not in (*FORMATS[kind], "Arrow"):
        contents = "texts" if kind == "whole text" else kind
        raise SourceError(
            f"{label} is read as {source_format or suffix}, and {contents} come as {accepted_formats(kind)}; convert it"
        )
    return source_format


def _format_by_content(path: Path, suffix: str, named: Collection[str]) -> SourceFormat:
    """The format of a file whose suffix is unknown or ".json", by its first line that is not blank."""
    text = first_line(path)
    if isinstance(parse_if_json(text), dict) or (suffix == ".json" and not text):
        return "JSONL"
    if suffix == ".json" or JSON_START.match(text):
        return "a JSON array"
    return "CSV" if find_delimiter(text, named, names_only=True) else "plain text"
