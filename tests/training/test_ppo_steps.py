"""Whole small runs: what moves, what does not, what is told."""

import json
import math
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from ppo_cases import ready, rollout_of, tiny_job
from transformers import AutoModelForCausalLM

from kleash.errors import CannotRunError, ModelError, NonFiniteError
from kleash.models import load_pair
from kleash.records import HackingAlert, read_steps
from kleash.store.checksums import seal_folder
from kleash.training import ppo, train
from kleash.training.checkpoints import TrainingState
from kleash.training.job_schedule import leash_of
from kleash.training.ppo import apply_advice, one_step, require_replicas
from kleash.training.run_log import Advice


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ppo-steps")


def weights(module):
    return {name: weight.detach().clone() for name, weight in module.named_parameters()}


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def started(job):
    return TrainingState(leash=leash_of(job).to_dict(), learning_rate=job.learning_rate)


def test_first_importance_ratio_is_exactly_1(folder, tmp_path):
    """Micro-batches of different widths, values learnt: an update is compared with what it was scored as."""
    job = tiny_job(folder, "qwen3", epochs=1, minibatches=1, steps=1, out=str(tmp_path), samples_per_prompt=2)
    metrics = train(job).metrics
    assert metrics["policy/ratio_mean"] == metrics["policy/ratio_max"] == 1.0
    assert metrics["policy/clip_share"] == metrics["value/clip_share"] == 0.0
    assert metrics["kl/update"] > 0 and metrics["policy/updates"] == 1


@pytest.mark.parametrize("architecture", ["llama", "qwen3"], ids=["untied", "tied"])
def test_policy_changes_and_reference_does_not(folder, architecture):
    """The reference is the policy as it starts: the same folder, and another copy of it in memory."""
    job = replace(tiny_job(folder, architecture), reference=None)
    run, prompts = ready(job)
    reference = run.networks.reference.network
    at_first = AutoModelForCausalLM.from_pretrained(job.policy)
    progress = started(job)
    for _ in range(3):
        progress = one_step(run, prompts, progress, None)
    assert same(weights(at_first), weights(reference))
    assert not any(weight.requires_grad for weight in reference.parameters())
    policy = run.networks.network
    assert not any(torch.equal(a, b) for a, b in zip(policy.parameters(), at_first.parameters(), strict=True))
    tied = policy.get_output_embeddings().weight is policy.get_input_embeddings().weight
    assert tied == (architecture == "qwen3")
    assert progress.metrics["kl/exact_per_token"] > 0


def test_adapter_reference_is_its_base_without_adapter(folder, tmp_path):
    job = replace(tiny_job(folder, lora_rank=2, out=str(tmp_path)), reference=None)
    run, prompts = ready(job)
    assert run.networks.reference.network is run.networks.network
    before = weights(run.networks)
    first = one_step(run, prompts, started(job), None)
    assert first.metrics["kl/exact_per_token"] == 0.0, "an adapter that is new changes nothing"
    rollout = rollout_of(run, prompts, 2)
    assert rollout.token_kl[rollout.mask].min() > 0
    plain = AutoModelForCausalLM.from_pretrained(job.policy)
    one = rollout.sequences[0]
    ids = torch.tensor([[*one.prompt_ids, *one.response_ids]])
    with torch.no_grad():
        logp = plain(input_ids=ids).logits[0, len(one.prompt_ids) - 1 : -1].log_softmax(-1)
    expected = logp.gather(1, torch.tensor(one.response_ids)[:, None])[:, 0]
    torch.testing.assert_close(rollout.token_logq[0, : len(expected)], expected, rtol=1e-4, atol=1e-5)
    after = weights(run.networks)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if "lora_" in name or name.startswith("value.")}
    train(job)
    pair = load_pair(f"{tmp_path}/policy", job.policy)
    assert any("adapter" in note for note in pair.notes)


def test_saved_policy_equals_trained_policy(folder, tmp_path):
    job = tiny_job(folder, "qwen3", out=str(tmp_path), steps=1)
    result = train(job)
    assert result.policy == str(tmp_path / "policy") and result.steps == 1 and result.stopped is None
    found = AutoModelForCausalLM.from_pretrained(result.policy)
    run, prompts = ready(job)
    one_step(run, prompts, started(job), None)
    assert same(weights(found), weights(run.networks.network))
    assert load_pair(result.policy, job.reference_name).vocab_size == 320


