"""Checksums: written with a file, verified when it is read, and in nobody's way after a kill."""

import pytest

from kleash.errors import RunFolderError
from kleash.store import checksums
from kleash.store.checksums import (
    CHECKSUMS,
    Checksums,
    begin_checksums,
    remove_checked,
    seal_folder,
    write_checked,
)


@pytest.fixture
def folder(tmp_path):
    begin_checksums(tmp_path)
    (tmp_path / "parts").mkdir()
    for name in ("run.json", "parts/0", "parts/1"):
        write_checked(tmp_path, tmp_path / name, f'{{"name": "{name}"}}')
    return tmp_path


def test_what_was_written_is_read(folder):
    checksums = Checksums.read(folder)
    assert b"parts/1" in checksums.read_bytes(folder / "parts/1")
    checksums.check_all()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"name": "parts/1"}', "parts/0 is damaged: it has other bytes than were written"),
        (b"", "parts/0 is damaged: it has other bytes than were written"),
        (None, "parts/0 cannot be read: No such file or directory"),
    ],
)
def test_a_part_of_another_shard_or_half_a_part_is_refused(folder, content, message):
    path = folder / "parts/0"
    path.unlink() if content is None else path.write_bytes(content)
    for read in (Checksums.read(folder).read_bytes, Checksums.read(folder).check):
        with pytest.raises(RunFolderError, match=message):
            read(path)
    with pytest.raises(RunFolderError, match=message):
        Checksums.read(folder).check_all()


def test_a_file_that_nobody_wrote_or_without_checksums_is_not_trusted(folder):
    (folder / "parts/2").write_text("x")
    with pytest.raises(RunFolderError, match=r"cannot be trusted: checksums\.jsonl has no checksum of it"):
        Checksums.read(folder).read_bytes(folder / "parts/2")
    (folder / CHECKSUMS).unlink()
    for read in (Checksums.read(folder).read_bytes, Checksums.read(folder).check):
        with pytest.raises(RunFolderError, match=r"checksums\.jsonl has no checksum"):
            read(folder / "parts/0")
    with pytest.raises(RunFolderError, match=r"checksums\.jsonl is missing"):
        Checksums.read(folder).require_beginning(folder / "parts/0", b"x")


def test_no_flipped_bit_of_the_checksums_makes_other_bytes_right(folder):
    path, names = folder / CHECKSUMS, ("run.json", "parts/0", "parts/1")
    intact = path.read_bytes()
    for other in (b"{}", b'{"name": "parts/2"}'):
        for name in names:
            (folder / name).write_bytes(other)
        for at in range(0, 8 * len(intact), 3):
            damaged = bytearray(intact)
            damaged[at // 8] ^= 1 << at % 8
            path.write_bytes(damaged)
            try:
                checksums = Checksums.read(folder)
            except RunFolderError as error:
                assert "is damaged" in str(error)
                continue
            for name in names:
                with pytest.raises(RunFolderError):
                    checksums.read_bytes(folder / name)


def test_a_kill_leaves_a_checksum_too_many_or_half_of_one(folder):
    with pytest.raises(KeyboardInterrupt):
        write_checked(folder, folder / "parts/0", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    before = (folder / CHECKSUMS).read_bytes()
    write_checked(folder, folder / "parts/0", "new")
    line = (folder / CHECKSUMS).read_bytes().removeprefix(before)
    (folder / "parts/0").write_text('{"name": "parts/0"}')  # killed before it got its name
    Checksums.read(folder).check_all()
    (folder / CHECKSUMS).write_bytes(before + line[:30])  # killed while the line was written
    Checksums.read(folder).check_all()
    write_checked(folder, folder / "parts/0", "new")
    assert (folder / CHECKSUMS).read_bytes() == before + line


def test_a_file_that_was_taken_away_is_not_missed(folder, monkeypatch):
    assert Checksums.read(folder).expects(folder / "parts/1")
    with monkeypatch.context() as context:
        context.setattr(checksums, "remove_file", lambda path: None)
        remove_checked(folder, folder / "parts/1")
    Checksums.read(folder).check_all()  # killed before it was taken away
    remove_checked(folder, folder / "parts/1")
    assert not (folder / "parts/1").exists()
    Checksums.read(folder).check_all()
    assert not Checksums.read(folder).expects(folder / "parts/1")
    write_checked(folder, folder / "parts/1", "again")
    assert Checksums.read(folder).expects(folder / "parts/1")


def test_a_sealed_folder_has_all_its_files(folder):
    (folder / "parts/2").write_text("x")
    seal_folder(folder)
    Checksums.read(folder).check_all()
    assert Checksums.read(folder).expects(folder / "parts/2")
