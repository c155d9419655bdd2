"""Checksums of the files of a folder, written with them and verified when they are read back.

``checksums.jsonl`` holds a line for each file of a folder that is ever read back: its name, its size and its SHA-256.
A line is appended before the file gets its name, so that a kill at any moment leaves a file that is complete and has
its line, or a line too many, which is harmless. A damaged line makes its file one that is damaged, or has no checksum.

If several processes write a folder, each appends to a file of its own, such as ``checksums-3f9a21c0.jsonl``. Readers
take the lines of all.
"""

import json
import os
from collections.abc import Callable, Generator, Iterable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

from kleash.errors import KleashError, RunFolderError
from kleash.store.atomic import append_lines, remove_file, sync_folder, write_atomically, writing
from kleash.store.codec import decode, parse_json

T = TypeVar("T")

CHECKSUMS = "checksums.jsonl"
OTHER_CHECKSUMS = "checksums-*.jsonl"
"""The files of the writers other than the first."""
BLOCK = 1 << 20
MAX_THREADS = 16
COPY = "copy the whole folder again, or make it anew in another one"


@dataclass(frozen=True)
class FileChecksum:
    """Size and SHA-256 of a file's bytes."""

    size: int
    sha256: str


@dataclass
class HashSoFar:
    """The SHA-256 of the beginning of a file to which lines are appended, so that none is read twice."""

    size: int = 0
    digest: Any = field(default_factory=sha256)


ChecksumLine = tuple[str, FileChecksum | None]
"""A line: the name of a file, and its checksum; None for a file that was removed."""


class Checksums:
    """What the checksum files of a folder say of the files in it."""

    def __init__(self, root: Path, lines: Iterable[ChecksumLine]) -> None:
        """Collect the lines of a folder.

        A file may have several: it was replaced, and a kill may have come before or after the new one got its name.
        """
        self.root = root
        self._files: dict[str, list[FileChecksum]] = {}
        for name, checksum in lines:
            if checksum is None:
                self._files.pop(name, None)
            else:
                self._files.setdefault(name, []).append(checksum)

    @classmethod
    def read(cls, root: Path) -> "Checksums":
        """The checksums of the folder ``root``; if their file is missing, no file in it can be read.

        Raises:
            RunFolderError: if a file of checksums is damaged.
        """
        files = (root / CHECKSUMS, *sorted(root.glob(OTHER_CHECKSUMS)))
        return cls(root, [line for path in files for line in _lines_of(path)])

    @property
    def names(self) -> Set[str]:
        """The names of the files that were written and not taken away since."""
        return self._files.keys()

    def fingerprint(self, is_chosen: Callable[[str], bool]) -> str:
        """32 hex digits: the hash of the checksums of all files for whose name ``is_chosen`` is true."""
        lines = sorted(
            f"{name} {checksum.sha256}\n"
            for name in self._files
            if is_chosen(name)
            for checksum in set(self._files[name])
        )
        return sha256("".join(lines).encode()).hexdigest()[:32]

    def expects(self, path: Path) -> bool:
        """Whether a file was written and not taken away since."""
        return self._name(path) in self._files

    def read_bytes(self, path: Path, advice: str = COPY) -> bytes:
        """The bytes of a file, as they were written.

        Args:
            path: a file in the folder.
            advice: what to do where it is damaged, for the error.

        Raises:
            RunFolderError: if it is missing, cannot be read, or is not what was written.
        """
        with reading(path, advice):
            content = path.read_bytes()
        self._require(path, FileChecksum(len(content), sha256(content).hexdigest()), advice)
        return content

    def read_record(self, kind: type[T], path: Path, what: str, advice: str = COPY) -> T:
        """The record of this kind that a JSON file holds, as it was written.

        Args:
            kind: a dataclass.
            path: a file in the folder.
            what: what the file is, for the error: "the header of a run".
            advice: what to do where it is damaged, for the error.

        Raises:
            RunFolderError: if it is missing, is none, is of another schema, or is not what was written.
        """
        content = self.read_bytes(path, advice)
        try:
            return decode(kind, parse_json(content))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise RunFolderError(f"{path} cannot be read as {what}: {error}; {advice}") from error

    def read_if_written(self, kind: type[T], path: Path, what: str, advice: str = COPY) -> T | None:
        """``read_record`` of a file that a run may lack; None if it was not written, or was taken away since."""
        if not path.exists() and not self.expects(path):
            return None
        return self.read_record(kind, path, what, advice)

    def check(self, path: Path, advice: str = COPY) -> None:
        """See that a file that others will read is as it was written; as ``read_bytes``, without holding it."""
        with reading(path, advice):
            checksum = file_checksum(path)
        self._require(path, checksum, advice)

    def check_all(self, names: Callable[[str], bool] = lambda name: True, advice: str = COPY) -> None:
        """See that all files whose name is chosen are there, as they were written.

        Raises:
            RunFolderError: naming one that is not.
        """
        paths = [self.root / name for name in sorted(self._files) if names(name)]
        in_threads(lambda path: self.check(path, advice), paths)

    def require_beginning(self, path: Path, content: bytes, advice: str = COPY) -> None:
        """Check that a file to which lines are appended begins with the bytes of its newest checksum, if it has one.

        Raises:
            RunFolderError: if it is shorter, has other bytes, or nothing in the folder has a checksum.
        """
        if self.expects(path):
            newest = self._files[self._name(path)][-1]
            self._require(path, FileChecksum(newest.size, sha256(content[: newest.size]).hexdigest()), advice)
        elif content and not self._files:
            raise RunFolderError(f"{path} cannot be trusted: {CHECKSUMS} is missing or empty; {advice}")

    def _require(self, path: Path, checksum: FileChecksum, advice: str) -> None:
        """Raise RunFolderError unless this checksum was recorded for the file."""
        if not self.expects(path):
            raise RunFolderError(f"{path} cannot be trusted: {CHECKSUMS} has no checksum of it; {advice}")
        if checksum not in self._files[self._name(path)]:
            raise RunFolderError(f"{path} is damaged: it has other bytes than were written; {advice}")

    def _name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()


