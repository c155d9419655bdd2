"""Several processes write one run folder: shards in any order, checksums and locks of each writer."""

import contextlib
import errno
import multiprocessing
import os
import random
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from kleash.errors import RunFolderError
from kleash.records import RunFolder
from kleash.store import locks, run_folder
from kleash.store.checksums import CHECKSUMS
from kleash.store.job_folder import RunHeader
from kleash.store.tables import SEQUENCE_COLUMNS, TOKEN_COLUMNS, TOP_COLUMNS

HEADER = RunHeader(kleash="1", settings={"seed": 0}, source_sha256="a" * 64, fingerprints={"policy": "p"})
KINDS = {**TOKEN_COLUMNS, **SEQUENCE_COLUMNS}
COLUMNS = {name: ["x"] if kind == "string" else np.array([1]) for name, kind in KINDS.items()}


def write(folder, index):
    """Write a shard whose only token has the shard's number."""
    columns = {name: ["x"] if kind == "string" else np.array([index]) for name, kind in KINDS.items()}
    folder.write_shard(index, columns, columns)


def written(folder):
    return [int(part["token_id"][0]) for part in folder.parts("tokens", ["token_id"])]


@pytest.mark.parametrize("seed", range(2))
def test_finished_shards_are_any_set_and_are_read_in_order(tmp_path, seed):
    draw = random.Random(seed)
    chosen = draw.sample([*range(20), 99_999, 100_000, 1_234_567], draw.randint(0, 20))
    with RunFolder(tmp_path).writing(HEADER, resume=False) as folder:
        for index in chosen:
            write(folder, index)
    assert list(folder.finished_shards()) == written(folder) == sorted(chosen)
    missing = [index for index in range(20) if index not in chosen]
    if missing:
        with pytest.raises(RunFolderError, match=rf"part-{missing[0]:05d}\.parquet is missing or"):
            folder.require_shards(20)


@pytest.mark.parametrize("name", ["part-000001.parquet", "part-1.parquet", "part-00001.parquet.tmp"])
def test_files_with_other_names_are_no_shards(tmp_path, name):
    with RunFolder(tmp_path).writing(HEADER, resume=False) as folder:
        write(folder, 1)
    for kind in ("tokens", "sequences"):
        (tmp_path / kind / name).write_bytes((tmp_path / kind / "part-00001.parquet").read_bytes())
    assert folder.finished_shards() == (1,)


@pytest.mark.parametrize("kind", ["tokens", "sequences", "alternatives"])
def test_a_shard_counts_with_all_its_files_and_their_checksums_only(tmp_path, kind):
    top = {name: np.array([1]) for name in TOP_COLUMNS}
    with RunFolder(tmp_path).writing(HEADER, resume=False) as folder:
        for index in (0, 1):
            folder.write_shard(index, COLUMNS, COLUMNS, top)
    assert folder.finished_shards() == (0, 1)
    for name in ("tokens", "sequences"):  # files that nobody recorded
        shutil.copy(tmp_path / name / "part-00001.parquet", tmp_path / name / "part-00007.parquet")
    assert folder.finished_shards() == (0, 1)
    (tmp_path / kind / "part-00001.parquet").unlink()
    assert folder.finished_shards() == (0,)
    with pytest.raises(RunFolderError, match=rf"{kind}/part-00001\.parquet is missing"):
        folder.require_shards(2)
    with RunFolder(tmp_path).joined(resume=True) as folder:
        assert not folder.has(1)


def test_each_process_has_its_own_checksums_and_readers_take_all(tmp_path):
    with (
        RunFolder(tmp_path).writing(HEADER, resume=False) as first,
        RunFolder(tmp_path).writing(HEADER, resume=False) as second,
    ):
        assert (first.writer, bool(second.writer)) == ("", True)
        for index in range(6):
            write((first, second)[index % 2], index)
        own = tmp_path / f"checksums-{second.writer}.jsonl"
        assert own.read_text().count("tokens/part") == 3
        assert (tmp_path / CHECKSUMS).read_text().count("tokens/part") == 3
    assert first.finished_shards() == second.finished_shards() == (0, 1, 2, 3, 4, 5)
    assert written(first) == [0, 1, 2, 3, 4, 5]
    part = tmp_path / "tokens" / "part-00001.parquet"
    part.write_bytes(part.read_bytes()[:-1] + b"x")
    with pytest.raises(RunFolderError, match=r"part-00001\.parquet is damaged"):
        written(first)
    own.write_text(own.read_text().replace('"bytes": ', '"bytes" '))
    with pytest.raises(RunFolderError, match=rf"{own.name}, line 1, is damaged"):
        first.finished_shards()


