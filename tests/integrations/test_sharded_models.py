"""DriftMonitor and the exact losses of TRL's trainers with weights that FSDP2 stores on two processes."""

import json
import subprocess
import sys

import pytest
import sharded_ranks

pytestmark = pytest.mark.peers("trl", "accelerate", "peft")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The result of each check on both ranks; its traceback where it failed."""
    folder = tmp_path_factory.mktemp("sharded")
    sharded_ranks.make_models(folder)
    reported = [folder / f"rank-{rank}.json" for rank in range(2)]
    command = [sys.executable, "-W", "ignore", sharded_ranks.__file__]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(folder / "store"), str(folder), str(out)], stderr=subprocess.PIPE
        )
        for rank, out in enumerate(reported)
    ]
    errors = [process.communicate(timeout=300)[1].decode()[-2000:] for process in ranks]
    assert all(out.exists() for out in reported), errors
    return [json.loads(out.read_text()) for out in reported]


@pytest.mark.parametrize("name", sharded_ranks.CHECKS)
def test_two_processes(results, name):
    for rank, reported in enumerate(results):
        assert name in reported, f"rank {rank} did not come so far"
        assert not isinstance(reported[name], str), f"rank {rank}: {reported[name]}"
