"""The log of which worker scored each shard: information that survives kills and damage, and one warning."""

from pathlib import Path

import pytest

from kleash.errors import RunFolderError
from kleash.store.worker_log import (
    WorkerLine,
    append_worker_lines,
    read_worker_lines,
    smaller_batches_warning,
)


def line(shard: int, batch_tokens: int = 64, worker: int = 0) -> WorkerLine:
    return WorkerLine(shard=shard, worker=worker, node="a", tokens=10, seconds=0.5, batch_tokens=batch_tokens)


def test_the_last_line_of_a_shard_counts_and_damaged_ones_do_not(tmp_path: Path) -> None:
    assert read_worker_lines(tmp_path) == {}
    append_worker_lines(tmp_path, [line(0), line(1, 32)])
    path = tmp_path / "workers.jsonl"
    with path.open("a") as file:
        file.write('{"shard": 2}\nnonsense\n[1]\n')
    append_worker_lines(tmp_path, [line(1, 64, worker=3)])
    with path.open("a") as file:
        file.write('{"shard": 3, "wor')  # a kill
    assert read_worker_lines(tmp_path) == {0: line(0), 1: line(1, 64, worker=3)}


def test_smaller_batches_are_warned_of(tmp_path: Path) -> None:
    append_worker_lines(tmp_path, [line(shard) for shard in range(4)])
    assert smaller_batches_warning(tmp_path, 64, 4) == ()
    append_worker_lines(tmp_path, [line(1, 32), line(3, 16), line(9, 8)])  # 9 is beyond the run's end
    (warning,) = smaller_batches_warning(tmp_path, 64, 4)
    assert warning.startswith(
        "2 of 4 shards were scored in batches of down to 16 tokens instead of 64, since memory"
    )
    append_worker_lines(tmp_path, [line(3)])
    assert smaller_batches_warning(tmp_path, 64, 4)[0].startswith(
        "1 of 4 shards was scored in batches of down to 32"
    )


def test_a_log_that_cannot_be_written_ends_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "workers.jsonl").mkdir()
    with pytest.raises(RunFolderError, match=r"workers\.jsonl cannot be written: Is a directory"):
        append_worker_lines(tmp_path, [line(0)])
    append_worker_lines(tmp_path, [])
