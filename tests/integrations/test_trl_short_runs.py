"""Short real runs of TRL's trainers with the KL taken over."""

import math
from itertools import product

import pytest
import torch
import trl_batches
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_models import tiny_adapter
from transformers import AutoModelForCausalLM
from trl_batches import PROMPT, TIME, TRL_MARKS, batch, config, counted, make, moved, score, whole_logp

from kleash.auditing.targets.packages import quiet
from kleash.errors import CannotRunError, ModelError, OptionError

pytestmark = TRL_MARKS
K1_REWARD = {"kl": "k1", "kl_place": "reward", "kl_scope": "sequence"}
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}


@pytest.fixture
def made(trl, folder, tmp_path):
    """Makes a trainer of TRL with kleash's KL, of a kind, with settings of its configuration."""

    def build(kind="GRPO", settings=None, model=None, trainer=None, **more):
        kind_of_trainer = getattr(trl, trainer or f"Leashed{kind}Trainer")
        model = str(folder) if model is None else model
        return make(
            kind_of_trainer, getattr(trl, f"{kind}Config"), model, tmp_path, config_of=settings, **more
        )

    return build


def steps(trainer):
    return [entry for entry in trainer.state.log_history if "kl" in entry]


@pytest.mark.parametrize(
    ("kind", "asked", "settings"),
    [
        ("GRPO", {}, {"loss_type": "grpo", "gradient_accumulation_steps": 2}),
        (
            "GRPO",
            {"kl_scope": "sequence", "kl_cap": 2.0},
            {"num_iterations": 2, "gradient_checkpointing": True},
        ),
        ("GRPO", {"kl": "k3", "kl_scope": "sequence"}, {"loss_type": "dr_grpo"}),
        ("GRPO", {"kl": "k1", "kl_place": "reward"}, {"scale_rewards": "none"}),
        *(("RLOO", asked, {}) for asked in ({}, K1_REWARD)),
        ("RLOO", {"kl_scope": "sequence"}, {"num_iterations": 2}),
    ],
)
def test_a_run_logs_kl(made, kind, asked, settings):
    trainer = made(kind, settings, **asked)
    before = trainer.model.model.layers[0].mlp.up_proj.weight.detach().clone()
    trainer.train()
    first, second = steps(trainer)
    assert first["kl"] == 0 and second["kl"] != 0 and abs(second["kl/per_sequence"]) < 5
    assert second["beta"] == 0.3 and trainer.beta == 0.3
    assert not torch.equal(before, trainer.model.model.layers[0].mlp.up_proj.weight)
    assert ("kl/effective_share" in second) is ("num_iterations" in settings)
    if not settings:  # lengths differ, so only a sum over each response gives both
        assert second["kl"] == pytest.approx(second["kl/per_sequence"], rel=1e-5)
        length = second["completions/mean_length"]
        assert second["kl/per_sequence"] == pytest.approx(second["kl/per_token"] * length, rel=1e-4)


