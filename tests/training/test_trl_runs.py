"""``kleash train grpo|rloo|dpo|distill``: real short runs on the shipped models and on tiny ones."""

import json
import logging
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate.logging import MultiProcessAdapter
from ppo_process import two_ranks
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny, tiny_adapter
from transformers import AutoTokenizer
from trl_batches import TRL_MARKS, make, moved, whole_logp

from kleash.errors import CannotRunError, ModelError, OptionError, RunFolderError, SourceError
from kleash.integrations.trainer import DriftMonitor
from kleash.models import load_pair
from kleash.records import DistillJob, DPOJob, GRPOJob, RLOOJob, read_samples, read_steps
from kleash.store.metrics import METRICS, PART
from kleash.store.steps import held_out as held_out_metrics
from kleash.store.training_folder import last_checkpoint
from kleash.training import train as train_job
from kleash.training.hacking_monitor import HackingMonitor
from kleash.training.header_and_result import header_of
from kleash.training.run_log import RunLog

pytestmark = TRL_MARKS
HEROINE = "kleash.training.example_rewards:heroine"
SMALL = {
    "learning_rate": 1e-3, "limit": 6, "prompts_per_step": 2, "samples_per_prompt": 2, "max_new_tokens": 5,
}  # fmt: skip


def go(train, job, out, monitor=None, **changes):
    """Run a job in a folder, with other options: its result, and its steps."""
    out.mkdir(exist_ok=True)
    job = replace(job, out=str(out), **changes)
    result = train(job, RunLog(out, job, monitor=monitor))
    return result, read_steps(out)


def same(one, other):
    names = [name for name in one.metrics if not name.startswith("time/")]
    a, b = ([step.metrics[name] for name in names] for step in (one, other))
    return np.array_equal(a, b, equal_nan=True)


