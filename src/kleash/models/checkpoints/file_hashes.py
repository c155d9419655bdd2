"""SHA-256 hashes of whole files, cached by the file's size, times and inode."""

import json
import os
import time
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

from kleash.errors import ModelError, RunFolderError
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
_shared_hashes: ContextVar[dict[str, str] | None] = ContextVar("shared_hashes", default=None)


@contextmanager
def sharing_hashes(hashes: dict[str, str]) -> Generator[None]:
    """Context in which ``hash_files`` takes the hashes that are in ``hashes``, and adds those that it computes.

    The processes of one machine exchange them, so that each file is read by one process.

    Args:
        hashes: by ``file_key``: a file that has changed is read again.
    """
    token = _shared_hashes.set(hashes)
    try:
        yield
    finally:
        _shared_hashes.reset(token)


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
        keys = [file_key(path) for path in paths]
        shared = _shared_hashes.get()
        cacheable = [_is_cacheable(path) for path in paths]
        cache = _load_cache() if any(cacheable) else {}
        hashes = [
            (shared or {}).get(key) or (cache.get(key) if usable else None)
            for key, usable in zip(keys, cacheable, strict=True)
        ]
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
        if shared is not None:
            shared.update({key: str(value) for key, value in zip(keys, hashes, strict=True)})
    except OSError as error:
        raise ModelError(f"{error.filename} cannot be read: {error.strerror or error}") from error
    if new_entries:
        _update_cache(new_entries)
    return [str(value) for value in hashes]


def _compute_hashes(paths: Sequence[Path]) -> list[str]:
    """Read and hash files, in pieces on several threads."""
    sizes = [path.stat().st_size for path in paths]
    pieces = [(index, start) for index, size in enumerate(sizes) for start in range(0, max(size, 1), PIECE)]
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as threads:  # hashlib releases the GIL
        digests = list(threads.map(lambda piece: _hash_piece(paths[piece[0]], piece[1]), pieces))
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


def file_key(path: Path) -> str:
    """What identifies a file's content without reading it: size, times, inode, device and path."""
    status = path.stat()
    numbers = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev)
    return " ".join([*map(str, numbers), str(path.resolve())])


def _is_cacheable(path: Path) -> bool:
    """Whether a file is large enough, and its last change old enough, for its hash to be cached."""
    status = path.stat()
    last_change = max(status.st_mtime_ns, status.st_ctime_ns)
    return status.st_size >= MIN_CACHED_BYTES and time.time_ns() - last_change > SETTLED_NS


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
