"""DriftMonitor and the exact losses of TRL's trainers with weights that FSDP2 stores on two processes."""

import pytest
import sharded_ranks

pytestmark = pytest.mark.peers("trl", "accelerate", "peft")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The result of each check on both ranks; its traceback where it failed."""
    folder = tmp_path_factory.mktemp("sharded")
    sharded_ranks.make_models(folder)
    return sharded_ranks.run_two_ranks(sharded_ranks.__file__, folder)


@pytest.mark.parametrize("name", sharded_ranks.CHECKS)
def test_two_processes(results, name):
    for rank, reported in enumerate(results):
        assert name in reported, f"rank {rank} did not come so far"
        assert not isinstance(reported[name], str), f"rank {rank}: {reported[name]}"
