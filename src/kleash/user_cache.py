"""The cache folder of the user, if no other user can write to it."""

import os
import stat
import sys
from pathlib import Path

GROUP_OR_OTHER_WRITE = stat.S_IWGRP | stat.S_IWOTH


def user_cache_folder() -> Path | None:
    """Create and return ``$XDG_CACHE_HOME/kleash`` (by default ``~/.cache/kleash``); None if it is not safe.

    It is safe if no user except root can add or replace files in it: this user owns the folder and no other user can
    write to it. Every parent folder must be owned by this user or root and either not be writable by others or have
    the sticky bit (as ``/tmp``). A relative ``$XDG_CACHE_HOME`` is ignored, as the XDG specification requires.
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
    """Whether no user except root can write to an absolute folder, or replace it or one of its parents.

    Raises:
        OSError: if the status of one of them cannot be read.
    """
    if not folder.is_absolute():
        return False
    if os.name != "posix":
        return True
    real = folder.resolve(strict=True)
    status = real.lstat()
    if (
        not stat.S_ISDIR(status.st_mode)
        or status.st_uid != os.geteuid()
        or status.st_mode & GROUP_OR_OTHER_WRITE
    ):
        return False
    return all(_is_safe_parent(path) for path in {*real.parents, *folder.parents, folder})


def is_private_file(path: Path) -> bool:
    """Whether ``path`` is a regular file, not a link, owned by this user and not writable by others.

    Raises:
        OSError: if there is no such file.
    """
    status = path.lstat()
    if os.name != "posix":
        return stat.S_ISREG(status.st_mode)
    is_private = status.st_uid == os.geteuid() and not status.st_mode & GROUP_OR_OTHER_WRITE
    return stat.S_ISREG(status.st_mode) and is_private


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
    """Whether this user is the only member of a group, as with per-user groups."""
    import grp
    import pwd

    try:
        name = pwd.getpwuid(os.geteuid()).pw_name
        members = grp.getgrgid(group)
    except KeyError:
        return False
    return members.gr_name == name and set(members.gr_mem) <= {name}
