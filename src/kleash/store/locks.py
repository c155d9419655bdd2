"""Locks of folders and claims of parts of their work, which the kernel frees when the process that has them ends."""

import os
import platform
import shutil
import time
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex

from kleash.errors import RunFolderError
from kleash.store.atomic import writing

try:
    import fcntl
except ImportError:  # Windows: as on a disk without such locks
    fcntl = None

LOCK = ".lock"
"""Held by the one process that writes a folder, or by the one of several that makes its result."""
PROCESSES = ".processes"
"""Shared by all processes that take part in the work of a folder."""
CLAIMS = ".claims"
"""The folder of the claims of parts of the work."""
LOCK_FILES = frozenset({LOCK, PROCESSES, CLAIMS})


@contextmanager
def folder_lock(root: Path, advice: str, *, on_wait: Callable[[], None] | None = None) -> Generator[None]:
    """Hold ``root``, made if it is missing, for this process alone, unless the disk knows no locks.

    Args:
        root: the folder.
        advice: what to do if another process holds it: "wait for it, or give another --out".
        on_wait: called before this process waits for another one that holds it; None not to wait.

    Raises:
        RunFolderError: if another process holds it and ``on_wait`` is None, or it cannot be written.
    """
    descriptor = _open_lock(root, LOCK)
    try:
        if fcntl is not None and _try_lock(descriptor) is False:
            if on_wait is None:
                raise RunFolderError(f"another process is writing {root}; {advice}")
            on_wait()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def taking_part(
    root: Path, check: Callable[[bool | None], None], is_unused: Callable[[], bool], source: str
) -> Generator[bool]:
    """Context in which this process is one of those that work on ``root``, made if it is missing.

    The last process to leave takes the claims away, and an unused folder with its files and empty folders. Where the
    disk knows no locks, other processes are not seen.

    Args:
        root: the folder.
        check: called with whether this process is the only one, before another one can begin; None if that cannot be
            seen.
        is_unused: whether nothing in the folder counts, and all but ``source`` is kleash's; an ``OSError`` is no.
        source: name of a file that is not taken away, and with it the folder: it may be the user's.

    Yields:
        Whether this process was certainly the only one when it began.

    Raises:
        RunFolderError: if the folder cannot be written. And what ``check`` raises.
    """
    descriptor, is_alone = _joined(root)
    try:
        check(is_alone)
        yield _shares(descriptor) if is_alone else False
    finally:
        if _try_lock(descriptor):
            shutil.rmtree(root / CLAIMS, ignore_errors=True)
            with suppress(OSError):
                if is_unused():
                    # the locked file last: until then others wait
                    for path in (*sorted(root.iterdir(), key=lambda path: path.name == PROCESSES), root):
                        if path.name != source:
                            path.rmdir() if path.is_dir() else path.unlink()
        os.close(descriptor)


def _joined(root: Path) -> tuple[int, bool | None]:
    """The locked file of the processes of a folder, and whether this one is alone; None if that cannot be seen."""
    while True:
        descriptor = _open_lock(root, PROCESSES)
        is_alone = _try_lock(descriptor)
        if fcntl is not None and is_alone is False:
            fcntl.flock(descriptor, fcntl.LOCK_SH)  # waits for the check of the process that begins
        with suppress(FileNotFoundError):  # the last process has taken the folder away meanwhile
            if os.path.samestat(os.fstat(descriptor), (root / PROCESSES).stat()):
                return descriptor, is_alone
        os.close(descriptor)


def _shares(descriptor: int) -> bool:
    """Let other processes join the one that has a locked file; False if one came before it as if it were the first."""
    assert fcntl is not None, "a locked file"
    mark = token_hex(8).encode()
    with suppress(OSError):  # of a full disk
        os.pwrite(descriptor, mark, 0)
    fcntl.flock(descriptor, fcntl.LOCK_SH)  # the kernel frees the exclusive lock first
    return os.pread(descriptor, len(mark), 0) == mark


@contextmanager
def claim(root: Path, name: str) -> Generator[bool]:
    """Context in which this process alone does a part of a folder's work; yields False if another one does it.

    Where the disk knows no locks, every process does all of it.

    Raises:
        RunFolderError: if the claim cannot be written.
    """
    descriptor = _open_lock(root / CLAIMS, name)
    try:
        is_ours = _try_lock(descriptor) is not False
        if is_ours:
            with suppress(OSError):  # of a full disk: the name of the process is missing then
                os.truncate(descriptor, 0)
                os.write(descriptor, f"process {os.getpid()} on {platform.node()}".encode())
        yield is_ours
    finally:
        os.close(descriptor)


def wait_for_parts(
    root: Path,
    missing: Callable[[], Collection[str]],
    note: Callable[[str], None],
    *,
    poll_seconds: float = 0.2,
) -> bool:
    """Wait while other processes do the parts of a folder's work that are missing.

    Args:
        root: the folder.
        missing: the names of the parts that are not done yet.
        note: called with a sentence that says whose claims are waited for.
        poll_seconds: from one look to the next.

    Returns:
        Whether all parts are done; False if one is missing that no process works on.
    """
    noted: set[str] = set()
    while names := missing():
        for name in names:
            with claim(root, name) as is_free:
                if is_free:
                    return not missing()
        owners = {_claimant(root, name) for name in names}
        if new_owners := sorted(owners - noted - {""}):
            note(f"waiting for {' and '.join(new_owners)}")
            noted |= owners
        time.sleep(poll_seconds)
    return True


def _claimant(root: Path, name: str) -> str:
    """The process that has a claim or had it last, in words; empty if there was none."""
    try:
        return (root / CLAIMS / name).read_text(errors="replace")
    except OSError:
        return ""


def _open_lock(folder: Path, name: str) -> int:
    """The descriptor of a file that is locked, made with its folder if it is missing.

    Raises:
        RunFolderError: if it cannot be written, or is a file.
    """
    if folder.is_file():
        raise RunFolderError(f"{folder} is a file; give the name of a folder")
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        return os.open(folder / name, os.O_RDWR | os.O_CREAT, 0o666)


def _try_lock(descriptor: int) -> bool | None:
    """Lock an open file without waiting; False if another process has it, None where the disk knows no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
