"""Locks of folders: one for a run, and one for each further process that writes it."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from kleash.errors import RunFolderError
from kleash.extras import import_extra
from kleash.store.atomic import cannot_write

LOCK = ".lock"
OTHER_LOCKS = ".lock-*"
"""The locks of the writers other than the first."""


def lock_name(writer: int) -> str:
    """The name of a writer's lock file: ``.lock`` for the first, ``.lock-3`` for writer 3."""
    return OTHER_LOCKS.replace("*", str(writer)) if writer else LOCK


@contextmanager
def folder_lock(root: Path, advice: str, name: str = LOCK) -> Generator[None]:
    """Hold ``root``, made if it is missing, for this process alone.

    Args:
        root: the folder.
        advice: what to do if another process holds it: "wait for it, or give another --out".
        name: of the lock file.

    Raises:
        RunFolderError: if another process holds it, or it cannot be written.
    """
    filelock = import_extra("filelock", "models")
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(root / name)
        lock.acquire(timeout=0)
    except filelock.Timeout as error:
        raise RunFolderError(f"another process is writing {root}; {advice}") from error
    except OSError as error:
        raise cannot_write(root, error) from error
    try:
        yield
    finally:
        lock.release()


def require_no_other_writer(root: Path, advice: str) -> None:
    """Check that no further process of an earlier run is still writing the folder ``root``.

    Raises:
        RunFolderError: if one is.
    """
    for path in sorted(root.glob(OTHER_LOCKS)):
        with folder_lock(root, advice, path.name):
            pass
