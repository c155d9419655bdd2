"""Temporary files that no link can lead elsewhere, that no other process has, and that a kill leaves to be swept up."""

import errno
import multiprocessing
import os

import pytest

from kleash.errors import RunFolderError
from kleash.store.atomic import TEMPORARY, is_disk_full, remove_leftovers, temporary_name, write_atomically


def test_a_planted_link_is_not_followed(tmp_path, monkeypatch):
    (tmp_path / "precious").write_text("kept")
    (tmp_path / ".writing-report.html").symlink_to(tmp_path / "precious")  # where an older kleash wrote
    write_atomically(tmp_path / "report.html", "page")
    monkeypatch.setattr("kleash.store.atomic.temporary_name", lambda: f"{TEMPORARY}guessed")
    (tmp_path / f"{TEMPORARY}guessed").symlink_to(tmp_path / "precious")
    with pytest.raises(RunFolderError, match="cannot be written: File exists"):
        write_atomically(tmp_path / "report.html", "another page")
    assert (tmp_path / "precious").read_text() == "kept"
    assert (tmp_path / "report.html").read_text() == "page"


@pytest.mark.parametrize(
    ("number", "sentence"),
    [
        (errno.ENOSPC, "no space is left to write {} (No space left on device); what was finished is kept"),
        (errno.EDQUOT, "no space is left to write {} (Disk quota exceeded); what was finished is kept"),
        (errno.EIO, "{} cannot be written: Input/output error"),
        (errno.EACCES, "{} cannot be written: Permission denied"),
        (
            "[enforce fail at inline_container.cc:672] . unexpected pos 55 vs 54",
            "no space is left to write {} (",
        ),
        ("basic_ios::clear: iostream error", "no space is left to write {} (basic_ios::clear: "),
        ("I/O error: No space left on device (os error 28)", "no space is left to write {} (I/O error: "),
    ],
    ids=["ENOSPC", "EDQUOT", "EIO", "EACCES", "torch", "a stream", "safetensors"],
)
def test_an_error_of_the_disk_says_how_to_go_on(number, sentence, tmp_path, monkeypatch):
    def fail(descriptor):
        raise RuntimeError(number) if isinstance(number, str) else OSError(number, os.strerror(number))

    monkeypatch.setattr("kleash.store.atomic.os.fsync", fail)
    path = tmp_path / "part"
    path.write_text("old")
    with pytest.raises(RunFolderError) as error:
        write_atomically(path, "x")
    assert str(error.value).startswith(sentence.format(path))
    assert is_disk_full(error.value.__cause__) is sentence.startswith("no space")
    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_many_processes_can_write_one_file(tmp_path):
    path = tmp_path / "report.html"

    def write(writer):
        for at in range(40):
            write_atomically(path, f"{writer} {at}\n" * 500)

    processes = [multiprocessing.get_context("fork").Process(target=write, args=(at,)) for at in range(6)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 6
    lines = path.read_text().splitlines()
    assert len(lines) == 500 and len(set(lines)) == 1
    assert [found.name for found in tmp_path.iterdir()] == ["report.html"]


@pytest.mark.parametrize("length", [200, 255])
def test_a_name_may_be_as_long_as_names_can_be(tmp_path, length):
    path = tmp_path / ("x" * length)
    write_atomically(path, "content")
    assert path.read_text() == "content"
    with pytest.raises(RunFolderError, match="cannot be written: File name too long"):
        write_atomically(tmp_path / ("x" * 256), "content")


def test_what_a_killed_process_left_is_removed(tmp_path):
    (tmp_path / temporary_name()).write_text("half")
    (tmp_path / f"{TEMPORARY}step-000002").mkdir()
    (tmp_path / f"{TEMPORARY}link").symlink_to(tmp_path)
    (tmp_path / "whole").write_text("whole")
    remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]
