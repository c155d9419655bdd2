"""The folder in which kleash caches files for the user, if nobody else can write there."""

import os
import stat
import sys
from pathlib import Path

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def user_cache_folder() -> Path | None:
    """``$XDG_CACHE_HOME/kleash`` (by default ``~/.cache/kleash``), made if it is missing; None if it is not safe.

    It is safe if no other user but root can put a file into it or replace it: the folder belongs to this user and is
    writable by nobody else, and the same holds for every folder above it, where root may also be the owner and a
    sticky bit (as ``/tmp`` has) is enough. A relative ``$XDG_CACHE_HOME`` is ignored, as its specification asks.
    """
    parent = _cache_home()
    if parent is None:
        return None
    folder = parent / "kleash"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder if is_private_folder(folder) else None
    except (OSError, ValueError):
        return None


def is_private_folder(folder: Path) -> bool:
    """Whether no other user but root can write into an absolute folder, or replace it or one above it.

    Raises:
        OSError: if one of them cannot be looked at.
    """
    if not folder.is_absolute():
        return False
    if os.name != "posix":
        return True
    real = folder.resolve(strict=True)
    status = real.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & OTHERS_WRITE:
        return False
    return all(_is_safe_parent(path) for path in {*real.parents, *folder.parents, folder})


def is_private_file(path: Path) -> bool:
    """Whether ``path`` is a plain file, no link, that belongs to this user and that nobody else can write.

    Raises:
        OSError: if there is no such file.
    """
    status = path.lstat()
    if os.name != "posix":
        return stat.S_ISREG(status.st_mode)
    mine = status.st_uid == os.geteuid() and not status.st_mode & OTHERS_WRITE
    return stat.S_ISREG(status.st_mode) and mine


def _cache_home() -> Path | None:
    configured = os.environ.get("XDG_CACHE_HOME", "")
    if configured and Path(configured).is_absolute():
        return Path(configured)
    try:
        home = Path.home()
    except RuntimeError:
        return None
    if not home.is_absolute():
        return None
    return home / ("Library/Caches" if sys.platform == "darwin" else ".cache")


def _is_safe_parent(path: Path) -> bool:
    """Whether the entries of a folder (or the target of a link) cannot be replaced by another user."""
    status = path.lstat()
    if status.st_uid not in (0, os.geteuid()):
        return False
    if stat.S_ISLNK(status.st_mode) or status.st_mode & stat.S_ISVTX:
        return True
    if status.st_mode & stat.S_IWOTH:
        return False
    return not status.st_mode & stat.S_IWGRP or _is_own_group(status.st_gid)


def _is_own_group(group: int) -> bool:
    """Whether a group has this user as its only member, as many systems make one for each user."""
    import grp
    import pwd

    try:
        name = pwd.getpwuid(os.geteuid()).pw_name
        members = grp.getgrgid(group)
    except KeyError:
        return False
    return members.gr_name == name and set(members.gr_mem) <= {name}
