"""Files that are there whole or not at all."""

import errno
import os
import shutil
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex

from kleash.errors import RunFolderError, summarise_error

TEMPORARY = ".writing-"
"""How the names of unfinished files begin."""
NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT} if hasattr(errno, "EDQUOT") else {errno.ENOSPC})
"""Numbers of the errors of a full disk: that of the machine, or a user's quota on a shared one."""
FULL_DISK_WORDS = (
    *map(os.strerror, NO_SPACE),
    "PytorchStreamWriter failed writing",
    "unexpected pos",
    "iostream error",
)
"""Words in the errors that safetensors and torch raise there: no OSError, and torch gives no reason."""


def write_atomically(
    path: Path,
    content: str | bytes | Callable[[Path], None],
    *,
    before_rename: Callable[[Path], None] | None = None,
) -> None:
    """Write ``path`` whole or not at all: a reader sees the old content or the new, also after a kill.

    It is written under a name of its own, which no other process has and no link can lead elsewhere, and renamed
    once every byte is on the disk. Any number of processes may write one path: the last one stays.

    Args:
        path: where; its folder exists.
        content: the text, the bytes, or a function that writes the file it is given.
        before_rename: called with the complete file, before it gets its name.

    Raises:
        RunFolderError: if the disk is full, the folder cannot be written, or ``path`` is a folder.
    """
    unfinished = path.parent / temporary_name()
    with writing(path):
        try:
            if path.is_dir():
                raise RunFolderError(f"{path} is a folder; give the name of a file")
            with unfinished.open("xb") as file:
                if not callable(content):
                    # Half of a surrogate pair (in a path that is not UTF-8) becomes an escape that JSON understands.
                    file.write(
                        content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
                    )
            if callable(content):
                content(unfinished)
            with unfinished.open("rb+") as file:
                os.fsync(file.fileno())
            if before_rename is not None:
                before_rename(unfinished)
            unfinished.replace(path)
            sync_folder(path.parent)
        except BaseException:
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)
            raise


def append_lines(path: Path, lines: Iterable[str]) -> None:
    """Add lines to a file, in place of one that was half written; when this returns they are on the disk.

    Raises:
        OSError: if they cannot be written.
    """
    with path.open("a+b") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
        file.write("".join(f"{line}\n" for line in lines).encode("utf-8", "backslashreplace"))
        file.flush()
        os.fsync(file.fileno())


def remove_file(path: Path) -> None:
    """Take a file away, if it is there.

    Raises:
        RunFolderError: if it cannot be taken away.
    """
    with writing(path):
        path.unlink(missing_ok=True)


def require_utf8(folder: Path) -> None:
    """See that a folder in which safetensors files will lie has a name that safetensors can open.

    Raises:
        RunFolderError: if it is not UTF-8.
    """
    try:
        str(folder.absolute()).encode()
    except UnicodeEncodeError as error:
        raise RunFolderError(
            f"{folder} has a name that is not UTF-8, and safetensors opens no other; give another name"
        ) from error


def temporary_name() -> str:
    """A new name for a file or folder that is being written."""
    return f"{TEMPORARY}{token_hex(8)}"


def remove_leftovers(folder: Path) -> None:
    """Remove the unfinished files and folders in ``folder``, into which no other process writes meanwhile.

    Raises:
        OSError: if one cannot be removed.
    """
    for path in folder.glob(f"{TEMPORARY}*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def remove_folder(folder: Path) -> None:
    """Remove ``folder`` so that it is never there in part under its own name.

    Raises:
        OSError: if it cannot be renamed; what cannot be removed then is left to ``remove_leftovers``.
    """
    leaving = folder.with_name(temporary_name())
    folder.rename(leaving)
    shutil.rmtree(leaving, ignore_errors=True)


@contextmanager
def writing(path: Path) -> Generator[None]:
    """Context in which an error of the disk is raised as the sentence that ``path`` cannot be written.

    Raises:
        RunFolderError: in place of an OSError, and of the error of another library if the disk is full.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, RunFolderError) or not (isinstance(error, OSError) or is_disk_full(error)):
            raise
        raise cannot_write(path, error) from error


def cannot_write(path: Path, error: Exception) -> RunFolderError:
    """Why ``path`` was not written, as a sentence."""
    reason = getattr(error, "strerror", None) or summarise_error(error)
    if is_disk_full(error):
        return RunFolderError(
            f"no space is left to write {path} ({reason}); what was finished is kept: free some space and run the "
            "command again, a measurement, sweep or training with --resume"
        )
    return RunFolderError(f"{path} cannot be written: {reason}")


def is_disk_full(error: BaseException | None) -> bool:
    """Whether an error says that no space is left, or that a quota is used up."""
    is_numbered = isinstance(error, OSError) and error.errno in NO_SPACE
    return is_numbered or any(words in str(error) for words in FULL_DISK_WORDS)


def sync_folder(folder: Path) -> None:
    """Wait until the names in ``folder`` are on the disk (where the system can do that)."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
