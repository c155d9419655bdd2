"""Two processes do what one does: the same responses, and from the same responses the same numbers."""

import json
import os
import random
from pathlib import Path

import pytest
from ppo_cases import tiny_job
from ppo_process import two_ranks, two_steps
from safetensors.torch import load_file

from kleash.records import read_steps


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The same run in this process, in two, and in two that go on with what one has begun."""
    folder = tmp_path_factory.mktemp("ppo-processes")
    tiny_job(folder, "llama")
    draw = random.Random(0)
    replay = [[draw.randrange(3, 300) for _ in range(draw.randint(1, 8))] for _ in range(10)]
    (folder / "replay.json").write_text(json.dumps(replay))
    two_steps(folder, folder / "one")
    assert two_ranks(two_steps, folder, folder / "two") == [0, 0]
    two_steps(folder, folder / "begun", steps=1)
    assert two_ranks(two_steps, folder, folder / "begun", resume=True) == [0, 0]
    return folder


def test_first_rollout_is_identical_for_any_number_of_processes(runs):
    alone = json.loads((runs / "one-drawn-0.json").read_text())
    parts = [json.loads((runs / f"two-drawn-{rank}.json").read_text()) for rank in (0, 1)]
    assert len(alone) == 10 and [len(part) for part in parts] == [5, 5]
    assert {**parts[0], **parts[1]} == alone


@pytest.mark.parametrize("name", ["two", "begun"])
def test_metrics_and_weights_agree_for_any_number_of_processes(runs, name):
    alone, together = read_steps(runs / "one"), read_steps(runs / name)
    assert len(alone) == len(together) == 2
    for one, other in zip(alone, together, strict=True):
        names = [key for key in one.metrics if not key.startswith("time/")]
        assert names == [key for key in other.metrics if not key.startswith("time/")]
        assert one.metrics["kl/update"] > 0 and one.metrics["policy/updates"] == 4
        for key in names:
            expected = pytest.approx(one.metrics[key], rel=1e-5, abs=1e-5, nan_ok=True)
            assert other.metrics[key] == expected, key
    one, other = (runs / run / "checkpoints/checkpoint-2" for run in ("one", name))
    assert (other / "random_states_1.pkl").is_file(), "both ranks write under the name of the first"
    one, other = (load_file(each / "model.safetensors") for each in (one, other))
    assert one.keys() == other.keys() and len(one) > 20
    first, left = (load_file(runs / at / "model.safetensors") for at in ("llama-policy", f"{name}/policy"))
    moved = max((left[key] - x).abs().max().item() for key, x in first.items())
    apart = max((one[key] - other[key]).abs().max().item() for key in one)
    assert apart < 0.1 * moved, "Adam divides rounding by rounding: a weight without a gradient may differ"


def apart(folder):
    """Go on in another folder than the first process, as on machines without a shared disk."""
    os.chdir(folder / ("." if os.environ["RANK"] == "0" else "two"))
    two_steps(folder, Path("begun"), steps=3, resume=True)


def test_a_process_without_the_checkpoint_is_refused(runs, capfd):
    assert two_ranks(apart, runs) == [1, 1]
    assert "begun/checkpoints/checkpoint-2/progress.json cannot be read" in capfd.readouterr().err