def test_a_run_that_was_left_needs_resume_and_one_that_runs_does_not(tmp_path):
    with RunFolder(tmp_path).writing(HEADER, resume=False) as folder:
        write(folder, 0)
        with RunFolder(tmp_path).writing(HEADER, resume=False):
            pass
    with (
        pytest.raises(RunFolderError, match="holds a run already; go on with it with --resume"),
        RunFolder(tmp_path).joined(resume=False),
    ):
        pass
    with RunFolder(tmp_path).writing(HEADER, resume=True):
        pass


def test_a_process_of_another_run_cannot_join(tmp_path):
    other = RunHeader(**{**vars(HEADER), "settings": {"seed": 1}})
    with (  # before the first shard
        RunFolder(tmp_path).writing(HEADER, resume=False),
        pytest.raises(RunFolderError, match="--seed was 0 and is now 1"),
        RunFolder(tmp_path).writing(other, resume=False),
    ):
        pass
    with RunFolder(tmp_path).writing(other, resume=False):  # nobody is there, and no shard
        pass


def test_a_folder_in_which_nothing_was_written_is_taken_away(tmp_path):
    with RunFolder(tmp_path / "run").joined(resume=False), RunFolder(tmp_path / "run").joined(resume=False):
        assert (tmp_path / "run").is_dir()
    assert not list(tmp_path.iterdir())


def test_a_disk_without_locks_has_no_claims_and_no_company(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(locks.fcntl, "flock", refuse)
    monkeypatch.setattr(run_folder, "folder_lock", lambda *_, **__: contextlib.nullcontext())
    other = RunHeader(**{**vars(HEADER), "settings": {"seed": 1}})
    with RunFolder(tmp_path).writing(HEADER, resume=False) as folder:
        with (
            pytest.raises(RunFolderError, match="--seed was 0"),
            RunFolder(tmp_path).writing(other, resume=False),
        ):
            pass
        with locks.claim(tmp_path, "a") as first, locks.claim(tmp_path, "a") as second:
            assert first and second
        write(folder, 0)
        with pytest.raises(RunFolderError, match="--resume"), RunFolder(tmp_path).joined(resume=False):
            pass


def test_a_claim_is_freed_when_its_process_is_killed(tmp_path):
    context = multiprocessing.get_context("fork")
    claimed = context.Queue()

    def hold_claim():
        with locks.claim(tmp_path, "a") as mine:
            claimed.put(mine)
            time.sleep(600)

    process = context.Process(target=hold_claim)
    process.start()
    assert claimed.get(timeout=60)
    notes = []
    missing = iter([["a"]] * 3 + [[]])
    assert locks.wait_for_parts(tmp_path, lambda: next(missing), notes.append, poll_seconds=0.01)
    assert len(notes) == 1 and f"process {process.pid} on " in notes[0]
    process.kill()
    process.join()
    assert not locks.wait_for_parts(tmp_path, lambda: ["a"], notes.append, poll_seconds=0.01)


class Killed(BaseException):
    """Stands for SIGKILL: nothing is cleaned up."""


@pytest.mark.parametrize("stage", range(1, 14))
def test_a_writer_killed_at_any_stage_loses_only_its_shard(tmp_path, monkeypatch, stage):
    with RunFolder(tmp_path).writing(HEADER, resume=False) as first:
        write(first, 0)
        with RunFolder(tmp_path).writing(HEADER, resume=False) as second:
            write(second, 1)
            steps = iter(range(1, 1000))
            fsync = os.fsync

            def step(descriptor):
                if next(steps) == stage:
                    raise Killed
                fsync(descriptor)

            with monkeypatch.context() as patch:
                patch.setattr(os, "fsync", step)
                patch.setattr(Path, "unlink", lambda path, missing_ok=False: None)
                with contextlib.suppress(Killed):
                    write(second, 2)
    folder = RunFolder(tmp_path)
    assert folder.finished_shards() in ((0, 1), (0, 1, 2))
    with folder.writing(HEADER, resume=True):
        write(folder, 2)
        write(folder, 3)
    assert written(folder) == [0, 1, 2, 3]


def test_shards_beyond_the_stop_do_not_count_and_its_record_cannot_be_lost(tmp_path):
    with RunFolder(tmp_path).writing(HEADER, resume=False) as folder:
        for index in (0, 1, 3, 7):
            write(folder, index)
        folder.write_stop(2)
    assert folder.finished_shards() == (0, 1) and written(folder) == [0, 1]
    folder.require_shards(2)
    (tmp_path / "stop.json").unlink()
    with pytest.raises(RunFolderError, match=r"stop\.json cannot be read"):
        folder.finished_shards()
