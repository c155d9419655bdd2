"""Files are hashed whole, those that are watched once, and a change in use is told."""

import os
from pathlib import Path

import pytest

from kleash.errors import ChangedInputError, ModelError
from kleash.store import file_hashes
from kleash.store.file_hashes import hash_files, require_unchanged_files, watch_files, watching_files

SHA256_OF_ABC = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
"""The test vector of FIPS 180-2, appendix B.1."""


def test_the_hash_is_that_of_the_bytes(tmp_path):
    (tmp_path / "weights").write_bytes(b"abc")
    (tmp_path / "copy").write_bytes(b"abc")
    assert hash_files([tmp_path / "weights", tmp_path / "copy"]) == [SHA256_OF_ABC] * 2
    (tmp_path / "copy").write_bytes(b"abd")
    assert hash_files([tmp_path / "copy"]) != [SHA256_OF_ABC]
    with pytest.raises(ModelError, match="nowhere cannot be read"):
        hash_files([tmp_path / "nowhere"])


def test_a_watched_file_is_read_once_and_again_after_a_change(tmp_path, monkeypatch):
    path, read = tmp_path / "weights", list[Path]()
    path.write_bytes(b"abc")
    genuine = file_hashes.file_checksum
    monkeypatch.setattr(file_hashes, "file_checksum", lambda path: read.append(path) or genuine(path))
    with watching_files():
        watch_files([path])
        assert hash_files([path]) == hash_files([path]) == [SHA256_OF_ABC] and len(read) == 1
        os.utime(path, ns=(0, 0))
        require_unchanged_files()  # its bytes are the same
        status = path.stat()
        path.write_bytes(b"abd")
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # size and time of change as before
        assert hash_files([path]) != [SHA256_OF_ABC]
        with pytest.raises(ChangedInputError, match="was written to"):
            require_unchanged_files()