def test_resumed_run_equals_uninterrupted_run(trl, tmp_path):
    pid = {"controller": "pid", "target_nats": 0.2, "reward": (HEROINE,)}
    job = GRPOJob(steps=4, checkpoint_every=2, batch_tokens=64, **pid, **SMALL)
    named = {"policy", "reference", "policy generation_config.json", f"reward {HEROINE}"}
    assert header_of(job).fingerprints.keys() == named
    result, whole = go(trl.train_online, job, tmp_path / "whole")
    go(trl.train_online, replace(job, steps=2), tmp_path / "parts")
    again, parts = go(trl.train_online, job, tmp_path / "parts", resume=True)
    assert [step.step for step in parts] == [1, 2, 3, 4] and again.beta == result.beta != 0.05
    assert all(same(one, other) for one, other in zip(whole, parts, strict=True))
    assert [step.events for step in whole] == [step.events for step in parts]
    assert whole[0].events == (
        "the measured KL is 0, as before the first update: taken as the largest deviation",
    )
    weights = [load_pair(one.policy, one.policy).policy.network.state_dict() for one in (result, again)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert whole[-1].metrics["kl/exact_per_token"] > 0 == whole[0].metrics["kl/exact_per_token"]
    assert len(read_samples(tmp_path / "whole")) == 16
    newest = last_checkpoint(tmp_path / "parts")
    assert newest.name == "checkpoint-4"
    damaged = newest / "optimizer.pt"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 4
    damaged.write_bytes(content)
    with pytest.raises(RunFolderError, match=r"optimizer\.pt is damaged: .*delete the checkpoint"):
        go(trl.train_online, job, tmp_path / "parts", steps=5, resume=True)
    (newest / "checksums.jsonl").unlink()
    assert last_checkpoint(tmp_path / "parts").name == "checkpoint-2", "killed before it was sealed"


def test_reused_response_updates_beta_once(trl, tmp_path, caplog):
    """Ziegler's horizon is four steps' responses: a fifth of a quarter for a KL of 0."""
    ziegler = {"controller": "ziegler", "target_nats": 5.0}
    job = GRPOJob(steps=2, epochs=2, reward=(HEROINE,), dtype="bfloat16", **ziegler, **SMALL)
    _, steps = go(trl.train_online, job, tmp_path / "run")
    assert steps[0].metrics["kl/exact_per_token"] == 0, "of weights of float32 to those of bfloat16"
    assert [step.metrics["beta"] for step in steps] == pytest.approx([0.05, 0.05 * (1 - 0.2 / 4)])
    assert len(steps[0].events) == 1 and not caplog.records, "events are in the run log, and nowhere else"


def test_rloo_with_adapter_and_kl_in_reward(trl, tmp_path):
    settings = {**SMALL, "learning_rate": 3e-2, "kl": "k1", "kl_place": "reward", "seed": 2}
    job = RLOOJob(steps=2, epochs=2, lora_rank=4, reward=(HEROINE, f"0.5*{HEROINE}"), **settings)
    result, steps = go(trl.train_online, job, tmp_path / "run")
    first, second = (step.metrics for step in steps)
    assert first["kl/exact_per_sequence"] == 0 < second["kl/exact_per_sequence"]
    names = [f"{PART}heroine", f"{PART}heroine-2"]
    assert second["reward/score"] == pytest.approx(second[names[0]] + 0.5 * second[names[1]])
    assert result.steps == 2 and {name for name in second if "trainer/" not in name} <= {*METRICS, *names}
    assert load_pair(result.policy, "shipped:reference").policy.adapter is not None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dpo_learns_its_pairs_and_measures_drift(trl, tmp_path, dtype):
    """In bfloat16, too, two models that are still equal give equal numbers."""
    pairs = tmp_path / "pairs.jsonl"
    rows = [
        {"prompt": f"{who} was", "chosen": " happy and kind", "rejected": " angry and cold"}
        for who in ("She", "He", "Emma", "Jane")
    ]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = DPOJob(pairs=str(pairs), pairs_per_step=2, steps=3, checkpoint_every=2, learning_rate=1e-3)
    result, steps = go(trl.train_dpo, job, tmp_path / "run", dtype=dtype)
    margins = [step.metrics["pairs/margin"] for step in steps]
    assert margins[0] == 0 < margins[1] < margins[2] and steps[2].metrics["pairs/accuracy"] == 1
    drifts = [step.metrics.get("kl/exact_per_token") for step in steps]
    assert drifts[0] == 0 < drifts[1] and steps[1].metrics["kl/exact_per_token_error"] > 0
    assert drifts[2] > 0 and "kl/exact_per_sequence" in result.metrics, "the last step is always measured"
    weights = tmp_path / "run" / "policy" / "model.safetensors"
    trained = weights.read_bytes()
    again, same_steps = go(trl.train_dpo, job, tmp_path / "run", resume=True)
    assert result.beta == 0.1 and again.steps == 3 and same_steps == steps
    assert weights.read_bytes() == trained


def test_dpo_evaluates_held_out_pairs_and_keeps_the_best_checkpoint(trl, tmp_path, capfd, monkeypatch):
    """Also in two processes, which have no files of TRL's in common."""
    pairs, held_out = tmp_path / "pairs.jsonl", tmp_path / "held_out.jsonl"
    for path, chosen, rejected in ((pairs, " kind", " cold"), (held_out, " cold", " kind")):
        answers = {"chosen": chosen, "rejected": rejected}
        rows = [{"prompt": f"{who} was", **answers} for who in ("She", "He", "Emma")]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"limit": 2, "pairs_per_step": 2, "checkpoint_every": 1, "learning_rate": 1e-3}
    job = DPOJob(pairs=str(pairs), eval_pairs=str(held_out), steps=2, **options)
    assert header_of(job).fingerprints.keys() == {"policy", "reference", "held-out pairs"}
    result, steps = go(trl.train_dpo, job, tmp_path / "run")
    losses = [step.metrics["eval/loss"] for step in steps]
    assert np.log(2) < losses[0] < losses[1], "what is learned is the opposite of what is held out"
    assert steps[1].metrics["eval/accuracy"] == 0 > steps[1].metrics["eval/margin"]
    assert held_out_metrics(steps)["eval/loss"] == losses[1] and result.best is not None
    assert Path(result.best).name == "checkpoint-1"
    # with two passes over the pairs, that of the reference is made once
    path = tmp_path / "run" / "checkpoints" / "checkpoint-2" / "training_args.bin"
    config = torch.load(path, weights_only=False)
    assert config.precompute_ref_log_probs and "log probs" not in capfd.readouterr().err
    monkeypatch.setattr("datasets.fingerprint._TEMP_DIR_FOR_TEMP_CACHE_FILES", None)
    assert two_ranks(train_job, replace(job, out=str(tmp_path / "two"))) == [0, 0]
    of_one, of_two = ([step.metrics["loss"] for step in run] for run in (steps, read_steps(tmp_path / "two")))
    assert of_two == pytest.approx(of_one, rel=1e-5)
    _, in_one_batch = go(trl.train_dpo, job, tmp_path / "batch", set=("per_device_eval_batch_size=3",))
    margins = ([step.metrics["eval/margin"] for step in run] for run in (steps, in_one_batch))
    assert next(margins) == pytest.approx(next(margins), rel=1e-5), "each pair counts as much as any other"


