"""DriftMonitor and the exact losses of TRL with weights that DeepSpeed's ZeRO-3 stores on two processes."""

from pathlib import Path

import pytest
import sharded_ranks

pytestmark = pytest.mark.peers("trl", "accelerate", "peft")


def test_two_processes(deepspeed_path, tmp_path):
    sharded_ranks.make_models(tmp_path, sharded_ranks.ZERO3_KINDS)
    script = Path(sharded_ranks.__file__).with_name("zero3_ranks.py")
    for rank, reported in enumerate(
        sharded_ranks.run_two_ranks(str(script), tmp_path, PYTHONPATH=deepspeed_path)
    ):
        failed = {name: result for name, result in reported.items() if isinstance(result, str)}
        assert not failed, f"rank {rank}: {failed}"
        assert len(reported) == 5
