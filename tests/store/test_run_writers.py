"""Several processes write one run folder: shards in any order, checksums and locks of each writer."""

import contextlib
import os
import random
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kleash.store.atomic
import kleash.store.checksums
from kleash.errors import RunFolderError
from kleash.records import ArrayTask, RunFolder
from kleash.store.array_task import part_folders
from kleash.store.checksums import CHECKSUMS, Checksums
from kleash.store.job_folder import RunHeader
from kleash.store.locks import folder_lock
from kleash.store.tables import SEQUENCE_COLUMNS, TOKEN_COLUMNS, TOP_COLUMNS

HEADER = RunHeader(kleash="1", settings={"seed": 0}, source_sha256="a" * 64, fingerprints={"policy": "p"})
IN_USE = "another process is writing .*; wait for it, or give another --out"


def write(folder: RunFolder, index: int) -> None:
    """Write a shard whose only token has the shard's number."""
    kinds = {**TOKEN_COLUMNS, **SEQUENCE_COLUMNS}
    columns: dict[str, Any] = {
        name: ["x"] if kind == "string" else np.array([index]) for name, kind in kinds.items()
    }
    folder.write_shard(index, columns, columns)


def written(folder: RunFolder) -> list[int]:
    return [int(part["token_id"][0]) for part in folder.token_parts(["token_id"])]


@pytest.mark.parametrize("seed", range(5))
def test_finished_shards_are_any_set_and_are_read_in_order(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    chosen = draw.sample([*range(20), 99_999, 100_000, 1_234_567], draw.randint(0, 20))
    with RunFolder(tmp_path).writing(HEADER, resume=False) as folder:
        for index in chosen:
            write(folder, index)
    assert list(folder.finished_shards()) == written(folder) == sorted(chosen)
    missing = [index for index in range(20) if index not in chosen]
    if missing:
        with pytest.raises(
            RunFolderError, match=rf"part-{missing[0]:05d}\.parquet is missing, and the run is"
        ):
            folder.require_shards(20)
    folder.require_shards(20, chosen)


@pytest.mark.parametrize("name", ["part-000001.parquet", "part-1.parquet", "part-00001.parquet.tmp"])
def test_files_with_other_names_are_no_shards(tmp_path: Path, name: str) -> None:
    with RunFolder(tmp_path).writing(HEADER, resume=False) as folder:
        write(folder, 1)
    for kind in ("tokens", "sequences"):
        (tmp_path / kind / name).write_bytes((tmp_path / kind / "part-00001.parquet").read_bytes())
    assert folder.finished_shards() == (1,)


@pytest.mark.parametrize("kind", ["tokens", "sequences", "alternatives"])
def test_a_shard_counts_with_all_its_files_and_their_checksums_only(tmp_path: Path, kind: str) -> None:
    top = {name: np.array([1]) for name in TOP_COLUMNS}
    kinds = {**TOKEN_COLUMNS, **SEQUENCE_COLUMNS}
    columns: dict[str, Any] = {
        name: ["x"] if arrow == "string" else np.array([1]) for name, arrow in kinds.items()
    }
    with RunFolder(tmp_path).writing(HEADER, resume=False) as folder:
        for index in (0, 1):
            folder.write_shard(index, columns, columns, top)
    assert folder.finished_shards() == (0, 1)
    for name in ("tokens", "sequences"):  # files that nobody recorded
        shutil.copy(tmp_path / name / "part-00001.parquet", tmp_path / name / "part-00007.parquet")
    assert folder.finished_shards() == (0, 1)
    (tmp_path / kind / "part-00001.parquet").unlink()
    assert folder.finished_shards() == (0,)
    with pytest.raises(RunFolderError, match=rf"{kind}/part-00001\.parquet is missing"):
        folder.require_shards(2)


def test_each_writer_has_its_own_checksums_and_readers_merge_them(tmp_path: Path) -> None:
    with RunFolder(tmp_path).writing(HEADER, resume=False) as first:
        with RunFolder(tmp_path, writer=2).joining(HEADER) as second:
            for index in range(6):
                write((first, second)[index % 2], index)
            assert (tmp_path / "checksums-2.jsonl").read_text().count("tokens/part") == 3
            assert (tmp_path / CHECKSUMS).read_text().count("tokens/part") == 3
            assert first.finished_shards() == second.finished_shards() == (0, 1, 2, 3, 4, 5)
        first.merge_checksums()
    assert [path.name for path in tmp_path.glob("checksums*")] == [CHECKSUMS]
    assert written(first) == [0, 1, 2, 3, 4, 5]
    part = tmp_path / "tokens" / "part-00001.parquet"
    part.write_bytes(part.read_bytes()[:-1] + b"x")
    with pytest.raises(RunFolderError, match=r"part-00001\.parquet is damaged"):
        written(first)


def test_a_run_whose_second_process_still_writes_cannot_be_continued(tmp_path: Path) -> None:
    with RunFolder(tmp_path).writing(HEADER, resume=False) as folder:
        write(folder, 0)
    with folder_lock(tmp_path, "", ".lock-1"):
        with pytest.raises(RunFolderError, match=IN_USE), RunFolder(tmp_path).writing(HEADER, resume=True):
            pass
        with pytest.raises(RunFolderError, match=IN_USE), RunFolder(tmp_path, writer=1).joining(HEADER):
            pass
    with RunFolder(tmp_path).writing(HEADER, resume=True), RunFolder(tmp_path, writer=1).joining(HEADER):
        pass


def test_a_writer_of_another_run_cannot_join(tmp_path: Path) -> None:
    other = RunHeader(**{**vars(HEADER), "settings": {"seed": 1}})
    with (
        RunFolder(tmp_path).writing(HEADER, resume=False),
        pytest.raises(RunFolderError, match="--seed was 0 and is now 1"),
        RunFolder(tmp_path, writer=1).joining(other),
    ):
        pass


def test_a_damaged_line_of_another_writer_is_named(tmp_path: Path) -> None:
    with RunFolder(tmp_path).writing(HEADER, resume=False) as first:
        with RunFolder(tmp_path, writer=1).joining(HEADER) as second:
            write(second, 0)
        path = tmp_path / "checksums-1.jsonl"
        path.write_text(path.read_text().replace('"bytes": ', '"bytes": 1'))
        for read in (first.finished_shards, first.merge_checksums):
            with pytest.raises(RunFolderError, match=r"checksums-1\.jsonl, line 1, is damaged"):
                read()
        assert path.exists()


class Killed(BaseException):
    """Stands for SIGKILL: nothing is cleaned up."""


@pytest.mark.parametrize("stage", range(1, 14))
def test_a_writer_killed_at_any_stage_loses_only_its_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: int
) -> None:
    with RunFolder(tmp_path).writing(HEADER, resume=False) as first:
        write(first, 0)
        with RunFolder(tmp_path, writer=1).joining(HEADER) as second:
            write(second, 1)
            steps = iter(range(1, 1000))
            fsync, unlink = os.fsync, Path.unlink

            def step(descriptor: int) -> None:
                if next(steps) == stage:
                    raise Killed
                fsync(descriptor)

            monkeypatch.setattr(os, "fsync", step)
            monkeypatch.setattr(Path, "unlink", lambda path, missing_ok=False: None)
            with contextlib.suppress(Killed):
                write(second, 2)
            monkeypatch.undo()
            assert Path.unlink is unlink
    folder = RunFolder(tmp_path)
    assert folder.finished_shards() in ((0, 1), (0, 1, 2))
    with folder.writing(HEADER, resume=True):
        write(folder, 2)
        write(folder, 3)
    assert written(folder) == [0, 1, 2, 3]
    assert [path.name for path in tmp_path.glob("checksums*")] == [CHECKSUMS]