def read_result(kind: type[T], path: Path, what: str, missing: str, advice: str) -> T:
    """The record of this kind in the JSON file of a finished job.

    Args:
        kind: as for ``Checksums.read_record``, as are ``what`` and ``advice``.
        path: the file, whose folder has the checksums.
        what: what the file is.
        missing: what to do where the file is missing.
        advice: what to do where it is damaged.

    Raises:
        RunFolderError: if it is missing, damaged, or of another schema.
    """
    with reading(path, missing):
        if is_there(path):
            return Checksums.read(path.parent).read_record(kind, path, what, advice)
    lacks = f"{path.parent} has no {path.name}; {missing}"
    raise RunFolderError(lacks if path.parent.exists() else f"there is no folder {path.parent}")


def write_checked(
    root: Path, path: Path, content: str | bytes | Callable[[Path], None], *, writer: str = ""
) -> None:
    """Write a file atomically, and its checksum into the folder ``root``, in which ``path`` lies.

    Args:
        root: the folder with the checksums.
        path: the file.
        content: as for ``write_atomically``.
        writer: names this process's file of checksums; empty for the first.

    Raises:
        RunFolderError: if it cannot be written.
    """
    write_atomically(
        path,
        content,
        before_rename=lambda file: _append(root, _line(root, path, file_checksum(file)), writer=writer),
    )


def record_checksums(root: Path, *paths: Path, hashes: dict[str, HashSoFar]) -> None:
    """Record the checksums of files of the folder ``root`` as they are now.

    Args:
        root: the folder.
        paths: the files.
        hashes: by a file's name; updated. What they hold is not read again, so that damage to it stays damage.
    """
    _append(
        root,
        *(
            _line(root, path, file_checksum(path, hashes.setdefault(path.name, HashSoFar())))
            for path in paths
        ),
    )


def begin_checksums(root: Path) -> None:
    """Discard the checksums of files that were in the folder before."""
    write_atomically(root / CHECKSUMS, "")
    for path in root.glob(OTHER_CHECKSUMS):
        remove_file(path)


def _lines_of(path: Path) -> list[ChecksumLine]:
    """The lines of a file of checksums; none if there is no such file."""
    with reading(path, COPY), suppress(FileNotFoundError):
        return _parsed_lines(path, path.read_bytes())
    return []


