"""Checksums of the files of a folder, written with them and verified when they are read back.

``checksums.jsonl`` holds a line for each file of a folder that is ever read back: its name, its size, its SHA-256 and
a check of the line itself. A line is appended before the file gets its name, so that a kill at any moment leaves a
file that is complete and has its line, or a line too many, which is harmless. Each line stands alone.

If several processes write a folder, each appends to a file of its own, such as ``checksums-3f9a21c0.jsonl``. Readers
take the lines of all.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar, cast

from kleash.errors import RunFolderError
from kleash.store.atomic import cannot_write, sync_folder, write_atomically
from kleash.store.codec import decode, parse_json

T = TypeVar("T")

CHECKSUMS = "checksums.jsonl"
OTHER_CHECKSUMS = "checksums-*.jsonl"
"""The files of the writers other than the first."""
BLOCK = 1 << 20
MOST_THREADS = 8
COPY = "copy the whole folder again, or make it anew in another one"


@dataclass(frozen=True)
class FileChecksum:
    """Size and SHA-256 of a file's bytes."""

    size: int
    sha256: str


ChecksumLine = tuple[str, FileChecksum | None]
"""A line: the name of a file, and its checksum; None for a file that was removed."""


class Checksums:
    """What the checksum files of a folder say of the files in it."""

    def __init__(self, root: Path, lines: Iterable[ChecksumLine]) -> None:
        """Collect the lines of a folder.

        A file may have several: it was replaced, and a kill may have come before or after the new one got its name.
        """
        self.root = root
        self._files: dict[str, set[FileChecksum]] = {}
        self._newest: dict[str, FileChecksum] = {}
        self._removed: set[str] = set()
        for name, checksum in lines:
            if checksum is None:
                self._removed.add(name)
            else:
                self._removed.discard(name)
                self._newest[name] = checksum
                self._files.setdefault(name, set()).add(checksum)

    @classmethod
    def read(cls, root: Path) -> "Checksums":
        """The checksums of the folder ``root``; if their file is missing, no file in it can be read.

        Raises:
            RunFolderError: if a file of checksums is damaged.
        """
        files = (root / CHECKSUMS, *_other_checksums(root))
        return cls(root, [line for path in files for line in _lines_of(path)])

    @property
    def names(self) -> Set[str]:
        """The names of the files that have a checksum."""
        return self._files.keys()

    @property
    def expected_names(self) -> Set[str]:
        """The names of the files that were written and not taken away since."""
        return self._files.keys() - self._removed

    def fingerprint(self, names: Callable[[str], bool]) -> str:
        """The hash of the checksums of all files whose name is chosen."""
        lines = sorted(
            f"{name} {checksum.sha256}\n"
            for name in self._files
            if names(name)
            for checksum in self._files[name]
        )
        return sha256("".join(lines).encode()).hexdigest()[:32]

    def covers(self, path: Path) -> bool:
        """Whether a file has a checksum."""
        return self._name(path) in self._files

    def expects(self, path: Path) -> bool:
        """Whether a file was written and not taken away since."""
        name = self._name(path)
        return name in self._files and name not in self._removed

    def read_bytes(self, path: Path, advice: str = COPY) -> bytes:
        """The bytes of a file, as they were written.

        Args:
            path: a file in the folder.
            advice: what to do where it is damaged, for the error.

        Raises:
            RunFolderError: if it is missing, cannot be read, or is not what was written.
        """
        content = _bytes_of(path, advice)
        self._require(path, FileChecksum(len(content), sha256(content).hexdigest()), advice)
        return content

    def read_record(self, kind: type[T], path: Path, what: str, advice: str = COPY) -> T:
        """The record of this kind that a JSON file holds, as it was written.

        Args:
            kind: a dataclass; the default of its field ``schema``, if it has one, is the only schema that is read.
            path: a file in the folder.
            what: what the file is, for the error: "the header of a run".
            advice: what to do where it is damaged, likewise.

        Raises:
            RunFolderError: if it is missing, is none, is of another schema, or is not what was written.
        """
        content = _bytes_of(path, advice)
        try:
            data = parse_json(content)
            _require_schema(path, kind, data)
            record = decode(kind, data)
        except (ValueError, TypeError, KeyError) as error:
            raise RunFolderError(f"{path} cannot be read as {what}: {error}; {advice}") from error
        self._require(path, FileChecksum(len(content), sha256(content).hexdigest()), advice)
        return record

    def check(self, path: Path, advice: str = COPY) -> None:
        """See that a file that others will read is as it was written; as ``read_bytes``, without holding it."""
        try:
            checksum = file_checksum(path)
        except OSError as error:
            raise RunFolderError(f"{path} cannot be read: {error.strerror or error}; {advice}") from error
        self._require(path, checksum, advice)

    def check_all(self, names: Callable[[str], bool] = lambda name: True, advice: str = COPY) -> None:
        """See that all files whose name is chosen are there, as they were written; several at a time.

        Raises:
            RunFolderError: naming the first that is not.
        """
        chosen = sorted(name for name in self._files if name not in self._removed and names(name))

        def check(name: str) -> None:
            self.check(self.root / name, advice)

        with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as threads:  # hashlib lets the GIL go
            list(threads.map(check, chosen))

    def require_beginning(self, path: Path, content: bytes, advice: str = COPY) -> None:
        """Check that a file to which lines are appended begins with the bytes of its newest checksum, if it has one.

        Raises:
            RunFolderError: if it is shorter, has other bytes, or nothing in the folder has a checksum.
        """
        newest = self._newest.get(self._name(path))
        if newest is None:
            if content and not self._files:
                raise RunFolderError(f"{path} cannot be trusted: {CHECKSUMS} is missing or empty; {advice}")
            return
        if len(content) < newest.size:
            raise RunFolderError(
                f"{path} is damaged: it has {len(content)} bytes where {newest.size} were written; {advice}"
            )
        if sha256(content[: newest.size]).hexdigest() != newest.sha256:
            raise RunFolderError(f"{path} is damaged: it has other bytes than were written; {advice}")

    def _require(self, path: Path, checksum: FileChecksum, advice: str) -> None:
        name = self._name(path)
        written = self._files.get(name)
        if written is None:
            lack = "has no checksum of it" if self._files else "is missing or empty"
            raise RunFolderError(f"{path} cannot be trusted: {CHECKSUMS} {lack}; {advice}")
        if checksum not in written:
            sizes = " or ".join(str(size) for size in sorted({expected.size for expected in written}))
            same_size = any(expected.size == checksum.size for expected in written)
            what = "other bytes than" if same_size else f"{checksum.size} bytes where {sizes}"
            raise RunFolderError(f"{path} is damaged: it has {what} were written; {advice}")

    def _name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()


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
        before_rename=lambda file: _append(root, _record_of(root, path, file_checksum(file)), writer=writer),
    )