def test_merging_killed_before_the_end_loses_no_checksum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunFolder(tmp_path).writing(HEADER, resume=False) as folder:
        write(folder, 0)
        with RunFolder(tmp_path, writer=1).joining(HEADER) as second:
            write(second, 1)
        before = Checksums.read(tmp_path)

        def killed(root: Path) -> None:
            raise Killed

        monkeypatch.setattr(kleash.store.checksums, "_remove_other_checksums", killed)
        with pytest.raises(Killed):
            folder.merge_checksums()
        monkeypatch.undo()
        assert vars(Checksums.read(tmp_path)) == vars(before)
        folder.merge_checksums()
        assert vars(Checksums.read(tmp_path)) == vars(before)


def test_dropped_shards_are_gone_and_can_be_written_again(tmp_path: Path) -> None:
    with RunFolder(tmp_path).writing(HEADER, resume=False) as folder:
        for index in (0, 1, 3, 7):
            write(folder, index)
        folder.drop_shards(2)
        assert folder.finished_shards() == (0, 1)
        folder.checksums().check_all()
        write(folder, 3)
        assert folder.finished_shards() == (0, 1, 3)
        folder.checksums().check_all()


def test_parts_of_a_run_that_are_missing_or_of_another_count_are_named(tmp_path: Path) -> None:
    def message() -> str:
        with pytest.raises(RunFolderError) as caught:
            part_folders(tmp_path)
        return str(caught.value)

    assert "holds no parts of a run, such as shard-1-of-8" in message()
    for number in (1, 3, 10):
        (tmp_path / f"shard-{number}-of-12").mkdir()
    assert re.search(r"lacks shard-2-of-12, shard-4-of-12, .*shard-12-of-12; score them with", message())
    (tmp_path / "shard-1-of-2").mkdir()
    assert "holds parts of runs in 2 and in 12; remove those of one of them" in message()


def test_a_part_that_has_not_finished_is_named(tmp_path: Path) -> None:
    part = tmp_path / "shard-2-of-3"
    with RunFolder(part).writing(HEADER, resume=False) as folder:
        write(folder, 1)
    with pytest.raises(RunFolderError, match="has not finished; run it again with --shard 2/3 --resume"):
        ArrayTask.read(part)
    task = ArrayTask(number=2, count=3, shards=8)
    task.write(part)
    assert ArrayTask.read(part) == task and list(task.indices) == [1, 4, 7]
    (part / "part.json").write_text('{"number": 2, "count": 3, "shards": 9}')
    with pytest.raises(RunFolderError, match=r"part\.json is damaged"):
        ArrayTask.read(part)
