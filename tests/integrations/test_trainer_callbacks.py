"""Callbacks in a plain transformers ``Trainer``, on a tiny Llama with dropout."""

import logging
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch
from tiny_models import save_tiny, tiny_adapter
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
    get_scheduler,
)

from kleash.auditing.targets.packages import quiet
from kleash.errors import ModelError, OptionError
from kleash.integrations.trainer import BetaController, DriftMonitor
from kleash.integrations.trainer.compat import halve_learning_rate
from kleash.leash import PIDBeta, ZieglerBeta
from kleash.models import Sampling, generate, live_model, load_pair
from kleash.sources.prompts import tokenise_prompts

PROMPTS = ["the sea was calm", "she counted the birds", "a long road"]
SHORT = Sampling(max_new_tokens=5, samples_per_prompt=2, temperature=0.8)

# What TRL and PEFT read that transformers has renamed, and what reentrant checkpointing says.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"), attention_dropout=0.2)


class Steered(Trainer):
    """A trainer with a beta, which reports what it was told to as its KL."""

    beta = 0.5
    kls = (0.1, 0.2, 0.4, 0.8, 0.4, 0.2, 0.1, 0.05)

    def log(self, logs, start_time=None):
        self.betas = [*getattr(self, "betas", ()), self.beta]
        super().log({**logs, "kl": self.kls[self.state.global_step - 1]}, start_time)


@pytest.fixture
def training(folder, tmp_path):
    def build(kind=Trainer, network=None, **more):
        network = AutoModelForCausalLM.from_pretrained(folder) if network is None else network
        settings = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
        settings |= {"logging_steps": 2, "max_steps": 6, "learning_rate": 3e-3, "seed": 3, **more}
        settings |= {"per_device_train_batch_size": 2, "output_dir": str(tmp_path / "run")}
        ids = torch.randint(3, 300, (8, 12), generator=torch.Generator().manual_seed(0)).tolist()
        rows = [{"input_ids": row, "labels": row} for row in ids]
        args, tokenizer = TrainingArguments(**settings), AutoTokenizer.from_pretrained(folder)
        return kind(model=network, args=args, train_dataset=rows, processing_class=tokenizer)

    return build


def monitor(folder, **more):
    settings = {"prompts": PROMPTS, "reference": str(folder), "every": 2, "sampling": SHORT}
    return DriftMonitor(**{**settings, **more})


def drifts(trainer, name="drift"):
    return [entry for entry in trainer.state.log_history if f"{name}/kl_per_token" in entry]


def dense_kl(trainer, folder):
    """(nats per token, mean over responses of their sum) on the monitor's answers, in float64."""
    network, pair = trainer.model.eval(), load_pair(str(folder), str(folder))
    answers = generate(live_model(network, trainer.processing_class), tokenise_prompts(PROMPTS, pair), SHORT)
    sums, tokens = [], 0
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    policy.load_state_dict(network.state_dict())
    for one in answers:
        ids = torch.tensor([[*one.prompt_ids, *one.response_ids]])
        with torch.no_grad():
            logp, logq = (
                (model(input_ids=ids).logits[0, len(one.prompt_ids) - 1 : -1] / 0.8).log_softmax(-1)
                for model in (policy, reference)
            )
        sums.append((logp.exp() * (logp - logq)).sum().item())
        tokens += len(one.response_ids)
    return sum(sums) / tokens, sum(sums) / len(sums)


def test_monitor_logs_exact_kl_with_standard_error(training, folder):
    trainer = training()
    watch = monitor(folder).attach(trainer)
    trainer.train()
    entries = drifts(trainer)
    assert [entry["step"] for entry in entries] == [0, 2, 4, 6]
    assert entries[0]["drift/kl_per_token"] == 0 and entries[0]["drift/kl_per_sequence"] == 0
    per_token, per_sequence = dense_kl(trainer, folder)
    assert entries[-1]["drift/kl_per_token"] == pytest.approx(per_token, rel=1e-4)
    assert watch.last.per_token.value == entries[-1]["drift/kl_per_token"]
    error, found = (entries[-1][f"drift/kl_per_sequence{end}"] for end in ("_error", ""))
    assert error > 0 and abs(found - per_sequence) < 5 * error + 0.5 * per_sequence
    assert watch.last.sequences == 6 and watch.last.per_token.clusters == entries[-1]["drift/prompts"] == 3
    assert entries[-1]["drift/tokens_per_sequence"] == watch.last.tokens / 6 and watch.last.tokens > 6
    assert 0 < entries[-1]["drift/seconds"] < 600
    assert any("only 3 clusters" in warning for warning in watch.last.per_token.warnings)


