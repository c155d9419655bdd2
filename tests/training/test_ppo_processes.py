"""Two processes do what one does: the same responses, and from the same responses the same numbers."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from ppo_cases import tiny_job
from safetensors.torch import load_file

from kleash.records import read_steps

HELPERS = Path(__file__).parents[1] / "helpers"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folders of the same run in one process and in two, each launched by Accelerate."""
    folder = tmp_path_factory.mktemp("ppo-processes")
    tiny_job(folder, "qwen3")
    draw = random.Random(0)
    replay = folder / "replay.json"
    replay.write_text(
        json.dumps([[draw.randrange(3, 300) for _ in range(draw.randint(1, 8))] for _ in range(10)])
    )
    paths = os.pathsep.join([str(HELPERS), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    for count in (1, 2):
        launch = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", str(count)]
        launch += ["--multi_gpu"] if count > 1 else ["--cpu"]  # without a GPU it starts one process otherwise
        launch += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
        launch += ["--main_process_port", "0"]
        script = [str(HELPERS / "ppo_process.py"), str(folder), str(replay), str(folder / f"run-{count}")]
        done = subprocess.run(
            [*launch, *script], env=environment, capture_output=True, text=True, timeout=150, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
    return folder


def test_the_first_rollout_is_the_same_token_for_token(runs):
    alone = json.loads((runs / "run-1-drawn-0.json").read_text())
    parts = [json.loads((runs / f"run-2-drawn-{rank}.json").read_text()) for rank in (0, 1)]
    assert len(alone) == 10 and [len(part) for part in parts] == [4, 6]
    assert {**parts[0], **parts[1]} == alone


def test_all_metrics_agree_on_the_same_responses(runs):
    alone, together = (read_steps(runs / f"run-{count}") for count in (1, 2))
    assert len(alone) == len(together) == 2
    for one, other in zip(alone, together, strict=True):
        names = [name for name in one.metrics if not name.startswith("time/")]
        assert names == [name for name in other.metrics if not name.startswith("time/")]
        assert one.metrics["kl/update"] > 0 and one.metrics["policy/updates"] == 4
        for name in names:
            expected = pytest.approx(one.metrics[name], rel=1e-5, abs=1e-5, nan_ok=True)
            assert other.metrics[name] == expected, name


def test_both_end_at_the_same_weights(runs):
    one, other = (load_file(runs / f"run-{n}/checkpoints/step-000002/state.safetensors") for n in (1, 2))
    weights = [name for name in one if name.startswith("weight/")]
    assert one.keys() == other.keys() and len(weights) > 20
    first = load_file(runs / "qwen3-policy/model.safetensors")
    moved = max((one[f"weight/network.{name}"] - x).abs().max().item() for name, x in first.items())
    apart = max((one[name] - other[name]).abs().max().item() for name in weights)
    assert apart < 0.1 * moved, "Adam divides rounding by rounding: a weight without a gradient may differ"
