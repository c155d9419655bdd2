"""What a training reads is what its header has the hash of."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tiny_models import save_tiny

from kleash.errors import ChangedInputError
from kleash.records import DPOJob, GRPOJob, PPOJob, StepRecord, TrainJob, read_steps
from kleash.training import train
from kleash.training.run_log import Display, NullDisplay

KIND = "kleash.training.example_rewards:heroine"
SMALL: dict[str, Any] = {"steps": 2, "checkpoint_every": 1, "learning_rate": 1e-3}


@pytest.mark.parametrize("text", ["Once\nIt was\n", "Once more\n"])
def test_prompts_that_change_while_models_load_are_refused(tmp_path, monkeypatch, text):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Once\n")

    def train_ppo(job, run_log):
        prompts.write_text(text)
        run_log.begin(0)

    monkeypatch.setattr("kleash.training.ppo.train_ppo", train_ppo)
    with pytest.raises(ChangedInputError, match="was written to"):
        train(PPOJob(prompts=str(prompts), out=str(tmp_path / "run")))


class Emptying(NullDisplay):
    """Empties all files below a folder once a step is finished."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def stepped(self, record: StepRecord) -> None:
        for path in self.folder.rglob("*"):
            if path.is_file():
                path.write_bytes(b"")


def trained(job: TrainJob, out: Path, display: Display) -> tuple[Any, ...]:
    """The policy's tensors as bytes, and the metrics of all steps."""
    train(replace(job, out=str(out)), display)
    tensors = {
        (path.name, name): tensor.numpy().tobytes()
        for path in (out / "policy").glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }
    metrics = [
        {name: repr(value) for name, value in step.metrics.items() if not name.startswith("time/")}
        for step in read_steps(out)
    ]
    return tensors, metrics


@pytest.mark.parametrize(
    "kind",
    ["ppo", *(pytest.param(kind, marks=pytest.mark.peers("trl")) for kind in ("grpo with lora", "dpo"))],
)
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
def test_no_input_is_read_after_the_first_step(tmp_path: Path, kind: str) -> None:
    """All inputs are emptied then, and policy and metrics of the run are bit for bit those of an undisturbed one."""
    inputs = tmp_path / "inputs"
    policy, reference = (
        str(save_tiny(inputs / name, apart=apart)) for name, apart in (("p", 0.2), ("r", 0.0))
    )
    (inputs / "prompts.txt").write_text("Once\nIt was\nThe sea\n")
    pairs = [{"prompt": f"{n}", "chosen": " a sea", "rejected": " a boat"} for n in range(4)]
    (inputs / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    online: dict[str, Any] = {"prompts": str(inputs / "prompts.txt"), "prompts_per_step": 2}
    online |= {"policy": policy, "reference": reference, "reward": (KIND,), "max_new_tokens": 4, **SMALL}
    job: TrainJob = {
        "ppo": lambda: PPOJob(**online),
        "grpo with lora": lambda: GRPOJob(samples_per_prompt=2, lora_rank=2, **online),
        "dpo": lambda: DPOJob(policy=policy, reference=reference, pairs=str(inputs / "pairs.jsonl"), **SMALL),
    }[kind]()
    expected = trained(job, tmp_path / "undisturbed", NullDisplay())
    assert trained(job, tmp_path / "disturbed", Emptying(inputs)) == expected
    assert len(expected[1]) == 2 and not any(
        path.stat().st_size for path in inputs.rglob("*") if path.is_file()
    )
