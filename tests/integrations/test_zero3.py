"""DriftMonitor, TRL's exact losses and OpenRLHF with weights that DeepSpeed's ZeRO-3 stores on two processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import sharded_ranks

pytestmark = pytest.mark.peers("trl", "accelerate", "peft", "openrlhf", "ray")


def test_two_processes(deepspeed_path, tmp_path):
    sharded_ranks.make_models(tmp_path, sharded_ranks.ZERO3_KINDS)
    script = Path(sharded_ranks.__file__).with_name("zero3_ranks.py")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), str(tmp_path / "store"), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": deepspeed_path},
        capture_output=True,
        text=True,
        timeout=900,  # of a machine with other work
    )
    for rank, reported in enumerate(sharded_ranks.reported(tmp_path, done)):
        failed = {name: result for name, result in reported.items() if isinstance(result, str)}
        assert not failed, f"rank {rank}: {failed}"
        assert len(reported) == 6