@pytest.mark.parametrize(("kind", "loss_type"), [("GRPO", "grpo"), ("GRPO", "dapo"), ("RLOO", None)])
def test_gradient_accumulation_gives_the_same_update(made, folder, kind, loss_type):
    """Rewards are all alike, so that the KL is all there is to the update; its size shows in the gradient's norm."""
    norms, weights = [], []
    for parts in (1, 2):
        settings = {"loss_type": loss_type} if loss_type else {}
        settings |= {"gradient_accumulation_steps": parts, "per_device_train_batch_size": 4 // parts}
        reference = moved(AutoModelForCausalLM.from_pretrained(folder), 0.2)
        rewards = [lambda completions, **_: [0.0] * len(completions)]
        trainer = made(kind, {**settings, "max_steps": 1}, reference=reference, reward_funcs=rewards)
        trainer.train()
        (only,) = steps(trainer)
        norms.append((only["grad_norm"], only["kl"], only["loss"]))
        weights.append([weight.detach().clone() for weight in trainer.model.parameters()])
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)
    assert norms[0][2] == pytest.approx(0.3 * norms[0][1], rel=1e-4), "the loss is beta times what is logged"
    for one, other in zip(*weights, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize(
    ("kind", "asked"), [*product(("GRPO", "RLOO"), ({}, K1_REWARD)), ("GRPO", {"kl": "k3"})]
)
def test_kl_of_beta_0_is_logged_and_not_trained(made, kind, asked):
    """Two runs from one seed: TRL's own trainer ends at the same weights, and a copy with a beta logs the same KL."""
    no_scale = {"scale_rewards": "none"} if kind == "GRPO" else {}
    weights, kls = [], []
    for beta, is_ours in ((0.0, True), (0.0, False), (1e-9, True)):
        said = []
        more = asked if is_ours else {"trainer": f"{kind}Trainer"}
        trainer = made(kind, {"beta": beta, **no_scale}, said=said, **more)
        assert any("the KL is logged and not trained" in text for text in said) is (is_ours and beta == 0)
        trainer.train()
        weights.append([weight.detach().clone() for weight in trainer.model.parameters()])
        kls.append([(entry["kl"], entry["kl/per_sequence"]) for entry in steps(trainer)])
    for ours, theirs in zip(weights[0], weights[1], strict=True):
        assert torch.equal(ours, theirs)
    assert kls[0][1][0] != 0 and not kls[1]
    for found, expected in zip(kls[0], kls[2], strict=True):
        assert found == pytest.approx(expected, rel=1e-2, abs=1e-9)


@pytest.mark.parametrize("asked", [K1_REWARD, {"kl": "k3"}])
def test_nan_at_padding_is_in_no_number_of_a_run(trl, made, monkeypatch, asked):
    """TRL multiplies log-probabilities by the mask, so its passes are masked before it sees them."""
    run = trl.RLOOTrainer._get_per_token_logps_and_entropies

    def poisoned(self, model, ids, mask, length, *args, **kwargs):
        logp, *others = run(self, model, ids, mask, length, *args, **kwargs)
        return torch.where(mask[:, -length:].bool(), logp, torch.nan), *others

    logs = []
    for poisons in (False, True):
        if poisons:
            monkeypatch.setattr(trl.RLOOTrainer, "_get_per_token_logps_and_entropies", poisoned)
        trainer = made("RLOO", **asked)
        trainer.train()
        logs.append([(entry["kl"], entry["loss"], entry["reward"]) for entry in steps(trainer)])
    assert logs[1] == logs[0] and math.isfinite(sum(logs[0][1]))


@pytest.mark.parametrize("more", [{}, {"reference": object()}], ids=["trl", "given"])
def test_configuration_is_passed_by_keyword(trl, folder, tmp_path, more):
    with pytest.raises(OptionError, match="the configuration by keyword"):
        trl.LeashedGRPOTrainer(str(folder), [score], config(trl.GRPOConfig, tmp_path, beta=0.1), **more)


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_given_reference_replaces_trl_reference(made, folder, kind, monkeypatch):
    bare = moved(AutoModelForCausalLM.from_pretrained(folder, attention_dropout=0.5), 0.2).train()
    own = get_peft_model(bare, LoraConfig(**LORA, init_lora_weights=False)) if kind == "RLOO" else bare
    trainer = made(kind, {"temperature": 0.7, "max_steps": 1}, reference=own)
    assert trainer.ref_model is own and trainer.beta == trainer.args.beta == 0.3
    inputs = batch(tools=False)
    monkeypatch.setattr(bare, "get_output_embeddings", None)  # the reference's head is not read
    trainer._keep_reference(inputs)
    monkeypatch.undo()
    inputs["old_logps"] = torch.zeros(4)  # which RLOO's loss reads
    trainer._compute_loss(trainer.model, inputs)
    logp, logq = (whole_logp(model, inputs, 0.7).detach() for model in (trainer.model, own))
    kl = (logp.exp() * (logp - logq)).sum(-1)[counted(inputs)]
    found = {name: column[counted(inputs)] for name, column in trainer.token_columns.items()}
    torch.testing.assert_close(found["kleash_token_kl"], kl, rtol=1e-3, atol=1e-5)
    at = inputs["completion_ids"].unsqueeze(-1)
    for name, whole in (("kleash_policy_logps", logp), ("ref_per_token_logps", logq)):
        torch.testing.assert_close(found[name], whole.gather(-1, at)[..., 0][counted(inputs)])
    trainer.train()
    (first,) = steps(trainer)
    assert first["kl/per_token"] > 0.01
    assert not any(weight.requires_grad for weight in own.parameters())


@pytest.mark.filterwarnings("ignore")  # of torch, in what it compiles
def test_exact_kl_under_autocast_or_compiled_is_that_of_float32(made, folder):
    """``bf16=True`` is TRL's default. What is compiled in place runs the old policy's pass in evaluations, too."""
    kls, trainers = [], []
    for bf16, is_compiled in ((False, False), (True, False), (False, True)):
        network, reference = (moved(AutoModelForCausalLM.from_pretrained(folder), by) for by in (0, 0.5))
        if is_compiled:
            network.compile(backend="eager")
            # it may round otherwise, so that its head is not read from what is compiled
            reference = torch.compile(reference, backend=lambda graph, _: trainers[2] and graph.forward)
        settings = {"bf16": bf16, "num_iterations": 2, "eval_strategy": "steps", "eval_steps": 1}
        more = {"rollout_func": rollout, "eval_dataset": [{"prompt": "the sea was"}] * 2}
        trainers.append(made("GRPO", settings, network, reference=reference, **more))
        trainers[-1].train()
        kls.append([entry["kl/per_token"] for entry in steps(trainers[-1])])
    assert min(kls[0]) > 0.01 and kls[1] == pytest.approx(kls[0], rel=0.02)
    assert kls[2] == pytest.approx(kls[0], rel=1e-5)


@pytest.mark.parametrize(("kind", "by_trl"), [("GRPO", True), ("RLOO", True), ("GRPO", False)])
def test_kl_is_to_the_reference_at_generation_though_it_moves(made, folder, kind, by_trl):
    """The second update on the same responses, after TRL, or a user's callback, has mixed the policy into it."""
    sync = {"sync_ref_model": by_trl, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.6}
    trainer = made(kind, {"num_iterations": 2, "learning_rate": 1e-2, **sync})
    if not by_trl:
        from trl.trainer.callbacks import SyncRefModelCallback

        trainer.add_callback(SyncRefModelCallback(trainer.ref_model, trainer.accelerator))
    moved(trainer.model, 0.1)
    reference = AutoModelForCausalLM.from_pretrained(folder)
    expected, compute = [], trainer._compute_loss

    def keep(model, inputs):
        logp, logq, moved_logq = (
            whole_logp(one, inputs, 1.0).detach() for one in (model, reference, trainer.ref_model)
        )
        kls = [(logp.exp() * (logp - q)).sum(-1)[counted(inputs)].mean().item() for q in (logq, moved_logq)]
        expected.append(kls)
        return compute(model, inputs)

    trainer._compute_loss = keep
    trainer.train()
    for entry, (kl, _) in zip(steps(trainer), expected, strict=True):
        assert entry["kl/per_token"] == pytest.approx(kl, rel=1e-4)
    assert abs(expected[1][1] / expected[1][0] - 1) > 0.05, "the reference has moved"


def test_given_reference_is_refused_where_trl_moves_it_or_it_is_the_policy(made, folder):
    network = AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(OptionError, match="sync_ref_model=True moves the copy of the policy that TRL loads"):
        made("GRPO", {"sync_ref_model": True}, reference=network)
    with pytest.raises(OptionError, match="one network in memory"):
        made("GRPO", {}, model=network, reference=network)
    with pytest.raises(ModelError, match="the reference is of type str; give a transformers model"):
        made("GRPO", {}, reference=str(folder))


def test_reference_of_a_new_adapter_is_its_base(made):
    lora = LoraConfig(**LORA, lora_alpha=8)
    trainer = made("GRPO", {"gradient_checkpointing": True, "temperature": 0.7}, peft_config=lora)
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, weight in trainer.model.named_parameters():
            if "lora" in name:
                weight.add_(0.3 * torch.randn(weight.shape, generator=draw))
    inputs = batch()
    reference = trainer._forward_pass(inputs, reference=True)
    inputs |= {"ref_per_token_logps": reference.logp, "kleash_reference_hidden": reference.hidden}
    trainer._compute_loss(trainer.model, inputs)
    logp = whole_logp(trainer.model, inputs, 0.7)
    with trainer.model.disable_adapter():
        logq = whole_logp(trainer.model, inputs, 0.7)
    kl = (logp.exp() * (logp - logq)).sum(-1)[counted(inputs)].mean().item()
    assert trl_batches.logged(trainer, "kl/per_token") == pytest.approx(kl, rel=1e-4) and kl > 1e-3
    trainer.train()
    first, second = steps(trainer)
    assert first["kl"] > 0 and second["kl"] > 0


def test_reference_of_a_trained_adapter_is_its_initial_state(made, folder, tmp_path):
    adapter = tiny_adapter(tmp_path / "adapter", folder)
    with quiet():
        base = AutoModelForCausalLM.from_pretrained(folder)
        network = PeftModel.from_pretrained(base, str(adapter), is_trainable=True)
    trainer = made("RLOO", model=network)
    trainer.train()
    first, second = steps(trainer)
    assert first["kl"] == pytest.approx(0, abs=1e-6) and second["kl"] > 0


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"init_lora_weights": "pissa"}, "takes a part out of the weights of its base"),
        ({"layer_replication": [[0, 2], [0, 2]]}, "repeats layers of its base"),
        ({"bias": "lora_only"}, "has trained biases"),
    ],
)
@pytest.mark.usefixtures("unhooked")
def test_base_changing_adapter_requires_another_reference(made, folder, settings, reason):
    lora = LoraConfig(**LORA, **settings)
    for kind in ("GRPO", "RLOO"):
        with pytest.raises(ModelError, match=reason):
            made(kind, peft_config=lora)
    base = AutoModelForCausalLM.from_pretrained(folder)
    trainer = made("GRPO", peft_config=lora, reference=base)
    inputs = batch()
    reference = trainer._forward_pass(inputs, reference=True)
    fresh = whole_logp(AutoModelForCausalLM.from_pretrained(folder), inputs, 1.0)
    logp = fresh.gather(-1, inputs["completion_ids"].unsqueeze(-1))[..., 0]
    counts = counted(inputs)
    torch.testing.assert_close(reference.logp[counts], logp[counts], rtol=1e-5, atol=1e-5)


