"""Whole files are hashed, once where nothing has changed, and whatever lies in the memory of hashes."""

import json
import os
import time
from pathlib import Path

import pytest

from kleash.store import file_hashes
from kleash.store.file_hashes import CACHE_FILE, hash_files

SIZE = 1 << 20


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kleash"


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were read."""
    genuine, read = file_hashes._compute_hashes, []
    monkeypatch.setattr(file_hashes, "_compute_hashes", lambda paths: read.extend(paths) or genuine(paths))
    return read


def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an hour pass."""
    now = time.time_ns()
    monkeypatch.setattr(file_hashes.time, "time_ns", lambda: now + 3600 * 10**9)


def test_the_hash_changes_with_every_byte_and_its_position(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "weights"
    monkeypatch.setattr(file_hashes, "PIECE", 300)
    seen = set()
    for content in (
        b"",
        bytes(1),
        bytes(300),
        bytes(301),
        bytes(900),
        bytes(899) + b"\1",
        b"\1" + bytes(899),
    ):
        path.write_bytes(content)
        (value,) = hash_files([path])
        assert hash_files([path]) == [value]
        seen.add(value)
    assert len(seen) == 7


def test_a_file_is_hashed_again_only_after_a_change(
    cache: Path, tmp_path: Path, read: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(SIZE))
    first = hash_files([path])
    assert hash_files([path]) == first and len(read) == 2, "it is younger than two seconds"
    assert not (cache / CACHE_FILE).exists()
    settled(monkeypatch)
    assert hash_files([path]) == hash_files([path]) == first and len(read) == 3
    status = path.stat()
    path.write_bytes(bytes(SIZE - 1) + b"\1")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # size and time of change as before
    assert hash_files([path]) != first and len(read) == 4
    other = tmp_path / "copy"
    other.write_bytes(bytes(SIZE))
    assert hash_files([other]) == first, "the name is no part of it"


@pytest.mark.parametrize("spoilt", ["damaged", "changed", "nested", "folder", "link", "mode", "unwritable"])
def test_a_damaged_or_foreign_hash_cache_is_ignored(
    cache: Path, tmp_path: Path, read: list[Path], monkeypatch: pytest.MonkeyPatch, spoilt: str
) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(SIZE))
    settled(monkeypatch)
    (value,) = hash_files([path])
    memory = cache / CACHE_FILE
    text = memory.read_text()
    match spoilt:
        case "damaged":
            memory.write_text(text[: len(text) // 2])
        case "changed":
            memory.write_text(json.dumps(json.loads(text.replace(value, "0" * 64))))
        case "nested":
            memory.write_text("[" * 200_000)
        case "folder":
            memory.unlink()
            memory.mkdir()
        case "link":
            memory.rename(tmp_path / "elsewhere")
            memory.symlink_to(tmp_path / "elsewhere")
        case "mode":
            memory.chmod(0o666)
        case _:
            cache.chmod(0o777)
    assert hash_files([path]) == [value] and len(read) == 2
