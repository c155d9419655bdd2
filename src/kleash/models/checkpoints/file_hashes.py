"""Hashes of whole files, each made once: what they were is remembered beside what the file was like."""

import json
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

from kleash.errors import ModelError, RunFolderError
from kleash.records.atomic import write_atomically
from kleash.records.codec import parse_json
from kleash.user_cache import is_private_file, user_cache_folder

MEMORY = "file-hashes.json"
PIECE = 64 << 20
"""Bytes that are hashed as one: the pieces of a file are hashed side by side."""
BLOCK = 1 << 20
WORTH_REMEMBERING = 1 << 20
"""Bytes from which on a file's hash is remembered: a smaller one is hashed in a millisecond."""
SETTLED_NS = 2 * 10**9
"""Age of the last change from which on size and times tell whether there was another since."""
MOST_REMEMBERED = 4096
MOST_THREADS = 16


def hashes_of(paths: Sequence[Path]) -> list[str]:
    """The SHA-256 of each file's pieces of 64 MiB and of its size, as hex digits.

    Every byte is read, on several threads, the first time. What came out is remembered in the user's cache folder
    (``file-hashes.json``) by path, size, time of change of content and of inode (in ns), inode and device: a file that
    agrees in all of them is not read again. One that changed less than two seconds ago is never remembered. The memory
    is only ever a shortcut: where it is damaged, or anybody else could have written it, every file is read.

    Raises:
        ModelError: if a file cannot be read.
    """
    try:
        before = [_identity(path) for path in paths]
        worth = [_is_settled(path) for path in paths]
        memory = _remembered() if any(worth) else {}
        found = [memory.get(key) if kept else None for key, kept in zip(before, worth, strict=True)]
        missing = [at for at, known in enumerate(found) if known is None]
        made = _hashed([paths[at] for at in missing])
        for at, value in zip(missing, made, strict=True):
            found[at] = value
        new = {
            before[at]: value
            for at, value in zip(missing, made, strict=True)
            if worth[at] and _identity(paths[at]) == before[at]
        }
    except OSError as error:
        raise ModelError(f"{error.filename} cannot be read: {error.strerror or error}") from error
    if new:
        _remember(new)
    return [str(value) for value in found]


def _hashed(paths: Sequence[Path]) -> list[str]:
    sizes = [path.stat().st_size for path in paths]
    pieces = [(at, start) for at, size in enumerate(sizes) for start in range(0, max(size, 1), PIECE)]
    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as threads:  # hashlib lets the GIL go
        digests = list(threads.map(lambda piece: _piece(paths[piece[0]], piece[1]), pieces))
    whole = [sha256(str(size).encode()) for size in sizes]
    for (at, _), digest in zip(pieces, digests, strict=True):
        whole[at].update(digest)
    return [one.hexdigest() for one in whole]


def _piece(path: Path, start: int) -> bytes:
    digest, left = sha256(), PIECE
    block = memoryview(bytearray(BLOCK))
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while left and (count := file.readinto(block[: min(BLOCK, left)])):
            digest.update(block[:count])
            left -= count
    return digest.digest()


def _identity(path: Path) -> str:
    status = path.stat()
    numbers = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev)
    return " ".join([*map(str, numbers), str(path.resolve())])


def _is_settled(path: Path) -> bool:
    status = path.stat()
    changed = max(status.st_mtime_ns, status.st_ctime_ns)
    return status.st_size >= WORTH_REMEMBERING and time.time_ns() - changed > SETTLED_NS


def _remembered() -> dict[str, str]:
    folder = user_cache_folder()
    if folder is None:
        return {}
    try:
        path = folder / MEMORY
        if not is_private_file(path):
            return {}
        memory = parse_json(path.read_bytes())
        hashes = cast("dict[str, Any]", memory["hashes"])
        if memory["check"] != _check_of(hashes):
            return {}
        return {str(key): str(value) for key, value in hashes.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def _remember(new: Mapping[str, str]) -> None:
    folder = user_cache_folder()
    if folder is None:
        return
    hashes = {**_remembered(), **new}
    hashes = dict(list(hashes.items())[-MOST_REMEMBERED:])
    with suppress(OSError, RunFolderError):
        write_atomically(folder / MEMORY, json.dumps({"hashes": hashes, "check": _check_of(hashes)}))


def _check_of(hashes: Mapping[str, Any]) -> str:
    return sha256(json.dumps(hashes, sort_keys=True).encode("utf-8", "backslashreplace")).hexdigest()
