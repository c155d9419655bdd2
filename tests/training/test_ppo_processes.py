"""Two processes do what one does: the same responses, and from the same responses the same numbers."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from ppo_cases import tiny_job
from ppo_process import two_steps
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from kleash.records import read_steps

HELPERS = Path(__file__).parents[1] / "helpers"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The same run in this process, and in two that Accelerate launched."""
    folder = tmp_path_factory.mktemp("ppo-processes")
    tiny_job(folder, "llama")
    draw = random.Random(0)
    replay = [[draw.randrange(3, 300) for _ in range(draw.randint(1, 8))] for _ in range(10)]
    (folder / "replay.json").write_text(json.dumps(replay))
    two_steps(folder, folder / "one")
    paths = os.pathsep.join([str(HELPERS), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    launch = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--num_processes",
        "2",
        "--num_machines",
        "1",
    ]
    launch += ["--multi_gpu"]  # without it, and without a GPU, it starts one process
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    script = [str(HELPERS / "ppo_process.py"), str(folder), str(folder / "two")]
    done = subprocess.run(
        [*launch, *script], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def test_first_rollout_is_identical_for_any_number_of_processes(runs):
    alone = json.loads((runs / "one-drawn-0.json").read_text())
    parts = [json.loads((runs / f"two-drawn-{rank}.json").read_text()) for rank in (0, 1)]
    assert len(alone) == 10 and [len(part) for part in parts] == [4, 6]
    assert {**parts[0], **parts[1]} == alone


def test_metrics_agree_for_any_number_of_processes(runs):
    alone, together = read_steps(runs / "one"), read_steps(runs / "two")
    assert len(alone) == len(together) == 2
    for one, other in zip(alone, together, strict=True):
        names = [key for key in one.metrics if not key.startswith("time/")]
        assert names == [key for key in other.metrics if not key.startswith("time/")]
        assert one.metrics["kl/update"] > 0 and one.metrics["policy/updates"] == 4
        for key in names:
            expected = pytest.approx(one.metrics[key], rel=1e-5, abs=1e-5, nan_ok=True)
            assert other.metrics[key] == expected, key


def test_final_weights_agree_for_any_number_of_processes(runs):
    one, other = (
        load_file(runs / run / "checkpoints/step-000002/state.safetensors") for run in ("one", "two")
    )
    weights = [key for key in one if key.startswith("weight/")]
    assert one.keys() == other.keys() and len(weights) > 20
    first = load_file(runs / "llama-policy/model.safetensors")
    moved = max((one[f"weight/network.{key}"] - x).abs().max().item() for key, x in first.items())
    apart = max((one[key] - other[key]).abs().max().item() for key in weights)
    assert apart < 0.1 * moved, "Adam divides rounding by rounding: a weight without a gradient may differ"
    left = AutoModelForCausalLM.from_pretrained(runs / "two" / "policy").state_dict()
    assert all((left[key] == other[f"weight/network.{key}"]).all() for key in first)