@pytest.mark.parametrize(
    ("adapted", "checkpointing"), [(False, False), (True, True)], ids=["full", "lora with checkpointing"]
)
def test_monitor_leaves_training_bit_identical(training, folder, tmp_path, adapted, checkpointing):
    weights, logs = [], []
    for watched in (False, True):
        network = lora(folder, tmp_path) if adapted else None
        trainer = training(network=network, gradient_checkpointing=checkpointing)
        if watched:
            reference = None if adapted else str(folder)
            monitor(folder, reference=reference, every=1).attach(trainer)
        trainer.train()
        assert trainer.model.training
        weights.append([p.detach().clone() for p in trainer.model.parameters()])
        rest = [entry for entry in trainer.state.log_history if "drift/kl_per_token" not in entry]
        logs.append([[entry.get(name) for name in ("loss", "grad_norm", "step")] for entry in rest])
        if watched:
            assert len(drifts(trainer)) == 7 and drifts(trainer)[-1]["drift/kl_per_token"] > 1e-4
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    assert logs[0] == logs[1] and len(logs[0]) == 4


def lora(folder, tmp_path):
    from peft import PeftModel

    adapter = tmp_path / "adapter"
    if not adapter.exists():
        tiny_adapter(adapter, folder, lora_dropout=0.3)
    with quiet():
        network = AutoModelForCausalLM.from_pretrained(folder)
        network.enable_input_require_grads()
        return PeftModel.from_pretrained(network, str(adapter), is_trainable=True)


def test_adapter_policy_and_base_reference_are_not_swapped(training, folder, tmp_path):
    short = {"sampling": Sampling(max_new_tokens=5)}
    one, other = (training(network=lora(folder, tmp_path)) for _ in range(2))
    by_adapter = monitor(folder, reference=None, **short).attach(one).measure()
    by_folder = monitor(folder, **short).attach(other).measure()
    assert by_adapter.per_token.value == pytest.approx(by_folder.per_token.value, rel=1e-5)
    adapter = monitor(folder, reference=lora(folder, tmp_path), **short)
    assert abs(adapter.attach(training()).measure().per_token.value / by_adapter.per_token.value - 1) > 0.01


@pytest.mark.usefixtures("unhooked")
def test_base_changed_by_its_adapter_is_refused_as_reference(training, folder):
    from peft import LoraConfig, get_peft_model

    def over(**settings):
        network = AutoModelForCausalLM.from_pretrained(folder)
        with quiet():
            lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **settings)
            return training(network=get_peft_model(network, lora))

    trainer = over(init_lora_weights="pissa")
    with pytest.raises(ModelError, match="takes a part out of the weights"):
        monitor(folder, reference=None).attach(trainer).measure()
    short = monitor(folder, sampling=Sampling(max_new_tokens=5))
    start = short.attach(over(init_lora_weights="pissa")).measure()
    assert 0 <= start.per_token.value < 1e-8  # what PiSSA starts from is the base, up to rounding
    trainer = over()
    trainer.model.get_base_model().model.norm.weight.requires_grad_(True)
    with pytest.raises(ModelError, match=r"1 tensors of it are trained, such as .*norm\.weight"):
        monitor(folder, reference=None).attach(trainer).measure()


def test_kl_budget_stops_training(training, folder, caplog):
    free = training()
    monitor(folder, every=1).attach(free)
    free.train()
    for per, is_first in (("token", True), ("sequence", False)):  # of several processes
        kls = [entry[f"drift/kl_per_{per}"] for entry in drifts(free)]
        budget, trainer = max(kls[:4]), training()
        trainer.is_world_process_zero = lambda is_first=is_first: is_first
        watch = monitor(folder, every=1, stop_at_nats=budget, per=per).attach(trainer)
        with caplog.at_level(logging.WARNING):
            trainer.train()
        beyond = next(step for step, kl in enumerate(kls) if kl > budget)
        assert trainer.state.global_step == beyond < 6
        assert [entry[f"drift/kl_per_{per}"] for entry in drifts(trainer)] == kls[: beyond + 1]
        assert f"nats per {per}, beyond the budget" in watch.stopped
        assert (watch.stopped in caplog.text) == is_first


@pytest.mark.parametrize(
    ("name", "value"), [("every", 0), ("per", "word"), ("stop_at_nats", 0.0), ("stop_at_nats", float("nan"))]
)
def test_invalid_monitor_options_are_refused(folder, name, value):
    with pytest.raises(OptionError, match=f"{name} is {value!r}"):
        monitor(folder, **{name: value})


def test_monitor_requires_reference_and_temperature(training, folder):
    trainer = training()
    with pytest.raises(OptionError, match="give reference="):
        monitor(folder, reference=None).attach(trainer).measure()
    with pytest.raises(OptionError, match="one network in memory"):
        monitor(folder, reference=trainer.model).attach(trainer).measure()
    with quiet():
        rewarding = training(network=AutoModelForSequenceClassification.from_pretrained(folder))
    with pytest.raises(ModelError, match="the policy is of type LlamaForSequenceClassification; give a"):
        monitor(folder, reference=None).attach(rewarding)
    with pytest.raises(OptionError, match="a temperature above 0"):
        monitor(folder, sampling=Sampling(temperature=0.0)).attach(trainer).measure()
    trainer.ref_model = AutoModelForCausalLM.from_pretrained(folder)
    assert monitor(folder, reference=None).attach(trainer).measure().per_token.value == 0
    trainer.processing_class = None
    with pytest.raises(ModelError, match="no processing_class"):
        monitor(folder).attach(trainer).measure()