def test_adapted_head_is_refused(made):
    with pytest.raises(CannotRunError, match="the head of the policy has an adapter"):
        made("GRPO", peft_config=LoraConfig(**LORA, modules_to_save=["lm_head"]))


def rollout(prompts, trainer):
    """Responses of TIME tokens, two of which are tool output."""
    draw = torch.Generator().manual_seed(7)
    ids = torch.randint(3, 300, (len(prompts), PROMPT + TIME), generator=draw).tolist()
    return {
        "prompt_ids": [row[:PROMPT] for row in ids],
        "completion_ids": [row[PROMPT:] for row in ids],
        "logprobs": None,
        "env_mask": [[1, 1, 0, 0, 1, 1, 1] for _ in prompts],
    }


@pytest.mark.filterwarnings("ignore:.*rollout_func.*")
@pytest.mark.parametrize("scored", ["all", "all but one", "each token"])
def test_kl_in_reward_is_sum_of_k1_over_policy_tokens(trl, made, monkeypatch, scored):
    def reward(completions, **_):
        found = score(completions)
        return [None, *found[1:]] if scored == "all but one" else found

    generate = trl.GRPOTrainer._generate_and_score_completions

    def generate_with_columns(*args):  # of advantages, as a subclass may have them
        output = generate(*args)
        return output | {"advantages": output["advantages"].unsqueeze(1).expand(-1, TIME)}

    if scored == "each token":
        monkeypatch.setattr(trl.GRPOTrainer, "_generate_and_score_completions", generate_with_columns)
    settings = {"scale_rewards": "none", "temperature": 0.7}
    asked = {"kl": "k1", "kl_place": "reward"}
    trainer = made("GRPO", settings, reward_funcs=[reward], rollout_func=rollout, **asked)
    moved(trainer.model, 0.2)
    trainer.beta = 0.7  # as a controller sets it
    output = trainer._generate_and_score_completions([{"prompt": "the sea was"}] * 4)
    at = output["completion_ids"].unsqueeze(-1)
    u = sum(
        sign * whole_logp(model, output, 0.7).gather(-1, at)[..., 0].detach()
        for sign, model in ((1, trainer.model), (-1, trainer.ref_model))
    )
    kl = (u * torch.tensor([1, 1, 0, 0, 1, 1, 1])).sum(-1)
    texts = trainer.processing_class.batch_decode(output["completion_ids"], skip_special_tokens=True)
    rewards = torch.tensor(score(texts)) - 0.7 * kl
    if scored == "all but one":
        rewards[0] = torch.nan
    expected = (rewards.view(2, 2) - rewards.view(2, 2).nanmean(1, keepdim=True)).view(4, 1).nan_to_num(0)
    advantages = output["advantages"].view(4, -1)
    torch.testing.assert_close(advantages, expected.expand_as(advantages), rtol=1e-4, atol=1e-5)
    assert trl_batches.logged(trainer, "kl") == pytest.approx(kl.mean().item(), rel=1e-4)
    assert trl_batches.logged(trainer, "kl/per_token") == pytest.approx(kl.sum().item() / 20, rel=1e-4)
