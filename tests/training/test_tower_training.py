"""Training of models with vision, audio or video parts on text: their exact KL, and what is saved."""

import json

import numpy as np
import pytest
import torch
from ppo_cases import ready, rollout_of, write_prompts
from scipy.special import log_softmax
from tiny_towers import load_composite, save_tower

from kleash.auditing.targets.packages import quiet
from kleash.models import load_pair
from kleash.records import GRPOJob, PPOJob
from kleash.training import train


def tower_job(folder, family, kind, **settings):
    """A run of one step on a tiny model of a family."""
    for role, apart in (("policy", 0.1), ("reference", 0.0)):
        save_tower(folder / role, family, apart=apart)
    return kind(
        policy=str(folder / "policy"),
        reference=str(folder / "reference"),
        prompts=str(write_prompts(folder)),
        reward=("ppo_cases:vowels",),
        prompts_per_step=2,
        max_new_tokens=4,
        learning_rate=1e-3,
        steps=1,
        out=str(folder / "out"),
        **settings,
    )


def exact_kl(folder, sequence):
    """KL(policy || reference) of the response tokens, by sums over the vocabulary of the composite models' logits."""
    ids = torch.tensor([[*sequence.prompt_ids, *sequence.response_ids]])
    with torch.no_grad():
        logits = [load_composite(folder / role)(input_ids=ids).logits[0] for role in ("policy", "reference")]
    logp, logq = (log_softmax(z[len(sequence.prompt_ids) - 1 : -1].numpy(), axis=-1) for z in logits)
    return (np.exp(logp) * (logp - logq)).sum(-1)


@pytest.mark.parametrize("family", ["gemma3", "qwen3_5", "llama4"])
def test_exact_kl_of_a_rollout_is_that_of_the_composite_models(tmp_path, family):
    job = tower_job(tmp_path, family, PPOJob, dtype="float64", lora_rank=2)
    rollout = rollout_of(*ready(job))
    kl = np.concatenate([exact_kl(tmp_path, sequence) for sequence in rollout.sequences])
    assert kl.max() > 0.01
    np.testing.assert_allclose(rollout.token_kl[rollout.mask].numpy(), kl, rtol=1e-6, atol=1e-6)


def test_a_trained_tower_is_saved_as_a_whole_composite_model(tmp_path):
    job = tower_job(tmp_path, "llava", PPOJob)
    result = train(job)
    trained, before = load_composite(result.policy), load_composite(tmp_path / "policy")
    changed = {
        name.split(".")[1]
        for name, weight in trained.named_parameters()
        if not torch.equal(weight, before.get_parameter(name))
    }
    assert changed == {"language_model", "weight"}  # the head is called lm_head.weight
    pair = load_pair(result.policy, str(tmp_path / "policy"), dtype="float64")
    ids = torch.tensor([[3, 4, 5, 6]])
    with torch.no_grad():
        hidden = trained.model(input_ids=ids).last_hidden_state
    assert torch.equal(pair.policy.hidden_states(ids), hidden)


@pytest.mark.peers("trl")
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
def test_trl_trains_a_tower_with_the_exact_kl(tmp_path):
    job = tower_job(tmp_path, "gemma3", GRPOJob, samples_per_prompt=2, lora_rank=2, limit=2, kl="exact")
    with quiet():
        result = train(job)
    assert result.metrics["kl/exact_per_token"] > 1e-3
    names = json.loads((tmp_path / "out" / "policy" / "adapter_config.json").read_text())
    assert names["base_model_name_or_path"] == str(tmp_path / "policy")
    assert load_pair(result.policy, str(tmp_path / "policy")).policy.adapter == "policy"