def test_dpo_renders_pairs_as_kleash_does(trl, tmp_path, monkeypatch):
    """The chat template gets tools and variables of each pair; a prompt beyond the model's context is left out."""
    folder, pairs = save_tiny(tmp_path / "tiny"), tmp_path / "pairs.jsonl"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = (
        "{{ mood + '' }}{{ tools | map(attribute='name') | list }}" + tokenizer.chat_template
    )
    tokenizer.save_pretrained(folder)
    asked, chosen, rejected, long = (
        [{"role": role, "content": text}]
        for role, text in (("user", "Q"), ("assistant", "a"), ("assistant", "b"), ("user", "sea " * 128))
    )
    pair = {"prompt": asked, "chosen": chosen, "rejected": rejected, "chat_template_kwargs": {"mood": "calm"}}
    rows = [{**pair, "prompt": long}, {**pair, "tools": []}, {**pair, "tools": [{"name": "sea"}]}]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    ran = "kleash.training.with_trl.preferences.run_trainer"
    monkeypatch.setattr(ran, lambda trainer, *_, notes: (trainer, notes))
    job = DPOJob(policy=str(folder), pairs=str(pairs), out=str(tmp_path / "run"))
    with pytest.raises(SourceError, match="holds no pair with a prompt of fewer than 128 tokens; give"):
        trl.train_dpo(replace(job, limit=1), None)
    MultiProcessAdapter.warning_once.cache_clear()
    monkeypatch.setattr(logging.getLogger("trl"), "propagate", False)  # as without pytest's handlers
    trainer, notes = trl.train_dpo(job, None)
    assert "prompt is not a prefix" in notes[0], "TRL's warning"
    assert notes[1:] == ["1 of 3 pairs are left out: their prompts have 128 tokens or more"]
    (monitor,) = [each for each in trainer.callback_handler.callbacks if isinstance(each, DriftMonitor)]
    monitor.measure()
    texts = [tokenizer.decode(ids) for ids in trainer.train_dataset["prompt_ids"]]
    assert texts == [prompt.text.rstrip() for prompt in monitor._parsed_prompts] and "calm['sea']" in texts[1]
    texts = tmp_path / "texts.jsonl"
    texts.write_text(json.dumps({"prompt": "Q", "chosen": "a", "rejected": "b"}))
    with pytest.raises(SourceError, match="line 1: a chat template renders its 'chosen', and the pol"):
        trl.train_dpo(replace(job, policy="shipped:reference", pairs=str(texts), eval_pairs=str(pairs)), None)
    pairs.write_text(json.dumps({**pair, "chat_template_kwargs": {}}))
    with pytest.raises(SourceError, match="line 1: the chat template refuses the messages: 'mood'"):
        trl.train_dpo(job, None)
    other = {**pair, "chat_template_kwargs": {"mood": "", "sea": 1}}
    pairs.write_text(json.dumps(pair) + "\n" + json.dumps(other))
    with pytest.raises(SourceError, match="line 2: 'chat_template_kwargs' has other variables than before"):
        trl.train_dpo(job, None)