@lru_cache(maxsize=64)
def _parsed_lines(path: Path, content: bytes) -> list[ChecksumLine]:
    """The lines of a file of checksums with this content; a run of many shards is asked for them at every pass."""
    lines: list[ChecksumLine] = []
    for number, line in enumerate(
        content.split(b"\n")[:-1], 1
    ):  # what follows the last line break is half written
        try:
            record = dict(parse_json(line))
            checksum = None if record.get("removed") else FileChecksum(record["bytes"], record["sha256"])
            lines.append((record["file"], checksum))
        except (ValueError, TypeError, KeyError) as error:
            raise RunFolderError(
                f"{path}, line {number}, is damaged: {error}; take the line out and run again with --resume, or {COPY}"
            ) from error
    return lines


def remove_checked(root: Path, path: Path) -> None:
    """Take a file of the folder ``root`` away, if it is there, and record it before: it is not reported as missing.

    Raises:
        RunFolderError: if it cannot be taken away.
    """
    if path.exists():
        _append(root, json.dumps({"file": path.relative_to(root).as_posix(), "removed": True}))
        remove_file(path)


def require_sha256(path: Path, sha256: str, what: str, advice: str = COPY) -> None:
    """Check that a file in the folder of another run is the one of which a checked file has the SHA-256.

    Args:
        path: the file.
        sha256: as it was.
        what: what the file should be, for the error.
        advice: what to do where it is not.

    Raises:
        RunFolderError: if it is missing, or another.
    """
    with reading(path, advice):
        is_same = file_checksum(path).sha256 == sha256
    if not is_same:
        raise RunFolderError(f"{path} is not {what}: it has other bytes; {advice}")


def seal_folder(root: Path) -> None:
    """Write the checksums of all files in ``root``, which is complete, in place of those that are there."""
    files = (path for path in root.rglob("*") if path.is_file() and not path.name.startswith("."))
    paths = sorted(path for path in files if path != root / CHECKSUMS)
    lines = [
        f"{_line(root, path, checksum)}\n"
        for path, checksum in zip(paths, in_threads(file_checksum, paths), strict=True)
    ]
    write_atomically(root / CHECKSUMS, "".join(lines))


def file_checksum(path: Path, begun: HashSoFar | None = None) -> FileChecksum:
    """Size and SHA-256 of a file, of which only what ``begun`` does not hold is read, and added to it."""
    so_far = begun or HashSoFar()
    block = memoryview(bytearray(BLOCK))
    with path.open("rb", buffering=0) as file:
        file.seek(so_far.size)
        while count := file.readinto(block):
            so_far.digest.update(block[:count])
            so_far.size += count
    return FileChecksum(so_far.size, so_far.digest.hexdigest())


def in_threads(function: Callable[[Path], T], paths: Sequence[Path]) -> list[T]:
    """The results of a function that hashes a file, for several files at a time, since hashlib releases the GIL."""
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as threads:
        return list(threads.map(function, paths))


def is_there(path: Path) -> bool:
    """Whether a path exists; ``Path.exists`` says no where that is unknown, from Python 3.14 on.

    Raises:
        OSError: if it is unknown: no permission, or a name that is too long.
    """
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


@contextmanager
def reading(path: Path, advice: str, kind: type[KleashError] = RunFolderError) -> Generator[None]:
    """Context in which the error of a file that cannot be read is raised as one of ``kind``, with ``advice``."""
    try:
        yield
    except OSError as error:
        raise kind(f"{path} cannot be read: {error.strerror or error}; {advice}") from error


def _line(root: Path, path: Path, checksum: FileChecksum) -> str:
    """The line of a file, without its line break."""
    return json.dumps(
        {"file": path.relative_to(root).as_posix(), "bytes": checksum.size, "sha256": checksum.sha256}
    )


def _append(root: Path, *lines: str, writer: str = "") -> None:
    """Append lines to a writer's checksums, in place of one that was half written."""
    path = root / (OTHER_CHECKSUMS.replace("*", writer) if writer else CHECKSUMS)
    with writing(path):
        is_new = not path.exists()
        append_lines(path, lines)
        if is_new:
            sync_folder(root)
