"""torchrun on real processes: one is killed, all are started again, and go on to the result of one process."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kleash.measuring import measure
from kleash.records import MeasureJob, RunFolder


def launch(world_size: int, *words: str) -> "subprocess.Popen[str]":
    launcher = ["-m", "torch.distributed.run", "--standalone", "--max-restarts", "1"]
    return subprocess.Popen(
        [sys.executable, *launcher, "--nproc-per-node", str(world_size), "-m", "kleash", "measure", *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def result(out: Path) -> dict[str, Any]:
    measured = json.loads((out / "measurement.json").read_text())
    return {name: value for name, value in measured.items() if name not in ("seconds", "finished")}


def workers_of(launcher: "subprocess.Popen[str]") -> list[int]:
    """The process ids of the ranks, in the order in which they were started."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    return [int(child) for child in children if b"measure" in Path(f"/proc/{child}/cmdline").read_bytes()]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_torchrun_loses_a_rank_and_starts_all_again_to_the_same_result(
    pair: tuple[Path, Path], prompts: Path, tmp_path: Path
) -> None:
    alone, out = tmp_path / "alone", tmp_path / "run"
    models = {"policy": str(pair[0]), "reference": str(pair[1]), "prompts": str(prompts)}
    options: dict[str, Any] = {**models, "max_new_tokens": 6, "batch_tokens": 8}
    measure(MeasureJob(**options, out=str(alone)))
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]

    launcher = launch(2, *words, "--out", str(out))
    for _ in range(24_000):
        if any((out / "sequences").glob("part-*")):
            break
        assert launcher.poll() is None, launcher.communicate()
        time.sleep(0.005)
    os.kill(workers_of(launcher)[1], signal.SIGKILL)
    before = {path: path.stat().st_mtime_ns for path in (out / "sequences").glob("part-*")}
    assert 1 <= len(RunFolder(out).finished_shards()) < len(list((alone / "sequences").iterdir()))
    assert not (out / "measurement.json").exists()

    output, errors = launcher.communicate(timeout=100)
    assert launcher.returncode == 0, errors
    advice = f"finished shards are on disk: resume with --resume --out {out}"
    assert [line for line in errors.splitlines() if line.startswith("kleash: ")] == [
        f"kleash: terminated by SIGTERM; {advice}"
    ]
    assert output.count("KL(policy ‖ reference) per token: ") == 1, output
    assert errors.count("resuming after") == 1, errors
    assert all(path.stat().st_mtime_ns == changed for path, changed in before.items())
    assert result(out) == result(alone)
    for kind in ("tokens", "sequences"):
        for part in (alone / kind).iterdir():
            assert (out / kind / part.name).read_bytes() == part.read_bytes()
    assert (out / "alternatives.parquet").read_bytes() == (alone / "alternatives.parquet").read_bytes()
    leftovers = [path.name for path in out.rglob(".writing-*")]
    assert not leftovers
