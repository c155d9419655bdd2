"""DriftMonitor and the exact losses of TRL and verl with weights that FSDP2 stores on two processes."""

import pytest
import sharded_ranks

pytestmark = pytest.mark.peers("trl", "accelerate", "peft", "verl")


@pytest.fixture(scope="module")
def results(tmp_path_factory, command_forks):
    """The result of each check on both ranks; its traceback where it failed."""
    folder = tmp_path_factory.mktemp("sharded")
    sharded_ranks.make_models(folder)
    done = command_forks.run_python([sharded_ranks.__file__, str(folder / "store"), str(folder)])
    return sharded_ranks.reported(folder, done)


@pytest.mark.parametrize("name", sharded_ranks.CHECKS)
def test_two_processes(results, name):
    for rank, reported in enumerate(results):
        assert name in reported, f"rank {rank} did not come so far"
        assert not isinstance(reported[name], str), f"rank {rank}: {reported[name]}"