def test_callback_must_be_attached_exactly_once(training, folder):
    trainer = training()
    trainer.add_callback(monitor(folder))
    with pytest.raises(OptionError, match=r"call DriftMonitor\(…\).attach\(trainer\)"):
        trainer.train()
    with pytest.raises(OptionError, match="this DriftMonitor knows no trainer"):
        monitor(folder).measure()
    watch = monitor(folder).attach(training())
    with pytest.raises(OptionError, match="attached already"):
        watch.attach(trainer)


def test_beta_follows_the_metric_and_is_logged(training):
    start = ZieglerBeta(beta=0.7, target_nats=0.2, horizon=20)
    trainer = training(Steered, gradient_accumulation_steps=2)
    controller = BetaController(start, metric="kl").attach(trainer)
    assert trainer.beta == 0.7
    trainer.train()
    seen = [Steered.kls[step - 1] for step in (2, 4, 6)]
    states = accumulate(seen, lambda before, kl: before.after(kl, sequences=2 * 2 * 2), initial=start)
    expected = [state.beta for state in states][1:]
    assert trainer.beta == controller.controller.beta == pytest.approx(expected[-1])
    assert trainer.betas[:3] == pytest.approx([0.7, *expected[:2]])
    logs = [entry for entry in trainer.state.log_history if "beta" in entry]
    assert [entry["beta"] for entry in logs] == pytest.approx(expected[:2])
    assert [entry["step"] for entry in logs] == [2, 4] and logs[0]["beta/event"] == 0


@pytest.mark.parametrize("is_first", [True, False])  # of several processes
def test_bounded_beta_step_is_logged(training, caplog, is_first):
    trainer = training(Steered)
    trainer.is_world_process_zero = lambda: is_first
    pid = PIDBeta(beta=0.5, target_nats=1e-3, integral=3.0, beta_max=0.8)
    BetaController(pid, metric="kl").attach(trainer)
    trainer.train()
    assert trainer.beta == 0.8 and ("beta 1 bounded to beta_max 0.8" in caplog.text) == is_first
    assert next(entry for entry in trainer.state.log_history if "beta" in entry)["beta/event"] == 1


def test_resumed_controller_continues(training):
    def run(until, resume, target=0.2):
        trainer = training(Steered, max_steps=until, save_strategy="steps", save_steps=4)
        controller = BetaController(PIDBeta(beta=0.5, target_nats=target), metric="kl").attach(trainer)
        trainer.train(resume_from_checkpoint=resume)
        return trainer, controller

    whole, expected = run(8, False)
    resumed, found = run(8, f"{whole.args.output_dir}/checkpoint-4")
    assert found.controller == expected.controller and resumed.beta == whole.beta != 0.5
    assert len(found.controller.levels) == 2
    assert resumed.betas[0] == pytest.approx(whole.betas[2])
    logs = [[entry for entry in trainer.state.log_history if "beta" in entry] for trainer in (whole, resumed)]
    assert logs[0] == logs[1], "also the beta that follows from the checkpoint's step"
    again, other = run(8, f"{whole.args.output_dir}/checkpoint-4", target=0.4)
    assert other.controller.target_nats == 0.4 and again.betas[0] == resumed.betas[0]


def test_trainers_without_usable_beta_are_refused(training):
    pid = PIDBeta(beta=0.5, target_nats=1.0)
    with pytest.raises(OptionError, match="Trainer has no number 'beta'"):
        BetaController(pid, metric="kl").attach(training())
    trainer = training(Steered)
    trainer.beta = 0.0
    with pytest.raises(OptionError, match="beta is 0, which no factor raises"):
        BetaController(pid, metric="kl").attach(trainer)
    trainer.beta = 0.1
    BetaController(pid, metric="kl").attach(trainer)
    with pytest.raises(OptionError, match="has a BetaController already"):
        BetaController(pid, metric="kl").attach(trainer)
    other = training(Steered, restore_callback_states_from_checkpoint=True)
    with pytest.raises(OptionError, match="restore_callback_states_from_checkpoint"):
        BetaController(pid, metric="kl").attach(other)


@pytest.mark.parametrize(
    ("kind", "more"), [("reduce_lr_on_plateau", {}), ("greedy", {"min_lr": 0.19, "reset_start": 1})]
)
def test_a_halved_learning_rate_moves_like_one_that_began_so(kind, more):
    """Also where GreedyLR, after a step at its minimum, begins again."""
    rates = []
    for first in (0.4, 0.2):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=first)
        scheduler = get_scheduler(kind, optimizer, scheduler_specific_kwargs={"patience": 0, **more})
        if first == 0.4:
            halve_learning_rate(SimpleNamespace(lr_scheduler=scheduler, optimizer=optimizer))
        for _ in range(4):
            scheduler.step(1.0)
            rates += [optimizer.param_groups[0]["lr"], *scheduler.get_last_lr()]
    assert rates[:8] == pytest.approx(rates[8:]) and len({*rates[8:]}) > 1
