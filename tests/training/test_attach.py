"""``kleash.attach``: the folder that a trainer of TRL or transformers writes, and what is refused."""

from importlib import import_module
from statistics import fmean

import pytest
import torch
from peft import LoraConfig
from tiny_models import metaspace_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainerCallback, TrainingArguments
from trl_batches import TRL_MARKS, make, moved, score, whole_logp

import kleash
from kleash.cli import main
from kleash.diagnosis import read_rollouts
from kleash.errors import CannotRunError, NonFiniteError, OptionError, RunFolderError, UnknownNameError
from kleash.integrations.trainer import BetaController, DriftMonitor
from kleash.leash import FixedBeta, PIDBeta, StatefulController
from kleash.models import Sampling
from kleash.records import TrainingFolder, read_samples, read_steps
from kleash.store import summarize
from kleash.store.locks import folder_lock
from kleash.store.steps import read_prompt_means
from kleash.training import HackingMonitor

pytestmark = TRL_MARKS
PROMPTS = ["the sea was", "she counted", "a long road"]
QUIET = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
QUIET |= {"learning_rate": 1e-2}


def grpo(trl, folder, tmp_path, *, leashed=True, kind="GRPO", **settings):
    trainer_class = getattr(trl, f"Leashed{kind}") if leashed else getattr(trl.package, f"{kind}Trainer")
    config = getattr(trl.package, f"{kind}Config")
    more = settings.pop("more", {})
    return make(trainer_class, config, str(folder), tmp_path / "trl", config_of=settings, **more)


def plain(folder, tmp_path, kind=Trainer, **settings):
    ids = torch.randint(3, 300, (8, 12), generator=torch.Generator().manual_seed(0)).tolist()
    given = {**QUIET, "max_steps": 4, "logging_steps": 2, "seed": 3, **settings}
    rows = [{"input_ids": row, "labels": row} for row in ids]
    args = TrainingArguments(output_dir=str(tmp_path / "hf"), **given)
    network, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    return kind(model=network, args=args, train_dataset=rows, eval_dataset=rows, processing_class=tokenizer)


def monitor(folder, **more):
    return DriftMonitor(
        prompts=PROMPTS, reference=str(folder), every=2, sampling=Sampling(max_new_tokens=4), **more
    )