@pytest.mark.parametrize(
    "asked", [{}, {"kl": "k3"}, {"kl": "k1", "kl_place": "reward", "kl_scope": "sequence"}]
)
@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_step_metrics_match_dense_kl_and_entropy_of_its_responses(trl, folder, tmp_path, kind, asked):
    """Whatever KL is trained, and in several micro-batches: over all responses, from the passes of the loss."""
    config = getattr(trl.package, f"{kind}Config")
    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    if kind == "GRPO" and "kl_place" in asked:
        settings["scale_rewards"] = "none"
    trainer = make(getattr(trl, f"Leashed{kind}"), config, str(folder), tmp_path, config_of=settings, **asked)
    trainer.reward_weights[0] = 2.0
    moved(trainer.model, 0.2)
    from trl.trainer.utils import shuffle_sequence_dict, split_tensor_dict

    from kleash.training.with_trl import response_recorder

    recorder = response_recorder.ResponseRecorder(trainer)
    inputs = [{"prompt": "the sea was"}] * 2 + [{"prompt": "she counted"}] * 2
    seen, reward = [], trainer._calculate_rewards
    trainer._calculate_rewards = lambda *args: seen.append(reward(*args)) or seen[-1]
    output = trainer._generate_and_score_completions(inputs)
    (scores,) = seen
    logp, logq = (whole_logp(model, output, 1.0).detach() for model in (trainer.model, trainer.ref_model))
    count = passes_of(trainer)
    for at, micro in enumerate(split_tensor_dict(shuffle_sequence_dict(output), 2)):
        trainer.accelerator.gradient_state._set_sync_gradients(at == 1)
        trainer.compute_loss(trainer.model, micro)
    assert count() == 2, "a pass of the policy for each micro-batch, and no other"
    without_exact = [
        replace(one, tokens={name: x for name, x in one.tokens.items() if name != "token_kl"})
        for one in recorder._responses["train"]
    ]
    recorder._add_metrics()
    found = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    mask = output["completion_mask"].bool()
    kl = torch.where(mask, (logp.exp() * (logp - logq)).sum(-1), 0.0)
    ratio = (logq - logp).gather(-1, output["completion_ids"].unsqueeze(-1))[..., 0]
    k3 = torch.where(mask, ratio.exp() - 1 - ratio, 0.0)
    exact, sampled = (x.sum(-1).reshape(2, 2).mean(1) for x in (kl, k3))  # of each prompt
    expected = {
        "kl/exact_per_token": kl.sum() / mask.sum(),
        "kl/exact_per_sequence": kl.sum() / 4,
        "kl/exact_per_sequence_error": exact.diff().abs() / 2,
        "kl/max_token": kl.max(),
        "kl/max_token_per_sequence": kl.amax(-1).mean(),
        "kl/max_prompt": exact.max(),
        "policy/entropy": -(logp.exp() * logp).sum(-1)[mask].mean(),
        "kl/k3": k3.sum() / mask.sum(),
        "kl/k3_per_sequence": k3.sum() / 4,
        "reward/score": 2 * scores[:, 0].mean(),
    }
    assert {name: found[name] for name in expected} == pytest.approx(
        {name: x.item() for name, x in expected.items()}, rel=1e-3
    )
    one_masked = [replace(without_exact[0], tokens={}), *without_exact[1:]]
    by_k3, masked = (response_recorder.response_metrics(x, 0.0) for x in (without_exact, one_masked))
    assert by_k3["kl/max_prompt"] == pytest.approx(sampled.max().item(), rel=1e-4) != found["kl/max_prompt"]
    assert "response/length" in by_k3 and "response/length" not in masked, "TRL's own is of all responses"
    samples = {(one.prompt, one.response): one.kl for one in recorder.samples}
    texts = trainer.processing_class.batch_decode(output["completion_ids"], skip_special_tokens=True)
    for row, (asked_for, text) in enumerate(zip(inputs, texts, strict=True)):
        assert samples[asked_for["prompt"], text] == pytest.approx(kl[row].sum().item(), rel=1e-4)
    ended = [1 in row[keep].tolist() for row, keep in zip(output["completion_ids"], mask, strict=True)]
    assert found["completions/clipped_ratio"] == 1 - sum(ended) / 4
    recorder._add_metrics()
    assert recorder.samples == [], "of further passes"
    turns = [{"role": "assistant", "content": None}, {"role": "tool", "content": "7 7"}, {"content": "seven"}]
    assert response_recorder._text(turns) == "\nseven"
    trainer.measure_exact_kl = lambda: (_ for _ in ()).throw(ModelError("offloaded"))
    assert response_recorder.ResponseRecorder(trainer).note.endswith("KL is not measured: offloaded")