def record_checksums(root: Path, *paths: Path) -> None:
    """Record the checksums of files of the folder ``root`` as they are now."""
    _append(root, *(_record_of(root, path, file_checksum(path)) for path in paths))


def begin_checksums(root: Path) -> None:
    """Discard the checksums of files that were in the folder before."""
    write_atomically(root / CHECKSUMS, "")
    for path in _other_checksums(root):
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise cannot_write(path, error) from error


def _other_checksums(root: Path) -> list[Path]:
    """The checksum files of all writers but the first."""
    return sorted(root.glob(OTHER_CHECKSUMS))


def _lines_of(path: Path) -> list[ChecksumLine]:
    """The lines of a file of checksums; none if there is no such file."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunFolderError(f"{path} cannot be read: {error.strerror or error}") from error
    return _parsed_lines(path, content)


@lru_cache(maxsize=64)
def _parsed_lines(path: Path, content: bytes) -> list[ChecksumLine]:
    """The lines of a file of checksums with this content; a run of many shards is asked for them at every pass."""
    whole_lines = content.split(b"\n")[:-1]  # what follows the last line break is half written
    return [_parsed(path, number, line) for number, line in enumerate(whole_lines, 1)]


def record_removal(root: Path, *paths: Path) -> None:
    """Record that files are about to be removed, so that they are not reported as missing."""
    if not paths:
        return
    checksums = Checksums.read(root)
    _append(
        root,
        *(
            {"file": path.relative_to(root).as_posix(), "removed": True}
            for path in paths
            if checksums.expects(path)
        ),
    )


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
    try:
        current = file_checksum(path).sha256
    except OSError as error:
        raise RunFolderError(f"{path} cannot be read: {error.strerror or error}; {advice}") from error
    if current != sha256:
        raise RunFolderError(f"{path} is not {what}: it has other bytes; {advice}")


def seal_folder(root: Path) -> None:
    """Write the checksums of all files in ``root``, which is complete, in place of those that are there."""
    files = (path for path in root.rglob("*") if path.is_file() and not path.name.startswith("."))
    paths = sorted(path for path in files if path != root / CHECKSUMS)
    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as threads:
        file_checksums = list(threads.map(file_checksum, paths))
    lines = [
        _line(_record_of(root, path, checksum)) for path, checksum in zip(paths, file_checksums, strict=True)
    ]
    write_atomically(root / CHECKSUMS, "".join(lines))


def file_checksum(path: Path) -> FileChecksum:
    """Size and SHA-256 of a file."""
    digest, size = sha256(), 0
    block = memoryview(bytearray(BLOCK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(block[:count])
            size += count
    return FileChecksum(size, digest.hexdigest())


def _require_schema(path: Path, kind: type, data: Any) -> None:
    """Check that JSON data have the schema that a record of this kind has by default, if it has one."""
    schema = getattr(kind, "schema", None)
    stored_schema = cast("dict[str, Any]", data).get("schema") if isinstance(data, dict) else schema
    if schema is not None and stored_schema != schema:
        raise RunFolderError(
            f"{path} has schema {stored_schema} and this kleash reads {schema}; read it with the version that "
            "wrote it, or make it again in another folder"
        )


def _bytes_of(path: Path, advice: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RunFolderError(f"{path} cannot be read: {error.strerror or error}; {advice}") from error


def _record_of(root: Path, path: Path, checksum: FileChecksum) -> dict[str, Any]:
    return {"file": path.relative_to(root).as_posix(), "bytes": checksum.size, "sha256": checksum.sha256}


def _append(root: Path, *records: dict[str, Any], writer: str = "") -> None:
    """Append a line for each record to a writer's checksums."""
    path = root / (OTHER_CHECKSUMS.replace("*", writer) if writer else CHECKSUMS)
    try:
        new = not path.exists()
        with path.open("r+b" if not new else "xb") as file:
            end = file.seek(0, os.SEEK_END)
            while end and not new:  # cut off what was half written
                file.seek(end - 1)
                if file.read(1) == b"\n":
                    break
                end -= 1
            file.seek(end)
            file.truncate()
            file.write("".join(map(_line, records)).encode())
            file.flush()
            os.fsync(file.fileno())
        if new:
            sync_folder(root)
    except OSError as error:
        raise cannot_write(path, error) from error


def _line(record: dict[str, Any]) -> str:
    """A record as a line that says itself whether it is whole."""
    return json.dumps({**record, "line": check_of(record)}) + "\n"


def check_of(record: Mapping[str, Any]) -> str:
    """16 hex digits that stand for a record of plain values, whatever the order of its keys."""
    return sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:16]


def _parsed(path: Path, number: int, line: bytes) -> ChecksumLine:
    try:
        record = dict(parse_json(line))
        if record.pop("line") != check_of(record):
            raise ValueError("its check does not fit")
        name = str(record["file"])
        if record.get("removed"):
            return name, None
        return name, FileChecksum(int(record["bytes"]), str(record["sha256"]))
    except (ValueError, TypeError, KeyError) as error:
        raise RunFolderError(
            f"{path}, line {number}, is damaged: {error}; take the line out and run again with --resume, or {COPY}"
        ) from error
