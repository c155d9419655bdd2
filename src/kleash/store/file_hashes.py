"""SHA-256 hashes of whole files, cached by the file's size, times and inode; and whether files change in use."""

import json
import os
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, cast

from kleash.errors import ChangedInputError, ModelError, RunFolderError
from kleash.store.atomic import write_atomically
from kleash.store.codec import parse_json
from kleash.user_cache import is_private_file, user_cache_folder

CACHE_FILE = "file-hashes.json"
PIECE = 64 << 20
"""Bytes per piece; the pieces of a file are hashed in parallel."""
BLOCK = 1 << 20
MIN_CACHED_BYTES = 1 << 20
"""Smallest file whose hash is cached; hashing a smaller one takes a millisecond."""
SETTLED_NS = 2 * 10**9
"""Smallest age of a file's last change for its hash to be cached: a later change then shows in its times."""
MAX_CACHED_HASHES = 4096
MAX_THREADS = 16


class FileStatus(NamedTuple):
    """What changes with a file's content, without reading it."""

    size: int
    modified_ns: int
    changed_ns: int
    inode: int
    device: int

    @classmethod
    def of(cls, path: Path) -> "FileStatus":
        """The status of a file; raises OSError if there is none."""
        status = path.stat()
        return cls(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev)


class WatchedFiles:
    """The files that a job depends on, each with its status when it was found, and its hash once that is known.

    Weights stay mapped and a source is read several times, so what is written into a file in use is mixed into the
    numbers, while the hash on record is that of before. A job asks ``require_unchanged`` before it writes.
    """

    def __init__(self) -> None:
        """Watch no file yet."""
        self._status: dict[Path, FileStatus] = {}
        self._hashes: dict[Path, tuple[Callable[[Path], str], str]] = {}

    def add(self, paths: Iterable[Path]) -> None:
        """Watch files from now on; those that are watched already keep their status."""
        for path in paths:
            if path not in self._status:
                self._status[path] = FileStatus.of(path)

    def add_hash(self, path: Path, status: FileStatus, value: str, hash_file: Callable[[Path], str]) -> None:
        """Remember the hash that a watched file had at a status, and how it was computed."""
        if self._status.get(path) == status:
            self._hashes[path] = hash_file, value

    def require_unchanged(self) -> None:
        """Check that every file is as it was: by its status, and where that differs by its hash.

        Raises:
            ChangedInputError: if one is not, or is gone.
        """
        for path, before in self._status.items():
            try:
                now = FileStatus.of(path)
                if now == before:
                    continue
                hash_file, value = self._hashes.get(path, (None, ""))
                if hash_file is not None and hash_file(path) == value:
                    self._status[path] = now
                    continue
            except OSError as error:
                how = f"cannot be read any more ({error.strerror or error})"
            else:
                sizes = f", from {before.size:,} to {now.size:,} bytes" if now.size != before.size else ""
                how = f"was written to{sizes}"
            raise ChangedInputError(
                f"{path} {how} while it was in use, so there is no result; run again once nothing writes to it. Shards "
                "that were finished before are kept, and --resume goes on with them if the file is as it was"
            )


_watched_files: ContextVar[WatchedFiles | None] = ContextVar("watched_files", default=None)


@contextmanager
def watching_files() -> Generator[None]:
    """Context in which the files of models and sources are watched from when they are found."""
    token = _watched_files.set(WatchedFiles())
    try:
        yield
    finally:
        _watched_files.reset(token)


def watched_files() -> WatchedFiles:
    """The files that ``watching_files`` watches; outside of it none."""
    return _watched_files.get() or WatchedFiles()


def require_unchanged_files() -> None:
    """Check that the files of ``watching_files`` are as they were when they were found.

    Raises:
        ChangedInputError: if one is not, or is gone.
    """
    watched_files().require_unchanged()


def watch_files(paths: Iterable[Path]) -> None:
    """Watch files that a job depends on, where ``watching_files`` is active.

    Raises:
        ModelError: if one cannot be read.
    """
    files = _watched_files.get()
    try:
        if files is not None:
            files.add(paths)
    except OSError as error:
        raise ModelError(f"{error.filename} cannot be read: {error.strerror or error}") from error


def hash_watched(path: Path, hash_file: Callable[[Path], str]) -> str:
    """The hash of a file by a function, which is remembered if the file is watched."""
    status = FileStatus.of(path)
    value = hash_file(path)
    watched_files().add_hash(path, status, value, hash_file)
    return value


