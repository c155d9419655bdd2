"""SHA-256 hashes of whole files, and whether files change in use."""

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from kleash.errors import ChangedInputError, ModelError
from kleash.store.checksums import file_checksum, in_threads

Status = tuple[int, ...]
"""What changes with a file's content, without reading it; its size first."""


def _status_of(path: Path) -> Status:
    """The status of a file; raises OSError if there is none."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev


class WatchedFiles:
    """The files that a job depends on, each with its status when it was found, and its hash once that is known.

    Weights are read over minutes and a source several times, so what is written into a file in use is mixed into the
    numbers, while the hash on record is that of before. A job asks ``require_unchanged`` before it writes.
    """

    def __init__(self) -> None:
        """Watch no file yet."""
        self._status: dict[Path, Status] = {}
        self._hashes: dict[Path, str] = {}

    def add(self, paths: Iterable[Path]) -> None:
        """Watch files from now on; those that are watched already keep their status."""
        self._status |= {path: _status_of(path) for path in paths if path not in self._status}

    def hash_of(self, path: Path) -> str:
        """The SHA-256 of a file, as hex digits; one that is watched and as it was is read once."""
        if self._status.get(path) != _status_of(path):
            return file_checksum(path).sha256
        if path not in self._hashes:
            self._hashes[path] = file_checksum(path).sha256
        return self._hashes[path]

    def require_unchanged(self) -> None:
        """Check that every file is as it was: by its status, and where that differs by its hash.

        Raises:
            ChangedInputError: if one is not, or is gone.
        """
        for path, before in self._status.items():
            try:
                now = _status_of(path)
                if now == before:
                    continue
                if path in self._hashes and file_checksum(path).sha256 == self._hashes[path]:
                    self._status[path] = now
                    continue
            except OSError as error:
                how = f"cannot be read any more ({error.strerror or error})"
            else:
                sizes = f", from {before[0]:,} to {now[0]:,} bytes" if now[0] != before[0] else ""
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
    with _reading():
        watched_files().add(paths)


def hash_files(paths: Sequence[Path]) -> list[str]:
    """The SHA-256 of each file, as hex digits, which are remembered if the files are watched.

    Raises:
        ModelError: if a file cannot be read.
    """
    with _reading():
        return in_threads(watched_files().hash_of, paths)


@contextmanager
def _reading() -> Generator[None]:
    """Context in which the error of a file that cannot be read is raised as ModelError."""
    try:
        yield
    except OSError as error:
        raise ModelError(f"{error.filename} cannot be read: {error.strerror or error}") from error
