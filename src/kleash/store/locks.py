"""One writer for a folder."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from kleash.errors import RunFolderError
from kleash.extras import import_extra
from kleash.store.atomic import cannot_write


@contextmanager
def folder_lock(root: Path, advice: str) -> Generator[None]:
    """Hold ``root``, made if it is missing, for this process alone.

    Args:
        root: the folder.
        advice: what to do if another process holds it: "wait for it, or give another --out".

    Raises:
        RunFolderError: if another process holds it, or it cannot be written.
    """
    filelock = import_extra("filelock", "models")
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(root / ".lock")
        lock.acquire(timeout=0)
    except filelock.Timeout as error:
        raise RunFolderError(f"another process is writing {root}; {advice}") from error
    except OSError as error:
        raise cannot_write(root, error) from error
    try:
        yield
    finally:
        lock.release()