def hash_files(paths: Sequence[Path]) -> list[str]:
    """Hash files: for each, the SHA-256 of its size and of the SHA-256 of its pieces of 64 MiB, as hex digits.

    A file is read whole the first time, on several threads. Its hash is cached in the user's cache folder
    (``file-hashes.json``) under path, size, modification and change time (in ns), inode and device; a file that agrees
    in all of them is not read again. The hash of a file that changed less than two seconds ago is not cached. If the
    cache is damaged, or another user could have written it, it is ignored and every file is read.

    Raises:
        ModelError: if a file cannot be read.
    """
    try:
        statuses = [FileStatus.of(path) for path in paths]
        keys = [file_key(path, status) for path, status in zip(paths, statuses, strict=True)]
        cacheable = [_is_cacheable(path) for path in paths]
        cache = _load_cache() if any(cacheable) else {}
        hashes = [cache.get(key) if usable else None for key, usable in zip(keys, cacheable, strict=True)]
        to_compute = [index for index, value in enumerate(hashes) if value is None]
        new_hashes = dict(
            zip(to_compute, _compute_hashes([paths[index] for index in to_compute]), strict=True)
        )
        for index, value in new_hashes.items():
            hashes[index] = value
        new_entries = {
            keys[index]: value
            for index, value in new_hashes.items()
            if cacheable[index] and file_key(paths[index]) == keys[index]
        }
    except OSError as error:
        raise ModelError(f"{error.filename} cannot be read: {error.strerror or error}") from error
    if new_entries:
        _update_cache(new_entries)
    watched = watched_files()
    for path, status, value in zip(paths, statuses, hashes, strict=True):
        watched.add_hash(path, status, str(value), lambda path: _compute_hashes([path])[0])
    return [str(value) for value in hashes]


def _compute_hashes(paths: Sequence[Path]) -> list[str]:
    """Read and hash files, in pieces on several threads."""
    sizes = [path.stat().st_size for path in paths]
    pieces = [(index, start) for index, size in enumerate(sizes) for start in range(0, max(size, 1), PIECE)]
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as threads:  # hashlib releases the GIL
        owners, starts = [paths[index] for index, _ in pieces], [start for _, start in pieces]
        digests = list(threads.map(_hash_piece, owners, starts))
    totals = [sha256(str(size).encode()) for size in sizes]
    for (index, _), digest in zip(pieces, digests, strict=True):
        totals[index].update(digest)
    return [total.hexdigest() for total in totals]


def _hash_piece(path: Path, start: int) -> bytes:
    """The SHA-256 of at most ``PIECE`` bytes of a file."""
    digest, bytes_left = sha256(), PIECE
    block = memoryview(bytearray(BLOCK))
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while bytes_left and (count := file.readinto(block[: min(BLOCK, bytes_left)])):
            digest.update(block[:count])
            bytes_left -= count
    return digest.digest()


def file_key(path: Path, status: FileStatus | None = None) -> str:
    """What identifies a file's content without reading it: size, times, inode, device and path."""
    return " ".join([*map(str, status or FileStatus.of(path)), str(path.resolve())])


def _is_cacheable(path: Path) -> bool:
    """Whether a file is large enough, and its last change old enough, for its hash to be cached."""
    status = FileStatus.of(path)
    last_change = max(status.modified_ns, status.changed_ns)
    return status.size >= MIN_CACHED_BYTES and time.time_ns() - last_change > SETTLED_NS


def _load_cache() -> dict[str, str]:
    """The cached hashes; empty if the file is missing, damaged or writable by another user."""
    folder = user_cache_folder()
    if folder is None:
        return {}
    try:
        path = folder / CACHE_FILE
        if not is_private_file(path):
            return {}
        content = parse_json(path.read_bytes())
        hashes = cast("dict[str, Any]", content["hashes"])
        if content["check"] != _checksum(hashes):
            return {}
        return {str(key): str(value) for key, value in hashes.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def _update_cache(new_hashes: Mapping[str, str]) -> None:
    """Add hashes to the cache file; the oldest are removed beyond ``MAX_CACHED_HASHES``."""
    folder = user_cache_folder()
    if folder is None:
        return
    hashes = {**_load_cache(), **new_hashes}
    hashes = dict(list(hashes.items())[-MAX_CACHED_HASHES:])
    with suppress(OSError, RunFolderError):
        write_atomically(folder / CACHE_FILE, json.dumps({"hashes": hashes, "check": _checksum(hashes)}))


def _checksum(hashes: Mapping[str, Any]) -> str:
    """A checksum of the cache's content."""
    return sha256(json.dumps(hashes, sort_keys=True).encode("utf-8", "backslashreplace")).hexdigest()