def test_step_metrics_match_plain_sums_over_response_tokens(folder):
    """By plain sums over the rollout, in numpy, sequence by sequence."""
    job = tiny_job(folder, samples_per_prompt=2, minibatches=3, beta=0.2)
    run, prompts = ready(job)
    rollout = rollout_of(run, prompts)
    metrics = one_step(run, prompts, started(job), None).metrics
    lengths = [len(one.response_ids) for one in rollout.sequences]
    kls = [rollout.token_kl[row, :n].double().numpy() for row, n in enumerate(lengths)]
    log_ratios = (rollout.token_logp - rollout.token_logq).double().numpy()
    u = np.concatenate([log_ratios[row, :n] for row, n in enumerate(lengths)])
    sums, flat = np.array([x.sum() for x in kls]), np.concatenate(kls)
    by_prompt = sums.reshape(4, 2).sum(1)
    scores = rollout.scores.double().numpy()
    expected = {
        "reward/score": scores.mean(),
        "reward/score_std": scores.std(ddof=1),
        "reward/adjusted": (scores - 0.2 * sums).mean(),
        "kl/exact_per_sequence": sums.mean(),
        "kl/exact_per_sequence_error": (by_prompt / 2).std(ddof=1) / 2,
        "kl/exact_per_token": flat.sum() / sum(lengths),
        "kl/k1": u.mean(),
        "kl/k2": (u**2).mean() / 2,
        "kl/k3": (np.exp(-u) - 1 + u).mean(),
        "kl/max_token": flat.max(),
        "kl/max_prompt": max(by_prompt) / 2,
        "kl/top_percent_share": flat.max() / flat.sum(),
        "response/length": np.mean(lengths),
        "response/cut_share": np.mean([one.finish_reason == "length" for one in rollout.sequences]),
        "beta": 0.2,
        "policy/updates": 6,
        "policy/learning_rate": 1e-3,
    }
    assert len(set(lengths)) > 2 and len(flat) < 150
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=1e-6), name
    assert metrics["kl/exact_per_token_error"] > 0 and metrics["reward/score_error"] > 0
    assert 0 < metrics["policy/entropy"] < math.log(320)
    assert metrics["value/explained_variance"] == pytest.approx(0.0, abs=1e-12), "a critic of zeros"


def test_two_steps_draw_different_responses_to_the_same_prompts(folder):
    job = tiny_job(folder, prompts_per_step=6)
    run, prompts = ready(job)
    first, second = (rollout_of(run, prompts, step) for step in (1, 2))
    again = rollout_of(run, prompts)
    answers = [{one.prompt_id: one.response_ids for one in x.sequences} for x in (first, second, again)]
    assert answers[0].keys() == answers[1].keys() and answers[0] == answers[2]
    assert all(answers[0][prompt] != answers[1][prompt] for prompt in answers[0])


def test_updates_stop_early_at_kl_limit(folder, tmp_path):
    far = tiny_job(folder, steps=1, epochs=4, minibatches=1, learning_rate=1e-2)
    free = train(replace(far, out=str(tmp_path / "free")))
    held = train(replace(far, out=str(tmp_path / "held"), early_stop_nats=1e-3))
    assert free.metrics["policy/updates"] == 4 and held.metrics["policy/updates"] == 1
    assert 0 < held.metrics["kl/update"] < free.metrics["kl/update"]
    (event,) = read_steps(tmp_path / "held")[0].events
    assert event.startswith("the updates ended early, after 1")


@pytest.mark.parametrize(("per", "target"), [("sequence", 0.5), ("token", 0.1)])
def test_controller_updates_beta_from_measured_kl(folder, tmp_path, per, target):
    steered = {"controller": "pid", "target_nats": target, "target_per": per}
    job = tiny_job(folder, out=str(tmp_path), beta=0.1, steps=2, **steered)
    result = train(job)
    first, second = read_steps(tmp_path)
    measured, errors = (
        [record.metrics[f"kl/exact_per_{per}{suffix}"] for record in (first, second)]
        for suffix in ("", "_error")
    )
    assert first.metrics["beta"] == 0.1 and first.metrics["kl/target"] == target
    expected = leash_of(job).after(measured[0], sequences=4, standard_error=errors[0])
    assert second.metrics["beta"] == pytest.approx(expected.beta, rel=1e-5) != 0.1
    assert result.beta == pytest.approx(expected.after(measured[1], standard_error=errors[1]).beta, rel=1e-5)


@pytest.mark.parametrize("controller", ["fixed", "ziegler", "pid", "dual"])
def test_advice_of_the_hacking_monitor_is_applied(folder, controller):
    run, _ = ready(tiny_job(folder, controller=controller, target_nats=2.0, beta=0.3, beta_max=0.9))
    alerts = (HackingAlert(kind="runaway", sentence="KL ran away"),)
    progress = replace(started(run.job), step=3)

    def after(act):
        return apply_advice(progress, Advice(alerts=alerts, act=act), run.job)

    assert after(None) == progress and progress.leash["kind"] == controller
    assert after("stop").stopped == "the hacking monitor stopped it after step 3: KL ran away"
    assert after("halve-lr").learning_rate == progress.learning_rate / 2
    again = apply_advice(after("tighten"), Advice(alerts=alerts, act="tighten"), run.job)
    assert (after("tighten").leash["beta"], again.leash["beta"]) == (0.6, 0.9)


