"""Files that are there whole or not at all."""

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kleash.errors import RunFolderError

TEMPORARY = ".writing-"


def write_atomically(path: Path, content: str | bytes | Callable[[Path], None]) -> None:
    """Write ``path`` so that nobody ever finds half of it, whatever happens meanwhile.

    Args:
        path: where; its folder exists.
        content: the text, the bytes, or a function that writes the file it is given.

    Raises:
        RunFolderError: if the disk is full, the folder cannot be written, or ``path`` is a folder.
    """
    if not path.name or path.is_dir():
        raise RunFolderError(f"{path} is a folder; give the name of a file")
    unfinished = path.with_name(f"{TEMPORARY}{path.name}")
    try:
        if callable(content):
            content(unfinished)
        else:
            unfinished.write_bytes(content.encode() if isinstance(content, str) else content)
        with unfinished.open("rb+") as file:
            os.fsync(file.fileno())
        unfinished.replace(path)
        _sync_folder(path.parent)
    except BaseException as error:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise cannot_write(path, error) from error
        raise


def cannot_write(path: Path, error: OSError) -> RunFolderError:
    """Why ``path`` was not written, as a sentence."""
    if error.errno == errno.ENOSPC:
        return RunFolderError(
            f"no space is left to write {path}; what was finished is kept: "
            "free some space and run again with --resume"
        )
    return RunFolderError(f"{path} cannot be written: {error.strerror or error}")


def _sync_folder(folder: Path) -> None:
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
