"""RolloutDump in real runs of TRL's trainers on a tiny model, read back by mismatch and doctor."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from trl_batches import TRL_MARKS, make

from kleash.cli import main
from kleash.diagnosis import measure_mismatch, read_rollouts
from kleash.errors import OptionError

pytestmark = TRL_MARKS


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("GRPO", {}),
        ("GRPO", {"temperature": 0.7, "top_k": 40, "beta": 0.0}),
        ("GRPO", {"num_iterations": 2}),
        ("LeashedGRPO", {}),
        ("RLOO", {}),
    ],
)
def test_rollouts_of_a_run_are_written_and_read(trl, folder, tmp_path, capsys, kind, settings):
    config = getattr(trl, f"{kind.removeprefix('Leashed')}Config")
    trainer_class = getattr(trl, f"{kind}Trainer")
    settings = {"max_steps": 3, **settings}
    runs = []
    for name in ("with", "without"):
        trainer = make(trainer_class, config, str(folder), tmp_path / name, config_of=settings)
        if name == "with":
            trl.RolloutDump(tmp_path / "rollouts", every=2).attach(trainer)
        trainer.train()
        runs.append([weight.detach().clone() for weight in trainer.model.parameters()])
    assert all(map(torch.equal, *runs)), "the training is the same with and without the callback"
    files = sorted(path.name for path in (tmp_path / "rollouts").iterdir())
    assert files == ["step-000000-rank-0.jsonl", "step-000002-rank-0.jsonl"]
    lines = (tmp_path / "rollouts" / files[1]).read_text().splitlines()
    assert {json.loads(line)["version"] for line in lines} == {2}
    rollouts = read_rollouts(tmp_path / "rollouts" / files[0])
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    temperature, top_k = settings.get("temperature", 1.0), settings.get("top_k", 0)
    for rollout in rollouts:
        ids = torch.tensor([rollout.prompt_ids + rollout.response_ids])
        with torch.no_grad():
            logits = network(ids).logits[0, len(rollout.prompt_ids) - 1 : -1] / temperature
        drawn = torch.tensor(rollout.response_ids)[:, None]
        logp = logits.log_softmax(-1)
        counted = rollout.is_counted
        expected = logp.gather(-1, drawn).squeeze(-1).numpy()
        np.testing.assert_allclose(rollout.trainer[counted], expected[counted], atol=1e-4)
        if top_k:
            logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
        cut = logits.log_softmax(-1).gather(-1, drawn).squeeze(-1).numpy()
        np.testing.assert_allclose(rollout.engine[counted], cut[counted], atol=1e-4)
        has_reference = "Leashed" in kind or (kind == "GRPO" and settings.get("beta", 1) > 0)
        assert (rollout.reference is not None) == has_reference
    record = measure_mismatch(tmp_path / "rollouts")
    assert list(record.kl_by_file) == [str(tmp_path / "rollouts" / name) for name in files]
    if not top_k:
        assert record.numbers["kl_engine_trainer"].value < 1e-8
    assert main(["doctor", str(tmp_path / "rollouts")]) == 0
    assert "8 responses" in " ".join(capsys.readouterr().out.split())


def test_other_trainers_and_intervals_are_refused(trl, tmp_path):
    with pytest.raises(OptionError, match="write_rollouts"):
        trl.RolloutDump(tmp_path).attach(SimpleNamespace(add_callback=print))
    with pytest.raises(OptionError, match="at least 1"):
        trl.RolloutDump(tmp_path, every=0)


def test_a_resumed_run_writes_the_batches_of_the_whole_one_after_its_first(trl, tmp_path):
    dump, written = trl.RolloutDump(tmp_path, every=10), []
    network = torch.nn.Linear(1, 1)
    network._get_logits_processor = dump._write = lambda *batch: written.append(batch[-1])
    ranks = SimpleNamespace(unwrap_model=lambda model: model)
    for at in range(37, 61):
        dump.trainer = SimpleNamespace(
            model=network, state=SimpleNamespace(global_step=at), accelerator=ranks
        )
        dump._generate_and_write(lambda inputs: {}, [])
    assert written == [37, 40, 50, 60]