def passes_of(trainer):
    """A function that says how often the policy or the reference has run since now."""
    calls = []
    for model in (trainer.model, trainer.ref_model):
        model.register_forward_hook(lambda *_: calls.append(1))
    return lambda: len(calls)


@pytest.mark.parametrize("on_hacking", ["stop", "halve-lr", "tighten"])
def test_advice_after_an_alert_is_applied(trl, tmp_path, on_hacking):
    dual = {"controller": "dual", "target_nats": 1e-6, "beta": 0.1}
    job = GRPOJob(steps=3, on_hacking=on_hacking, reward=(HEROINE,), seed=2, **dual, **SMALL)
    monitor = HackingMonitor(steps=1, sure=0.0, update_share=math.inf)
    result, steps = go(trl.train_online, job, tmp_path / "run", monitor=monitor)
    said = [step.step for step in steps if step.alerts]
    assert said == [2] and "times its target" in steps[1].alerts[0].sentence
    rates = [step.metrics["policy/learning_rate"] for step in steps]
    betas = [step.metrics["beta"] for step in steps]
    if on_hacking == "stop":
        assert result.steps == 2 and result.stopped.startswith("the hacking monitor stopped it after step 2")
        assert (tmp_path / "run" / "checkpoints" / "checkpoint-2").is_dir()
        again, same_steps = go(trl.train_online, job, tmp_path / "run", resume=True)
        assert again.stopped == result.stopped and again.steps == 2
        assert [step.step for step in same_steps] == [1, 2]
    elif on_hacking == "halve-lr":
        assert rates == pytest.approx([1e-3, 1e-3, 5e-4])
    else:
        assert betas[2] > 2 * betas[1] and rates[2] == pytest.approx(1e-3)