def test_diverged_update_stops_and_keeps_the_checkpoint(folder, tmp_path):
    """The learning rate is that of the progress, which an alert may have halved."""
    job = tiny_job(folder, out=str(tmp_path), steps=1, checkpoint_every=1)
    train(job)
    checkpoint = tmp_path / "checkpoints/checkpoint-1/progress.json"
    checkpoint.write_text(json.dumps(json.loads(checkpoint.read_text()) | {"learning_rate": 1e18}))
    seal_folder(checkpoint.parent)
    kept = {path.name: path.read_bytes() for path in checkpoint.parent.glob("*.*")}
    with pytest.raises(NonFiniteError, match=r"in step 2, epoch \d, minibatch \d: .*lower the learning rate"):
        train(replace(job, steps=2, resume=True))
    assert {path.name: path.read_bytes() for path in checkpoint.parent.glob("*.*")} == kept


def test_infinite_kl_of_an_excluded_token_is_reported(folder, monkeypatch):
    """An infinite KL has no finite gradient; the error names it."""
    run, prompts = ready(tiny_job(folder))
    genuine = ppo.roll_out

    def forbidding(*given):
        rollout = genuine(*given)
        rollout.token_kl[1, 1] = torch.inf
        return rollout

    monkeypatch.setattr(ppo, "roll_out", forbidding)
    before = weights(run.networks)
    reason = r"the loss is nan in step 1, .* the largest KL of a token before it is inf nats, .* reward 0\."
    with pytest.raises(NonFiniteError, match=reason):
        one_step(run, prompts, started(run.job), None)
    assert same(before, weights(run.networks))


@pytest.mark.parametrize("norms", [[1.0, torch.inf], [torch.inf, 1.0]], ids=["policy", "critic"])
def test_infinite_gradient_changes_no_weight(folder, monkeypatch, norms):
    run, prompts = ready(tiny_job(folder))
    before = weights(run.networks)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *given: torch.tensor(norms.pop()))
    with pytest.raises(NonFiniteError, match=r"the gradient is inf in step 1, epoch 1, minibatch \d"):
        one_step(run, prompts, started(run.job), None)
    assert same(before, weights(run.networks))


def test_adapters_are_refused(folder, tmp_path):
    from tiny_models import tiny_adapter

    adapter = tiny_adapter(tmp_path / "adapter", folder / "llama-policy")
    with pytest.raises(ModelError, match="is an adapter; merge it"):
        ready(tiny_job(folder, policy=str(adapter)))
    with pytest.raises(CannotRunError, match="the head of the policy has an adapter"):
        ready(tiny_job(folder, lora_rank=2, set=('lora.modules_to_save=["lm_head"]',)))


@pytest.mark.parametrize("rank", [0, 2], ids=["full", "adapter"])
def test_bfloat16_policy_is_trained_in_float32_and_starts_at_kl_0(folder, rank):
    job = tiny_job(folder, "qwen3", dtype="bfloat16", lora_rank=rank, epochs=1, seed=1, reference=None)
    run, prompts = ready(job)
    policy = run.networks
    assert {weight.dtype for weight in policy.parameters() if weight.requires_grad} == {torch.float32}
    metrics = one_step(run, prompts, started(job), None).metrics
    assert metrics["kl/exact_per_token"] == 0.0 and metrics["policy/gradient_norm"] > 0.0
    assert run.networks.dtypes == {"policy": "bfloat16" if rank else "float32", "reference": "bfloat16"}
    if not rank:
        assert {weight.dtype for weight in run.networks.reference.network.parameters()} == {torch.bfloat16}
    assert 0 < metrics["kl/update"] < 1.0 and "kl/top_percent_share" not in metrics, "a share of 0"


@pytest.mark.parametrize("launched", ["bf16", None])
def test_precision_is_the_launchers_and_not_that_of_a_trainer_before(folder, monkeypatch, launched):
    AcceleratorState._reset_state()
    Accelerator(mixed_precision="no" if launched else "bf16", cpu=True)
    if launched:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launched)
    run = ready(tiny_job(folder))[0]
    with run.autocast():
        assert torch.is_autocast_enabled("cpu") == bool(launched)


@pytest.mark.parametrize(
    ("kind", "precision", "reason"),
    [
        ("DEEPSPEED", "no", "is set to DEEPSPEED"),
        ("FSDP", "bf16", "is set to FSDP.*train grpo"),
        ("MULTI_GPU", "fp16", "mixed precision fp16"),
        ("MULTI_GPU", "no", "1 responses of a step"),
        ("MULTI_GPU", "bf16", None),
    ],
)
def test_unsupported_accelerate_configurations_are_refused(kind, precision, reason):
    accelerator = SimpleNamespace(
        distributed_type=f"DistributedType.{kind}", mixed_precision=precision, num_processes=2
    )
    with nullcontext() if reason is None else pytest.raises(CannotRunError, match=reason):
        require_replicas(accelerator, 2 if reason is None else 1)
