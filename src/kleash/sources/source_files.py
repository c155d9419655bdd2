"""Finding source files, and reading their records."""

import atexit
import re
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from shutil import copyfileobj, rmtree
from stat import S_ISDIR, S_ISFIFO, S_ISREG
from tempfile import mkdtemp
from typing import BinaryIO

from kleash.errors import SourceError
from kleash.jobs.option_groups import shown_endpoint
from kleash.jobs.reading import DatasetOptions, ReadOptions, SourceKind
from kleash.shipped import shipped_prompts, shipped_text
from kleash.sources.columns import (
    ColumnChoice,
    choose_columns,
    named_columns,
    rename_columns,
)
from kleash.sources.csv_files import read_csv
from kleash.sources.dataset_folders import find_dataset
from kleash.sources.source_formats import accepted_formats, detect_format
from kleash.sources.source_records import (
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
from kleash.sources.tabular import read_arrow, read_json_array, read_parquet
from kleash.store.file_hashes import hash_watched, watch_files

STANDARD_INPUT = "-"
OPEN_FILE = re.compile(r"/(dev|proc/self)/fd/[0-9]+")
"""Path of a file that this process has open, as a shell writes <(...)."""
HUB_ADDRESS = re.compile(r"(?:https?://(?:www\.)?huggingface\.co/|hf://)datasets/([\w.-]+/[\w.-]+)")
"""Address of a data set on the hub."""
SHIPPED = {"shipped:prompts": shipped_prompts, "shipped:text": shipped_text}


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
        hashes = [hash_watched(path, _hash_file) for path in self.paths]
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
            watch_files(dataset.paths)
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
        if "://" in name and not hub_name:
            raise SourceError(
                f"{shown_endpoint(name)} is an address, and files are not downloaded; download it, and give the file's "
                "name"
            ) from error
        raise SourceError(f"there is no file {shown_endpoint(name)}{hint}") from error
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
    watch_files([path])
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
    except SourceError:
        raise
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