def test_unsupported_options_are_refused_before_training(trl, folder, tmp_path, monkeypatch):
    job = GRPOJob(reward=(HEROINE,), **SMALL)
    long = {"policy": str(folder), "prompts": "shipped:prompts", "max_new_tokens": 200}
    distillation = DistillJob(teacher=str(folder), **SMALL)
    for train, asked in ((trl.train_online, job), (trl.train_distill, distillation)):
        with pytest.raises(SourceError, match="--max-new-tokens 200 the models, which read at most 128"):
            go(train, replace(asked, **long), tmp_path / "long")
    adapter = tiny_adapter(tmp_path / "adapter", folder)
    with pytest.raises(OptionError, match=r"the policy .* is an adapter, which is trained further"):
        own = {"policy": str(adapter), "prompts": "shipped:prompts", "lora_rank": 2}
        go(trl.train_online, replace(job, **own), tmp_path / "a")
    with pytest.raises(
        ModelError, match=r"the teacher .* is an adapter; .* dpo and kleash cache take adapters"
    ):
        go(trl.train_distill, DistillJob(teacher=str(adapter), **SMALL), tmp_path / "t")
    on_head = tiny_adapter(tmp_path / "head", folder, target_modules=["lm_head"])
    with pytest.raises(ModelError, match="head is on the head, whose weight alone TRL reads"):
        go(trl.train_online, replace(job, policy=str(on_head), prompts="shipped:prompts"), tmp_path / "h")
    path = adapter / "adapter_model.safetensors"
    save_file(dict(list(load_file(path).items())[1:]), path)
    with pytest.raises(ModelError, match=r"does not fit .* 1 places no tensor"):
        go(trl.train_online, replace(job, policy=str(adapter), prompts="shipped:prompts"), tmp_path / "f")
    with pytest.raises(OptionError, match="float16 loses gradients"):
        go(trl.train_online, replace(job, dtype="float16"), tmp_path / "b")
    with pytest.raises(CannotRunError, match="cannot be used here"):
        go(trl.train_online, replace(job, device="cuda:7"), tmp_path / "d")
    accelerate = "accelerate.PartialState"
    monkeypatch.setattr(accelerate, lambda **_: SimpleNamespace(num_processes=3))
    with pytest.raises(OptionError, match="4 rows a step cannot be divided evenly among 3 processes"):
        go(trl.train_online, job, tmp_path / "e")


DROPPING = {"kind": "LoHa", "size": 9.0, "module_dropout": 0.4, "rank_dropout": 0.4}


@pytest.mark.parametrize(
    "algorithm, settings", [("dpo", {}), ("grpo", {"kind": "Pvera"}), ("grpo", DROPPING)]
)
def test_an_adapter_is_trained_further_without_its_noise(trl, folder, tmp_path, algorithm, settings):
    """It starts at a KL of 0 to itself, leaves it, and is saved as an adapter over its unchanged base."""
    adapter = tiny_adapter(tmp_path / "adapter", folder, **settings)
    before = {path.name: path.read_bytes() for path in (*adapter.iterdir(), folder / "model.safetensors")}
    common = {"policy": str(adapter), "steps": 2, "learning_rate": 1e-2, "checkpoint_every": 2}
    if algorithm == "grpo":
        (tmp_path / "p.txt").write_text("the sea was\nshe counted\n")
        small = {"prompts_per_step": 2, "samples_per_prompt": 3, "max_new_tokens": 8}
        job = GRPOJob(**common, **small, prompts=str(tmp_path / "p.txt"), reward=("ppo_cases:vowels",))
        result, steps = go(trl.train_online, job, tmp_path / "run")
    else:
        (tmp_path / "p.jsonl").write_text(
            '{"prompt": "the sea", "chosen": " was calm", "rejected": " ran"}\n'
        )
        job = DPOJob(**common, pairs=str(tmp_path / "p.jsonl"), pairs_per_step=1)
        result, steps = go(trl.train_dpo, job, tmp_path / "run")
    assert steps[0].metrics["kl/exact_per_token"] == pytest.approx(0, abs=1e-7)
    assert steps[-1].metrics["kl/exact_per_token"] > 1e-6
    pair = load_pair(result.policy, str(adapter))
    assert pair.policy.adapter is not None and pair.policy.base == str(folder)
    saved, given = (Path(root) / "adapter_model.safetensors" for root in (result.policy, adapter))
    assert saved.read_bytes() != given.read_bytes()
    assert all(path.read_bytes() == before[path.name] for path in (given, folder / "model.safetensors"))
