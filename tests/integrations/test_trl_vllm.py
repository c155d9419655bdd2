"""TRL's trainers with vLLM's server mode, which a stand-in server in a process of its own answers."""

import io
import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import requests
import torch
from accelerate import Accelerator
from peft import LoraConfig
from server_process import serving
from trl_batches import TRL_MARKS, make

from kleash.auditing.targets.packages import quiet
from kleash.leash import mismatch

pytestmark = TRL_MARKS
SERVER = Path(__file__).parents[1] / "helpers" / "vllm_server.py"
TEMPERATURE = 0.7
ADAPTER = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


class PostedWeights:
    """In place of vLLM's NCCL engine: the tensors are posted to the server."""

    @staticmethod
    def trainer_send_weights(iterator, trainer_args):
        content = io.BytesIO()
        torch.save([(name, tensor.detach().clone()) for name, tensor in iterator], content)
        requests.post(f"{trainer_args.group}/stand_in/weights", data=content.getvalue()).raise_for_status()


@pytest.fixture(scope="module")
def server(folder, command_forks):
    with serving(command_forks, SERVER, str(folder)) as address:
        yield address


@pytest.fixture(scope="module")
def trl():
    """kleash's trainers, and TRL's modules as if vLLM were installed, with weights posted to the stand-in."""
    with quiet():
        import trl as package
        from trl.generation import vllm_client, vllm_generation

        import kleash.integrations.trl as ours

    def init_communicator(client, device=0):
        assert client.get_server_info()["weight_transfer_config"] is not None
        init_info = {"world_size": client.get_world_size() + 1, "rank_offset": 1}
        client._post(f"{client.base_url}/init_weight_transfer_engine", json={"init_info": init_info})
        client.communicator = client.base_url

    with pytest.MonkeyPatch.context() as patch:
        for module in (vllm_client, vllm_generation):
            patch.setattr(module, "is_vllm_available", lambda min_version=None: True)
        patch.setattr(vllm_client, "NCCLWeightTransferEngine", PostedWeights, raising=False)
        patch.setattr(vllm_client, "NCCLTrainerSendWeightsArgs", SimpleNamespace, raising=False)
        patch.setattr(vllm_client.VLLMClient, "init_communicator", init_communicator)
        patch.setattr(vllm_client.VLLMClient, "close_communicator", lambda client: None)
        yield SimpleNamespace(GRPOConfig=package.GRPOConfig, **vars(ours))


def trained(trl, address, folder, out, settings, **options):
    """A trainer after its steps; its batches are in ``batches``."""
    settings = {"temperature": TEMPERATURE, "learning_rate": 1e-2, "max_steps": 3, **settings}
    vllm = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": address}

    class Recorded(trl.LeashedGRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            self.batches.append(super()._generate_and_score_completions(inputs))
            return self.batches[-1]

    trainer = make(Recorded, trl.GRPOConfig, str(folder), out, config_of={**settings, **vllm}, **options)
    trainer.batches = []
    trainer.train()
    trainer.steps = [entry for entry in trainer.state.log_history if "mismatch/tokens" in entry]
    batches = settings["max_steps"] // settings.get("num_iterations", 1)
    assert len(trainer.steps) == len(trainer.batches) == batches, "it is logged once for each generated batch"
    return trainer


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({"num_iterations": 2, "max_steps": 4}, {"kl_scope": "sequence"}),
        ({"vllm_importance_sampling_correction": False, "max_steps": 2}, {"kl": "k3"}),
        ({"beta": 0.0, "max_steps": 1}, {}),
        ({"gradient_accumulation_steps": 2, "max_steps": 2}, {}),
        ({"learning_rate": 0.05, "max_steps": 2}, {"peft_config": ADAPTER}),
    ],
)
def test_an_engine_with_the_trainers_weights_has_no_mismatch(
    trl, server, folder, tmp_path, settings, options
):
    trainer = trained(trl, f"{server}/none", folder, tmp_path, settings, **options)
    for step in trainer.steps:
        assert 0 <= step["mismatch/kl_engine_trainer"] < 1e-9, "new weights have reached the engine"
        assert step["mismatch/mean_weight"] == pytest.approx(1, abs=1e-5)
        assert step["mismatch/effective_share"] == pytest.approx(1, abs=1e-5)
        assert step["mismatch/largest_log_ratio"] < 1e-4 and step["mismatch/tokens"] >= 4
    if trainer.beta:
        kl = [step["kl"] for step in trainer.steps]
        assert abs(kl[0]) < 1e-6 and all(math.isfinite(value) for value in kl)
        if len(kl) > 1:
            assert abs(kl[-1]) > 1e-4, "the policy has left the reference"