def test_leashed_trainer_writes_a_folder_that_report_reads(trl, folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    trainer = grpo(trl, folder, tmp_path, max_steps=3)
    for unknown in (None, {"kind": "pid"}, StatefulController(FixedBeta(beta=0.3))):
        with pytest.raises(UnknownNameError, match="no beta controller is called"):
            kleash.attach(trainer, target_nats=0.5, controller=unknown)
    log = kleash.attach(trainer, target_nats=0.5, controller="dual", out="~/run", rollouts_every=2)
    trainer.train()
    steps = read_steps("~/run")
    assert [step.step for step in steps] == [1, 2, 3]
    written = sorted(path.name for path in (tmp_path / "run" / "rollouts").iterdir())
    assert written == ["step-000000-rank-0.jsonl", "step-000002-rank-0.jsonl"]
    assert len(read_rollouts(tmp_path / "run")) == len(read_rollouts(tmp_path / "run" / "rollouts"))
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    for step, entry in zip(steps, logged, strict=True):
        assert step.metrics["kl/exact_per_token"] == pytest.approx(entry["kl/per_token"], rel=1e-5, abs=1e-9)
        assert step.metrics["reward/score"] == pytest.approx(entry["reward"], rel=1e-5)
        assert step.metrics["policy/entropy"] == pytest.approx(entry["entropy"], rel=1e-5)
        assert step.metrics["reward/zero_std_share"] == entry["frac_reward_zero_std"]
        assert step.metrics["kl/target"] == 0.5
        others = ("clip_ratio/low_mean", "completions/max_length", "num_tokens")
        assert all(step.metrics[f"trainer/{name}"] == entry[name] for name in others)
    betas = [step.metrics["beta"] for step in steps]
    assert betas[0] == 0.3 and len(set(betas)) == 3
    kl = steps[1].metrics["kl/exact_per_sequence"]
    assert f"KL {kl:.3g} is above its target of 0.5" in steps[1].beta_reason
    assert len(read_samples("~/run")) == 12
    result = TrainingFolder(tmp_path / "run").result()
    assert result == log.result_of_run and (result.algorithm, result.steps) == ("grpo", 3)
    assert result.beta == trainer.beta and dict(result.metrics) == dict(steps[-1].metrics)
    assert main(["report", str(tmp_path / "run")]) == 0
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "trained by GRPO" in page and "To repeat the run" not in page
    settings = TrainingFolder(tmp_path / "run").header().settings
    assert settings["trainer"] == "LeashedGRPOTrainer" and settings["learning_rate"] == 1e-3


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_trls_own_trainer_is_measured_by_k3_and_trains_as_without(trl, folder, tmp_path, kind):
    weights, settings = [], {"steps_per_generation": 2, "learning_rate": 1e-2} if kind == "GRPO" else {}
    for attached in (False, True):
        trainer = grpo(trl, folder, tmp_path, leashed=False, kind=kind, **settings)
        moved(trainer.model, 0.05)
        if attached:
            kleash.attach(trainer, monitor=monitor(folder), out=tmp_path / "run")
        trainer.train()
        weights.append([weight.detach().clone() for weight in trainer.model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    for step, entry in zip(read_steps(tmp_path / "run"), logged, strict=True):
        name = {"GRPO": "kl/k3", "RLOO": "kl/k1"}[kind]  # of what TRL logs itself, with importance weights
        assert step.metrics[name] == pytest.approx(entry["kl"], rel=1e-4) and entry["kl"] != 0
        assert step.metrics["kl/k3_per_sequence"] > 0 and "kl/exact_per_token" not in step.metrics


def test_plain_grpo_is_steered_by_k3(trl, folder, tmp_path, caplog):
    without = grpo(trl, folder, tmp_path, leashed=False, beta=0.0)
    with pytest.raises(OptionError, match="beta is 0, which no factor raises"):
        kleash.attach(without, target_nats=1.0, monitor=monitor(folder), rollouts_every=1, out=tmp_path)
    kleash.attach(without, out=tmp_path / "none")
    assert "no reference and no KL is measured" in caplog.text
    without.train()
    assert len(read_samples(tmp_path / "none")) == 8 and not (tmp_path / "rollouts").exists(), "none attached"
    unpriced = read_steps(tmp_path / "none")[0].metrics
    assert unpriced["reward/adjusted"] == pytest.approx(unpriced["reward/score"])
    trainer = grpo(trl, folder, tmp_path, leashed=False)
    moved(trainer.model, 0.1)
    steep = PIDBeta(beta=0.3, target_nats=1e-3, proportional=3.0)
    kleash.attach(trainer, controller=steep, monitor=monitor(folder), out=tmp_path / "run")
    trainer.train()
    described = kleash.compare([tmp_path / "none", tmp_path / "run"]).runs[1].settings
    asked = {"proportional": 3.0, "monitor_max_new_tokens": 4, "monitor_reference": folder}
    assert {name: f"{value} for the default" for name, value in asked.items()}.items() <= described.items()
    assert described["controller"] == "pid for fixed", "as kleash train calls them"
    first, second = read_steps(tmp_path / "run")
    assert "the target is 0.00100." in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert first.metrics["kl/k3_per_sequence"] > 1e-3
    assert second.metrics["beta"] > first.metrics["beta"] == 0.3


def test_a_pass_for_the_rollouts_is_not_taken_for_that_of_a_reference(trl, folder, tmp_path, caplog):
    trainer = grpo(trl, folder, tmp_path, leashed=False, kind="RLOO", beta=0.0)
    kleash.attach(trainer, monitor=monitor(folder), out=tmp_path / "run", rollouts_every=1)
    trainer.train()
    kls = {name for step in read_steps(tmp_path / "run") for name in step.metrics if "kl" in name}
    assert all("kl/exact" in name for name in kls) and kls and "no KL is measured" not in caplog.text


@pytest.mark.parametrize("leashed", [False, True])
@pytest.mark.parametrize("disabled", [False, True])
def test_dropout_is_told_once_where_the_kl_has_it(trl, folder, tmp_path, recwarn, leashed, disabled):
    said: list[str] = []
    asked = {"peft_config": LoraConfig(lora_dropout=0.3, task_type="CAUSAL_LM"), "said": said}
    trainer = grpo(trl, folder, tmp_path, leashed=leashed, more=asked, disable_dropout=disabled)
    kleash.attach(trainer, out=tmp_path / "run")
    said += [str(warning.message) for warning in recwarn]
    assert sum("trained with dropout (Dropout.p is 0.3)" in each for each in said) == (not disabled)


@pytest.mark.parametrize("controller", ["fixed", FixedBeta(beta=0.3)])
def test_masked_responses_have_no_kl_and_the_last_step_is_written(trl, folder, tmp_path, controller, caplog):
    """All of them are truncated here; and the trainer logs every tenth step, of which there are two."""
    trainer = grpo(trl, folder, tmp_path, mask_truncated_completions=True, logging_steps=10)
    log = kleash.attach(trainer, target_nats=1.0, controller=controller, out=tmp_path / "run")
    trainer.train()
    (step,), settings = read_steps(tmp_path / "run"), log.folder.header().settings
    assert step.step == log.result_of_run.steps == 2 and step.metrics["response/cut_share"] == 1
    assert step.metrics["kl/target"] == settings["target_nats"] == 1.0, "that of the alerts"
    assert step.metrics["beta"] == 0.3 and step.metrics["reward/score"] and step.metrics["trainer/kl"] == 0
    assert not step.metrics.keys() & {"kl/exact_per_sequence", "policy/entropy", "policy/clip_share"}
    assert "mask_truncated_completions leaves nothing" in step.events[0] and step.events[0] in caplog.text


@pytest.mark.parametrize("method", ["_compute_loss", "compute_loss"])
@pytest.mark.parametrize("by_trl", [True, False])
def test_own_loss_is_measured_in_a_pass_of_trl(trl, folder, tmp_path, caplog, by_trl, method):
    """A policy gradient, whose pass is the second one, without entropies; or the network's own."""
    from kleash.integrations.trl.forward_capture import whole_rows

    kls = []

    def loss(trainer, model, inputs, **_):
        run, at = trainer._get_per_token_logps_and_entropies, inputs["completion_ids"].unsqueeze(-1)
        trainer._metrics["train"]["kl"] += [0.1] * (trainer.beta != 0)
        whole, logq = (whole_logp(one, inputs, 1.0) for one in (model, trainer.ref_model))
        kls.append((whole.exp() * (whole - logq)).sum(-1)[inputs["completion_mask"].bool()].mean().item())
        logp = whole.gather(-1, at)[..., 0]
        for one in (trainer.ref_model, model) if by_trl else ():
            logp = run(one, *whole_rows(inputs))[0]
        return -(logp * inputs["advantages"].unsqueeze(1) * inputs["completion_mask"]).mean()

    theirs = type("Theirs", (trl.package.GRPOTrainer,), {method: loss})
    trainer = make(theirs, trl.package.GRPOConfig, str(folder), tmp_path / "trl")
    moved(trainer.model, 0.1)
    log = kleash.attach(trainer, target_nats=1e-3, out=tmp_path / "run")
    trainer.train()
    first, second = read_steps(tmp_path / "run")
    assert log.algorithm == "grpo" and len(read_samples(tmp_path / "run")) == 8
    assert (first.metrics.get("kl/k3", 0.0) > 0) == (trainer.beta > 0.3) == by_trl
    assert not {"policy/entropy", "policy/clip_share"} & first.metrics.keys() and not second.events
    said = ("step 1: the loss of Theirs makes no pass", "'kl/k3_per_sequence' was logged in 2 steps")
    assert {by_trl} == {sentence not in caplog.text for sentence in said} == {not first.events}
    generating = {"_generate_and_score_completions": trl.package.GRPOTrainer._generate_and_score_completions}
    for own in ({}, {method: loss}, generating):
        bases = (trl.LeashedGRPO,) if own else (import_module("kleash.integrations.trl").GRPOLeash, theirs)
        trainer = make(type("Leashed", bases, own), trl.package.GRPOConfig, str(folder), tmp_path / "trl")
        moved(trainer.model, 0.1)
        if by_trl and method == "_compute_loss" and not own:
            trainer.train()
            trained = [entry["kl"] for entry in trainer.state.log_history if "kl" in entry]
            assert trained == pytest.approx(kls[2:], rel=1e-4) and min(trained) > 0.1
        else:
            with pytest.raises(CannotRunError, match=r"of Leashed (makes no pass|does not call that of)"):
                trainer.train()


SPREADS = [([[0.1, 0.3], [0.2, 0]], (1, 0, 2)), ([[None, 0.5]], (1, 0, 0)), ([[None] * 2], (0, None, 0))]


@pytest.mark.parametrize(("parts", "spreads"), SPREADS, ids=["KL in the reward", "one score", "none"])
def test_only_scores_have_a_spread(trl, folder, tmp_path, parts, spreads):
    of_parts = [lambda prompts, part=part, **_: part * (len(prompts) // 2) for part in parts]
    more = {"kl": "k1", "kl_place": "reward", "reward_funcs": of_parts}
    trainer = grpo(trl, folder, tmp_path, scale_rewards="none", more=more)
    moved(trainer.model, 0.1)
    compute = trainer._compute_loss
    trainer._compute_loss = lambda model, inputs: compute(model, {**inputs})  # as some subclasses
    kleash.attach(trainer, out=tmp_path / "run")
    trainer.train()
    for metrics in (step.metrics for step in read_steps(tmp_path / "run")):  # the functions have one name
        found = metrics["reward/zero_std_share"], metrics.get("reward/score_std")
        assert (*found, sum("reward/part/" in name for name in metrics)) == spreads
        assert metrics["kl/exact_per_token"] > 0


def test_rewards_of_ones_own_are_those_that_trl_logs(trl, folder, tmp_path):
    def generate(trainer, inputs):
        recorded = vars(trainer).pop("_calculate_rewards")
        output = trl.package.GRPOTrainer._generate_and_score_completions(trainer, inputs)
        trainer._calculate_rewards = recorded
        return output

    own = {"_generate_and_score_completions": generate, PASS: as_trl}
    theirs = type("Theirs", (trl.package.GRPOTrainer,), own)
    trainer = make(theirs, trl.package.GRPOConfig, str(folder), tmp_path / "trl")
    kleash.attach(trainer, out=tmp_path / "run")
    trainer.train()
    steps = read_steps(tmp_path / "run")
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [step.metrics["reward/score"] for step in steps] == [entry["reward"] for entry in logged]
    assert steps[1].metrics["kl/k3"] == pytest.approx(logged[1]["kl"], rel=1e-4) != 0
    prompts = {each.sample.prompt for each in read_samples(tmp_path / "run")}
    assert prompts <= {*trainer.train_dataset["prompt"]}


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
@pytest.mark.parametrize("asked", [{"kl": "k3"}, {"kl": "k1", "kl_place": "reward"}], ids=str)
def test_a_batch_of_several_generations_has_its_own_numbers(trl, folder, tmp_path, kind, asked):
    """As of dynamic sampling: two rows of each of two generations."""
    base, leash = getattr(trl.package, f"{kind}Trainer"), import_module("kleash.integrations.trl")

    def generate(trainer, inputs):
        first, second = (base._generate_and_score_completions(trainer, inputs) for _ in range(2))
        return {name: torch.cat([x[:2], second[name][2:]]) if x.dim() else x for name, x in first.items()}

    theirs = type("Theirs", (base,), {"_generate_and_score_completions": generate})
    leashed = type("Leashed", (getattr(leash, f"{kind}Leash"), theirs), {})
    settings = {"num_iterations": 2} | ({"scale_rewards": "none"} if kind == "GRPO" else {})
    config = getattr(trl.package, f"{kind}Config")
    trainer = make(leashed, config, str(folder), tmp_path, config_of=settings, **asked)
    moved(trainer.model, 0.2)
    kleash.attach(trainer, out=tmp_path / "run")
    batch = trainer._generate_and_score_completions([{"prompt": "the sea was"}] * 4)
    at, mask = batch["completion_ids"].unsqueeze(-1), batch["completion_mask"].bool()
    both = (whole_logp(one, batch, 1.0).detach() for one in (trainer.model, trainer.ref_model))
    logp, logq = (whole.gather(-1, at)[..., 0] for whole in both)
    torch.testing.assert_close(batch["old_per_token_logps"][mask], logp[mask])
    texts = trainer.processing_class.batch_decode(batch["completion_ids"], skip_special_tokens=True)
    found = [(one["response"], round(one["score"], 6)) for one in batch["kleash_responses"]]
    assert found == list(zip(texts, score(texts), strict=True))
    kl = torch.where(mask, logp - logq, 0.0).sum(-1).tolist() if "kl_place" in asked else []
    assert [nats for _, nats, _ in trainer._kl_rows["train"]] == pytest.approx(kl, rel=1e-4)


@pytest.mark.parametrize("turns", [["The sea"], ["was", "The sea"]])
def test_equal_responses_to_two_prompts_have_rewards_of_their_own(trl, folder, tmp_path, turns):
    """A subclass rewards those to two prompts, and leaves those to the first out; messages lack what is parsed."""
    prompts = [[{"content": turn} for turn in (*turns[:-1], last)] for last in ("The", turns[-1])]

    def generate(trainer, inputs):
        for prompt in prompts:
            trainer._calculate_rewards([{"prompt": prompt}] * 4, [prompt] * 4, [[]] * 4, [[2, 1]] * 4)
        ids = torch.tensor([trainer.processing_class(" sea ".join(turns))["input_ids"]] * 4)
        response = {"completion_ids": [[2, 1]] * 4, "tool_mask": [[1, 0]] * 4}  # " was", and what a tool says
        return {"prompt_ids": ids, **{name: torch.tensor(rows) for name, rows in response.items()}}

    theirs = type("Theirs", (trl.package.GRPOTrainer,), {"_generate_and_score_completions": generate})
    rewards = [lambda prompts, **_: [float(len(prompt[-1]["content"])) for prompt in prompts]]
    trainer = make(theirs, trl.package.GRPOConfig, str(folder), tmp_path / "trl", reward_funcs=rewards)
    trainer.processing_class = metaspace_tokenizer()
    kleash.attach(trainer, out=tmp_path / "run")
    found = trainer._generate_and_score_completions([])["kleash_responses"]
    expected = {"prompt": "\n".join(turns), "response": " was", "score": 7}  # which decodes as "was"
    assert len(found) == 4 and all(expected.items() <= one.items() for one in found)


def test_reused_responses_show_the_kl_of_their_updates(trl, folder, tmp_path):
    """KL(before || after) by k3 of the sampled tokens, from the two networks, in float64."""
    settings = {"num_generations": 4, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    trainer = grpo(trl, folder, tmp_path, num_iterations=2, learning_rate=1e-2, **settings)
    log, batches, networks = kleash.attach(trainer, out=tmp_path / "run"), [], []
    generate, loss = trainer._generate_and_score_completions, trainer._compute_loss

    def keep(inputs):
        batches.append(generate(inputs))
        return batches[-1]

    def copy_and_lose(model, inputs):
        networks.append(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval())
        networks[-1].load_state_dict(model.state_dict())
        return loss(model, inputs)

    trainer._generate_and_score_completions, trainer._compute_loss = keep, copy_and_lose
    trainer.train()
    (output,) = batches
    at, mask = output["completion_ids"].unsqueeze(-1), output["completion_mask"].bool()
    before, _, _, after = (whole_logp(one, output, 1.0).gather(-1, at)[..., 0][mask] for one in networks)
    ratio = after - before
    first, second = read_steps(tmp_path / "run")
    assert second.metrics["kl/update"] == pytest.approx((ratio.exp() - 1 - ratio).mean().item(), rel=1e-3)
    assert "kl/update" not in first.metrics and "reward/score" not in second.metrics
    assert dict(log.result_of_run.metrics) == {**first.metrics, **second.metrics}, "and of its responses"
    assert None not in trainer.state.log_history[0].values(), "the errors of one prompt are NaN"
    assert repr(log) == f"run log of grpo in {tmp_path / 'run'}, at step 2"


@pytest.mark.parametrize("leashed", [False, True])
@pytest.mark.parametrize("prompts", [None, PROMPTS], ids=["prompts of the training", "prompts given"])
def test_kl_to_the_start_is_beside_that_to_a_reference_that_moves(trl, folder, tmp_path, leashed, prompts):
    """The reference becomes the policy after each step, so that the KL to it is 0 before each update."""
    moves = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 1.0}
    moves |= {"learning_rate": 1e-2, "chat_template_kwargs": {"mood": "calm"}}
    trainer = grpo(trl, folder, tmp_path, leashed=leashed, **moves)
    data = prompts and type(trainer.train_dataset).from_dict({"prompt": prompts})
    trainer.tools = [torch.initial_seed]
    log = kleash.attach(trainer, monitor=data, out=tmp_path / "run")
    shown = str(next(log._callbacks(DriftMonitor)).prompts[0])
    assert prompts or ("{'mood': 'calm'}" in shown and "'name': 'initial_seed'" in shown)
    trainer.tools = None
    trainer.train()
    first, last = (step.metrics for step in read_steps(tmp_path / "run"))
    assert first["kl/k3"] == last["kl/k3"] == first["drift/kl_per_sequence"] == 0
    start = AutoModelForCausalLM.from_pretrained(folder)
    of_start = DriftMonitor(prompts=prompts or trainer.train_dataset["prompt"][:32], reference=start)
    drift = of_start.attach(trainer).measure()
    assert last["drift/kl_per_sequence"] == pytest.approx(drift.per_sequence.value, rel=1e-5) != 0
    other = grpo(trl, folder, tmp_path, leashed=leashed, **moves)
    other.environment_factories = {None: object}
    log = kleash.attach(other, monitor=data, out=tmp_path / "other")
    assert len([*log._callbacks(DriftMonitor)]) == (prompts is not None), "an environment makes the prompts"


@pytest.mark.parametrize("kind", ["DPO", "KTO"])
def test_dpo_and_kto_are_steered_by_the_monitor_whose_time_is_apart(trl, folder, tmp_path, kind):
    from datasets import Dataset

    rows = [{"prompt": prompt, "chosen": " and went", "rejected": " or not"} for prompt in PROMPTS] * 2
    if kind == "KTO":
        rows = [{"prompt": at, "completion": x, "label": x == " a"} for at in PROMPTS for x in (" a", " b")]
    settings = {**QUIET, "beta": 0.5, "max_steps": 4, "logging_steps": 1, "bf16": False}
    trainer_class, config = (getattr(trl.package, f"{kind}{what}") for what in ("Trainer", "Config"))
    trainer = trainer_class(
        model=str(folder),
        args=config(str(tmp_path / "dpo"), per_device_train_batch_size=2, **settings),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    with pytest.raises(OptionError, match=f"{kind}Trainer draws no responses that TRL's passes measure"):
        kleash.attach(trainer, target_nats=1e-4, out=tmp_path / "run")
    log = kleash.attach(trainer, target_nats=1e-4, monitor=monitor(folder), out=tmp_path / "run")
    trainer.train()
    assert (log.algorithm, log.result_of_run.beta) == (kind.lower(), trainer.beta)
    steps = read_steps(tmp_path / "run")
    assert ["kl/exact_per_sequence" in step.metrics for step in steps] == [True, True, False, True]
    assert [step.metrics.get("time/drift", 0.0) > 0 for step in steps] == [True, True, False, True]
    assert steps[0].metrics["kl/exact_per_sequence"] == 0 < steps[3].metrics["kl/exact_per_sequence"]
    by_prompt = [*read_prompt_means(tmp_path / "run")][-1].means["kl/exact_per_sequence"].values()
    assert fmean(by_prompt) == pytest.approx(steps[3].metrics["kl/exact_per_sequence"])
    comparison = kleash.compare([tmp_path / "run"] * 2)
    assert comparison.differences[0].shared_prompts == 3 and "only 3 clusters" in comparison.summary()
    assert steps[2].metrics["beta"] > 0.5 and steps[1].beta_reason and not steps[2].beta_reason
    assert steps[3].metrics["pairs/margin"] > 0 and trainer.beta > 0.5
    assert next(log._callbacks(BetaController)).controller.noise > 0, "the errors are used"
    log.update_ref_model = True  # as a BEMACallback of TRL has
    moved(trainer.ref_model, 0.5)
    own, start = (DriftMonitor(prompts=PROMPTS, reference=at).attach(trainer) for at in (None, str(folder)))
    assert own.measure().per_sequence.value == start.measure().per_sequence.value > 0


PASS = "_get_per_token_logps_and_entropies"


def as_trl(self, *args, **named):
    return getattr(super(type(self), self), PASS)(*args, **named)


def as_ms_swift(self, model, model_inputs, batch, keep, **named):
    return getattr(super(type(self), self), PASS)(model, model_inputs, batch, keep, **named)


def as_unsloth(self, model, input_ids, attention_mask, keep, compute_efficient=False, *args, **named):
    return getattr(super(type(self), self), PASS)(model, input_ids, attention_mask, keep, *args, **named)


@pytest.mark.parametrize("own", [as_ms_swift, as_unsloth])
def test_grpo_with_passes_of_its_own_is_steered_by_the_monitor(trl, folder, tmp_path, caplog, own):
    kinds = trl.package.GRPOTrainer, trl.LeashedGRPO
    plain, leashed = (type("Own", (kind,), {PASS: own}) for kind in kinds)
    settings = {"max_steps": 4, "learning_rate": 1e-2}
    with pytest.raises(CannotRunError, match="Own computes its KL from TRL's passes"):
        make(leashed, trl.package.GRPOConfig, str(folder), tmp_path / "trl", config_of=settings)
    trainer = make(plain, trl.package.GRPOConfig, str(folder), tmp_path / "trl", config_of=settings)
    for more, reason in (({"target_nats": 1.0}, "Own draws no"), ({"rollouts_every": 1}, "Own has")):
        with pytest.raises(OptionError, match=reason):
            kleash.attach(trainer, out=tmp_path / "run", **more)
    asked = {"target_nats": 0.1, "monitor": monitor(folder), "out": tmp_path / "run"}
    trainer.add_callback(late := TrainerCallback())
    late.on_train_begin = lambda *_, **__: kleash.attach(trainer, **asked) and None
    trainer.train()
    *_, (last, alerts) = ((step.metrics, step.alerts) for step in read_steps(tmp_path / "run"))
    assert last["reward/score"] == trainer.state.log_history[-2]["reward"] and "Own passes" in caplog.text
    assert trainer.beta > last["beta"] > 0.3 and [alert.kind for alert in alerts] == ["update_too_large"]
    with folder_lock(tmp_path / "run", "it is open"):
        pass


@pytest.mark.parametrize("strategy", ["steps", "epoch"])
def test_plain_trainer_is_logged_resumed_and_not_overwritten(folder, tmp_path, caplog, strategy):
    def run(until, out="run", rows=3, accumulated=1, **resume):
        intervals = {"save_strategy": strategy, "save_steps": 3, "eval_strategy": strategy, "eval_steps": 3}
        intervals |= {"logging_steps": 500}  # the default, beside measurements every second step
        length = {"max_steps": until, "num_train_epochs": until}  # which a run that goes on may raise
        batch = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": accumulated}
        trainer = plain(folder, tmp_path, **batch, **length, **intervals)
        log = kleash.attach(trainer, monitor=monitor(folder), out=tmp_path / out)
        log.update_ref_model = True  # as a BEMACallback of TRL has
        trainer.train(**resume)
        return log

    run(3)
    steps = read_steps(tmp_path / "run")
    assert [step.step for step in steps] == [2, 3], "a checkpoint is of a step that is written"
    assert steps[1].metrics["loss"] > 0 and steps[1].metrics["kl/exact_per_token"] > 0
    assert "TRL's checkpoints lack the reference" not in caplog.text
    with pytest.raises(RunFolderError, match=r"a run already; go on with it with trainer\.train\(resume"):
        run(6)
    with pytest.raises(RunFolderError, match="run: global_batch_size was 3 and is now 6"):
        run(6, accumulated=2, resume_from_checkpoint=True)
    log = run(6, rows=1, accumulated=3, resume_from_checkpoint=True)  # as on three times as many processes
    steps = read_steps(tmp_path / "run")
    assert [step.step for step in steps] == [2, 3, 4, 6] and "lack the reference" in caplog.text
    assert [step.step for step in steps if "eval/loss" in step.metrics] == [3, 6]
    assert log.result_of_run.policy.endswith("checkpoint-6") and log.result_of_run.algorithm == "trainer"
    run(6, "later", resume_from_checkpoint=str(tmp_path / "hf" / "checkpoint-3"))
    assert [step.step for step in read_steps(tmp_path / "later")] == [4, 6], "begun without a log"


@pytest.mark.parametrize(("name", "scales"), [("loss", [1, torch.nan]), ("grad_norm", [torch.nan, 1])])
def test_nan_is_not_logged_as_the_mean_of_others(folder, tmp_path, name, scales):
    trainer = plain(folder, tmp_path)
    kleash.attach(trainer, out=tmp_path / "run")
    trainer.model.lm_head.weight.register_hook(lambda gradient: gradient * scales.pop())
    with pytest.raises(NonFiniteError, match=f"the {name} of step 2 is nan"):
        trainer.train()
    kleash.attach(again := plain(folder, tmp_path), out=tmp_path / "run")
    again.add_callback(early := TrainerCallback())
    early.on_step_begin = lambda *_, **__: again.evaluate() and None
    early.on_step_end = lambda _, at, to, **__: setattr(to, "should_training_stop", at.global_step == 3)
    again.train()  # in the folder that an error has closed
    steps = read_steps(tmp_path / "run")
    assert [step.step for step in steps] == [2, 3], "also where a callback stops it"
    assert not any("eval" in name for step in steps for name in step.metrics), "evaluations of a callback"


def test_alert_stops_a_run(trl, folder, tmp_path, caplog):
    more = {"eval_dataset": [{"prompt": "the sea was"}]}
    trainer = grpo(trl, folder, tmp_path, max_steps=6, eval_strategy="epoch", save_total_limit=1, more=more)
    moved(trainer.model, 0.5)
    log = kleash.attach(trainer, target_nats=1e-6, on_hacking="stop", out=tmp_path / "run")
    trainer.train()
    assert trainer.state.global_step == HackingMonitor().steps == log.result_of_run.steps
    assert log.result_of_run.stopped.startswith("the hacking monitor stopped it after step 3")
    for said in ("alert at step 3: KL", "over the last 3 measurements", "raise beta, or beta_max"):
        assert said in caplog.text and log.folder.header().settings["on_hacking"] == "stop"
    assert any("eval_reward" in entry for entry in trainer.state.log_history)
    assert trainer.args.metric_for_best_model is None, "else a best checkpoint would replace the last"
    assert not any("eval/reward" in step.metrics for step in read_steps(tmp_path / "run")), "of no step"


def test_evaluation_is_the_headline_and_the_best_checkpoint_is_named(trl, folder, tmp_path, capsys):
    from datasets import Dataset

    held_out = Dataset.from_dict({"prompt": ["the sea was", "when the rain"]})
    evaluated = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4}
    saved = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1, "load_best_model_at_end": True}
    settings = {"logging_steps": 3, "learning_rate": 3e-2, "eval_on_start": True, **evaluated, **saved}
    trainer = grpo(trl, folder, tmp_path, max_steps=4, **settings, more={"eval_dataset": held_out})
    log = kleash.attach(trainer, out=tmp_path / "run")
    seen = []
    compute = trainer._compute_loss

    def keep(model, inputs):
        if not model.training:
            logp, logq = (whole_logp(one, inputs, 1.0) for one in (model, trainer.ref_model))
            mask = inputs["completion_mask"].bool()
            seen.append(torch.where(mask, (logp.exp() * (logp - logq)).sum(-1), 0.0).sum(-1))
        return compute(model, {**inputs})  # a copy, as some subclasses give

    trainer._compute_loss = keep
    trainer.train()
    steps = read_steps(tmp_path / "run")
    assert [step.step for step in steps] == [0, 2, 3, 4], "0 is before the first step"
    evaluated = [step.metrics for step in steps if "eval/reward" in step.metrics]
    logged = [entry for entry in trainer.state.log_history if "eval_reward" in entry]
    assert [one["eval/reward"] for one in evaluated] == pytest.approx([one["eval_reward"] for one in logged])
    assert [entry["eval_kl/per_token"] > 0 for entry in logged] == [False, True, True]
    for metrics, sums in zip(evaluated, seen, strict=True):
        assert metrics["eval/kl_per_sequence"] == pytest.approx(sums.mean().item(), rel=1e-4)
    start, *trained = (one["eval/reward"] for one in evaluated)
    assert "eval/reward_change" not in evaluated[0]
    assert evaluated[1]["eval/reward_change"] == pytest.approx(trained[0] - start) != 0
    assert evaluated[2]["eval/reward_change"] == pytest.approx(trained[1] - max(start, trained[0])) != 0
    best = 4 if trained[1] > trained[0] else 2
    result = log.result_of_run
    assert result.best.endswith(f"checkpoint-{best}")
    assert dict(result.held_out).items() <= evaluated[2].items()
    assert f"; last held-out reward {result.held_out['eval/reward']:.2f}"[:-1] in summarize(result).headline
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert page.index("Held-out reward") < page.index(">Reward<") and f"checkpoint-{best}" in page
    sets = {"sea": held_out.select([0]), "rain": held_out.select([1])}
    longer = grpo(trl, folder, tmp_path, max_steps=6, **settings, more={"eval_dataset": sets})
    kleash.attach(longer, out=tmp_path / "run")
    predicting = TrainerCallback()
    predicting.on_step_end = lambda *_, **__: longer.predict(longer.train_dataset.select([1])) and None
    longer.add_callback(predicting)
    longer.train(resume_from_checkpoint=True)
    last = read_steps(tmp_path / "run")[-1].metrics
    means = [*read_prompt_means(tmp_path / "run")][-1].means
    assert len(means["eval/reward"]) == 2 and "reward/score" in means, "none that were predicted"
    best_before = max(one["eval/reward"] for one in evaluated)
    assert last["eval/reward_change"] == pytest.approx(last["eval/reward"] - best_before), "resumed"


def test_a_monitor_that_stops_a_run_says_why(folder, tmp_path):
    watch, saved = monitor(folder, stop_at_nats=1e-9), {"save_strategy": "steps", "save_steps": 2}
    log = kleash.attach(plain(folder, tmp_path, **saved), monitor=watch, out=tmp_path / "run")
    log.trainer.train()
    assert log.result_of_run.steps == 2 and log.result_of_run.stopped == watch.stopped is not None
    watch.stop_at_nats = None
    log.trainer.train(resume_from_checkpoint=True)
    assert log.result_of_run.steps == 4 and log.result_of_run.stopped is None


@pytest.mark.parametrize("full_at", [1, 3])
def test_a_training_that_begins_again_with_smaller_batches_has_one_log(folder, tmp_path, caplog, full_at):
    def train(self, *args):
        calls.append(self._train_batch_size)
        if len(calls) == full_at:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return Trainer.training_step(self, *args)

    calls, kind = [], type("Full", (Trainer,), {"training_step": train})
    trainer = plain(folder, tmp_path, kind, auto_find_batch_size=True, logging_steps=1)
    kleash.attach(trainer, out=tmp_path / "run")
    trainer.train()
    found = [(step.step, step.metrics["loss"]) for step in read_steps(tmp_path / "run")]
    logged = [(entry["step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    assert found == logged and len(logged) == 4 and calls[0] > calls[-1]
    assert "begins again after step 0 with a smaller batch" in caplog.text


BASE = type("_BaseTrainer", (Trainer,), {"__module__": "trl.trainer"})
Mixing = type("Mixing", (BASE,), {"beta": 0.5})
ReadOnly = type("ReadOnly", (Trainer,), {"beta": property(lambda self: 0.1)})
SFT = type("SFTTrainer", (Mixing,), {"__module__": "trl.trainer"})  # by its name and module
TRLS = [type(name, (SFT,), {"__module__": "trl.trainer"}) for name in ("GKDTrainer", "DPOTrainer")]


@pytest.mark.parametrize("kind", [Trainer, *TRLS, ReadOnly, Mixing, type("UnslothSFTTrainer", (Mixing,), {})])
def test_controller_of_a_beta_that_prices_no_kl_is_refused(folder, tmp_path, kind):
    trainer = plain(folder, tmp_path, kind)
    trainer.args.loss_type = ["sft"] if kind is TRLS[1] else None  # of DPO
    with pytest.raises(OptionError, match=f"{kind.__name__} has no beta that is the price of a KL"):
        kleash.attach(trainer, target_nats=0.1, out=tmp_path / "run")
    trainer.model = torch.nn.Sequential(trainer.model)  # without a configuration
    log = kleash.attach(trainer, out=tmp_path / "run")
    name = kind.__name__.removeprefix("Unsloth").removesuffix("Trainer")
    assert log.algorithm == (name.lower() or "trainer")
    assert not any(isinstance(one, BetaController) for one in trainer.callback_handler.callbacks)


@pytest.mark.parametrize(
    ("asked", "error", "reason"),
    [
        ({"on_hacking": "pray"}, OptionError, "--on-hacking must be one of warn, .*; it is 'pray'"),
        ({"on_hacking": "tighten"}, OptionError, "doubles the beta of a controller; give target_nats"),
        ({"per": "response"}, OptionError, "per is 'response'; there are sequence, token"),
        ({"report_to": "wandb"}, OptionError, "must be a list of texts; it is 'wandb'"),
        ({"controller": "hope"}, UnknownNameError, "no beta controller is called 'hope'"),
        ({"controller": "dual"}, OptionError, "the controller dual steers to a target; give target_nats"),
        ({"controller": PIDBeta(beta=0.1, target_nats=1.0), "target_nats": 2.0}, OptionError, "of its own"),
        ({"reference": "shipped:reference"}, OptionError, "is what a monitor of prompts compares with"),
        ({"monitor": PROMPTS}, OptionError, "has no adapter whose base .*give reference=, the folder"),
    ],
)
def test_invalid_options_are_refused_before_anything_is_attached(folder, tmp_path, asked, error, reason):
    trainer = plain(folder, tmp_path)
    before = list(trainer.callback_handler.callbacks)
    with pytest.raises(error, match=reason):
        kleash.attach(trainer, out=tmp_path / "run", **asked)
    assert trainer.callback_handler.callbacks == before and not (tmp_path / "run").exists()
    kleash.attach(trainer, out=tmp_path / "run")
    taught = plain(folder, tmp_path)
    taught.teacher_model = taught.model
    reasons = {trainer: "has a run log already", trainer.model: "it is of type", taught: "one network"}
    for given, reason in reasons.items():
        with pytest.raises(OptionError, match=reason):
            kleash.attach(given, out=tmp_path / "other")


def test_a_run_without_a_step_is_an_error(trl, folder, tmp_path):
    for trainer in (
        plain(folder, tmp_path, per_device_train_batch_size=16, dataloader_drop_last=True),
        grpo(trl, folder, tmp_path, generation_batch_size=64),
        plain(folder, tmp_path, max_steps=-1, num_train_epochs=0),
    ):
        kleash.attach(trainer, out=tmp_path / "run")
        with pytest.raises(CannotRunError, match=r"took no step.* make its batches smaller"):
            trainer.train()