def test_log_probabilities_from_before_the_temperature_show(trl, server, folder, tmp_path):
    trainer = trained(trl, f"{server}/raw", folder, tmp_path, {"max_steps": 1})
    (batch,), (step,) = trainer.batches, trainer.steps
    mask = batch["completion_mask"].bool()
    trainer_logp, engine_logp = (
        batch[name][mask].double().numpy() for name in ("old_per_token_logps", "sampling_per_token_logps")
    )
    ratio = np.exp(trainer_logp - engine_logp)
    expected = {
        "kl_engine_trainer": np.mean(ratio - 1 - np.log(ratio)),
        "kl_trainer_engine": np.mean(ratio * np.log(ratio) - ratio + 1),
        "mean_weight": np.mean(ratio),
        "effective_share": np.sum(ratio) ** 2 / np.sum(ratio**2) / len(ratio),
        "largest_log_ratio": np.abs(np.log(ratio)).max(),
        "tokens": len(ratio),
    }
    for name, value in expected.items():
        assert step[f"mismatch/{name}"] == pytest.approx(value, rel=1e-9), name
    assert step["mismatch/kl_engine_trainer"] > 1e-4 and abs(step["mismatch/mean_weight"] - 1) > 1e-3


def test_stale_weights_show_from_the_second_step_on(trl, server, folder, tmp_path):
    trainer = trained(trl, f"{server}/stale", folder, tmp_path, {"max_steps": 2})
    first, second = (step["mismatch/kl_engine_trainer"] for step in trainer.steps)
    assert first < 1e-9 and second > 1e-4


def test_tokens_without_an_engines_value_are_left_out():
    from kleash.integrations.trl.mismatch_metrics import mismatch_metrics

    draw = torch.Generator().manual_seed(1)
    trainer, engine = -torch.rand(2, 3, 5, generator=draw)
    mask = torch.rand(3, 5, generator=draw) < 0.8
    is_known = torch.rand(3, 5, generator=draw) < 0.7
    metrics = mismatch_metrics(trainer, torch.where(is_known, engine, torch.nan), mask, Accelerator(cpu=True))
    expected = mismatch(trainer, engine, mask & is_known)
    assert metrics["mismatch/tokens"] == int((mask & is_known).sum()) < int(mask.sum())
    assert metrics["mismatch/jensen_shannon"] == pytest.approx(expected.jensen_shannon.value, rel=1e-12)
    nothing = mismatch_metrics(trainer, torch.full_like(engine, torch.nan), mask, Accelerator(cpu=True))
    assert nothing == {"mismatch/tokens": 0.0}


def test_kleash_train_takes_vllm_by_set(trl, server, folder, tmp_path):
    """The engine answers every prompt of the run, and gets the weights of each update."""
    from kleash.records import GRPOJob, read_steps
    from kleash.training.run_log import RunLog
    from kleash.training.with_trl.online import train_online

    (tmp_path / "p.txt").write_text("the sea was\nshe counted\n")
    vllm = ("use_vllm=true", "vllm_mode=server", f"vllm_server_base_url={server}/none")
    small = {"steps": 2, "prompts_per_step": 2, "samples_per_prompt": 2, "max_new_tokens": 6}
    reward = ("kleash.training.example_rewards:heroine", "ppo_cases:vowels")
    given = {"policy": str(folder), "prompts": str(tmp_path / "p.txt"), "out": str(tmp_path)}
    job = GRPOJob(**given, **small, reward=reward, learning_rate=1e-2, set=vllm)
    train_online(job, RunLog(tmp_path, job))
    states = sorted(tmp_path.glob("checkpoints/*/trainer_state.json"))
    logged = [row for row in json.loads(states[-1].read_text())["log_history"] if "mismatch/tokens" in row]
    assert len(logged) == 2 and all(0 <= row["mismatch/kl_engine_trainer"] < 1e-9 for row in logged)
    first, second = (step.metrics["kl/exact_per_token"] for step in read_steps(tmp_path))
    assert first == pytest.approx(0, abs=1e-8) and second > 1e-6, "the update reached the engine"
