"""The KL that TRL's trainers train, against dense recomputation and against TRL's own code."""

import itertools
from copy import deepcopy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_models import CONFIGS
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl_batches import TRL_MARKS, batch, counted, gradients, logged, make, moved, score, whole_logp

from kleash.errors import OptionError

pytestmark = TRL_MARKS

TYPES = ["grpo", "sapo", "bnpo", "dapo", "cispo", "vespo", "dr_grpo", "luspo"]
SCOPES = ("token", "sequence")
SUMS = ["bnpo", "dapo", "dr_grpo", "luspo"]
TEMPERATURE, LENGTH = 0.7, 7


@pytest.fixture
def grpo(trl, folder, tmp_path):
    def build(loss_type="dapo", *, accumulate=2, **more):
        settings = {"loss_type": loss_type, "temperature": TEMPERATURE, **more.pop("config_of", {})}
        settings["gradient_accumulation_steps"] = accumulate
        if loss_type == "vespo":
            settings["num_iterations"] = 2
        kind = more.pop("trainer", trl.LeashedGRPOTrainer)
        made = make(kind, trl.GRPOConfig, str(folder), tmp_path, config_of=settings, **more)
        moved(made.model, 0.2)
        return made

    return build


@pytest.fixture
def rloo(trl, folder, tmp_path):
    def build(**more):
        settings = {"temperature": TEMPERATURE, **more.pop("config_of", {})}
        made = make(trl.LeashedRLOOTrainer, trl.RLOOConfig, str(folder), tmp_path, config_of=settings, **more)
        moved(made.model, 0.2)
        return made

    return build


def shares(loss_type, mask, *, parts, items):
    """What a token adds to the loss of an update: each of TRL's formulas, written out."""
    mask = mask.double()
    rows = len(mask)
    if loss_type in ("grpo", "sapo"):
        return torch.stack([row / max(row.sum(), 1) for row in mask]) / rows / parts
    if loss_type == "bnpo":
        return mask / mask.sum() / parts
    if loss_type in ("dapo", "cispo", "vespo"):
        return mask / items
    if loss_type == "dr_grpo":
        return mask / (rows * LENGTH * parts)
    return mask / (rows * parts)


def dense(trainer, inputs):
    """(exact KL per token with its gradient, log p and log q of the sampled tokens), by whole distributions."""
    logp = whole_logp(trainer.model, inputs, TEMPERATURE)
    with torch.no_grad():
        logq = whole_logp(trainer.ref_model, inputs, TEMPERATURE)
    kl = (logp.exp() * (logp - logq)).sum(-1)
    at = inputs["completion_ids"].unsqueeze(-1)
    return kl, logp.gather(-1, at)[..., 0], logq.gather(-1, at)[..., 0]


def with_reference(trainer, inputs):
    """The batch, with what the trainer keeps of the reference's pass."""
    reference = trainer._forward_pass(inputs, reference=True)
    return {**inputs, "ref_per_token_logps": reference.logp, "kleash_reference_hidden": reference.hidden}


def both(trainer, inputs):
    """The whole loss and the policy's part of it alone: (gradients of the difference, value of the difference)."""
    with_kl = trainer._compute_loss(trainer.model, inputs)
    grads = gradients(with_kl, trainer.model)
    beta, trainer.beta = trainer.beta, 0.0
    without = trainer._compute_loss(trainer.model, inputs)
    trainer.beta = beta
    rest = gradients(without, trainer.model)
    return [a - b for a, b in zip(grads, rest, strict=True)], (with_kl - without).item()


def assert_close(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        atol = 2e-5 * float(b.abs().max() + 1e-3)
        torch.testing.assert_close(a, b.to(a.dtype), rtol=2e-3, atol=atol)


@pytest.mark.parametrize(
    ("loss_type", "settings"),
    [*((name, {}) for name in TYPES), *((name, {"steps_per_generation": 4}) for name in ("dapo", "bnpo"))],
)
def test_ratio_attached_k3_reproduces_trl_loss_and_gradient(trl, grpo, loss_type, settings):
    """k3 times the attached ratio is what TRL trains: same loss and gradient, whatever the loss type."""
    inputs = batch()
    theirs = grpo(loss_type, trainer=trl.GRPOTrainer, config_of=settings)
    ours = grpo(loss_type, kl="k3", kl_gradient="ratio_attached", config_of=settings)
    _, logp, logq = dense(ours, inputs)
    drift = torch.randn(logp.shape, generator=torch.Generator().manual_seed(0)) * 0.2
    inputs |= {"ref_per_token_logps": logq, "old_per_token_logps": logp.detach() + drift}
    expected = theirs._compute_loss(theirs.model, inputs)
    found = ours._compute_loss(ours.model, inputs)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert_close(gradients(found, ours.model), gradients(expected, theirs.model))
    found, expected = (one._compute_loss(one.model.eval(), inputs) for one in (ours, theirs))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("loss_type", TYPES)
def test_exact_kl_is_averaged_like_policy_term_and_logged_as_trained(grpo, loss_type):
    trainer = grpo(loss_type)
    inputs = with_reference(trainer, batch())
    if loss_type == "vespo":
        inputs["old_per_token_logps"] = dense(trainer, inputs)[1].detach()
    kl, _, _ = dense(trainer, inputs)
    mask = counted(inputs)
    steps, per_generation = 2, trainer.args.steps_per_generation
    items = inputs["num_items_in_batch"].item() * steps / per_generation
    weights = shares(loss_type, mask, parts=steps, items=items)
    expected = (weights * torch.where(mask, kl, 0.0)).sum()
    found, value = both(trainer, inputs)
    assert value == pytest.approx(0.3 * expected.item(), rel=1e-4)
    assert_close(found, gradients(0.3 * expected, trainer.model))
    assert logged(trainer, "kl") == pytest.approx(expected.item() * steps, rel=1e-4)
    assert logged(trainer, "kl/per_token") == pytest.approx(kl[mask].mean().item(), rel=1e-4)
    assert logged(trainer, "kl/per_sequence") == pytest.approx(kl[mask].sum().item() / 4, rel=1e-4)
    assert expected > 1e-3, "so small a KL would hide a wrong weight"


@pytest.mark.parametrize("kl", ["exact", "k1", "k3"])
@pytest.mark.parametrize("loss_type", SUMS)
def test_sequence_scope_off_policy_uses_prefix_ratios(grpo, loss_type, kl):
    trainer = grpo(loss_type, kl=kl, kl_scope="sequence", config_of={"num_iterations": 2})
    inputs = with_reference(trainer, batch())
    exact, logp, logq = dense(trainer, inputs)
    mask = counted(inputs)
    older = logp.detach() + 0.2 * torch.randn(logp.shape, generator=torch.Generator().manual_seed(1))
    inputs["old_per_token_logps"] = older
    step = torch.where(mask, logp.detach() - older, 0.0)
    upto = step.cumsum(-1).exp()
    u = torch.where(mask, logp - logq, 0.0)
    cost = exact if kl == "exact" else u if kl == "k1" else (-u).exp() - 1 + u
    rho = (step.cumsum(-1) - step).exp() if kl == "exact" else upto
    cost = torch.where(mask, cost * rho, 0.0)
    direct = cost if kl == "exact" else torch.where(mask, rho * (u.detach() * u), 0.0)
    later = cost.detach().flip(-1).cumsum(-1).flip(-1) - cost.detach()
    surrogate = torch.where(mask, direct + logp * later, 0.0)
    steps = trainer.args.gradient_accumulation_steps
    items = inputs["num_items_in_batch"].item() * steps / trainer.args.steps_per_generation
    weights = shares(loss_type, mask, parts=steps, items=items)
    found, value = both(trainer, inputs)
    assert value == pytest.approx(0.3 * (weights * cost).sum().item(), rel=1e-3)
    assert_close(found, gradients(0.3 * (weights * surrogate).sum(), trainer.model))
    assert logged(trainer, "kl") == pytest.approx((weights * cost).sum().item() * steps, rel=1e-3)
    share = rho[mask].sum() ** 2 / (rho[mask] ** 2).sum() / mask.sum()
    assert logged(trainer, "kl/effective_share") == pytest.approx(share.item(), rel=1e-4) and share < 0.99


@pytest.mark.parametrize("kl, scope", [("k2", "token"), *itertools.product(("exact", "k1", "k3"), SCOPES)])
def test_mean_update_over_all_responses_of_an_engine_is_that_of_the_policy(trl, tmp_path, kl, scope):
    """Two of five words, of equal probabilities in the engine, whose responses TRL weights as a whole."""
    words = WordLevel({str(n): n for n in range(5)}, "0")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token="1", pad_token="2")
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(CONFIGS["llama"](vocab_size=5, initializer_range=0.5)).double()
    settings = {"loss_type": "dr_grpo", "temperature": TEMPERATURE, "num_iterations": 2, "epsilon": 1e9}
    asked = {"kl": kl, "kl_scope": scope, "reference": deepcopy(network), "processing_class": tokenizer}
    trainer = make(trl.LeashedGRPOTrainer, trl.GRPOConfig, network, tmp_path, config_of=settings, **asked)
    moved(trainer.model, 0.3)
    trainer.use_vllm = True
    ids = torch.tensor([*itertools.product(range(5), repeat=2)])
    mask, rewards = torch.ones_like(ids), torch.linspace(-1, 2, len(ids)).double()
    inputs = {"prompt_ids": 3 * mask, "prompt_mask": mask, "completion_ids": ids, "completion_mask": mask}
    inputs |= {"advantages": rewards, "num_items_in_batch": torch.tensor(ids.numel())}
    exact, logp, logq = dense(trainer, inputs)
    probability = logp.sum(-1).exp()
    whole = (probability * (logp - logq).sum(-1)).sum()
    nats = whole if scope == "sequence" else exact.sum(-1).mean()  # at the engine's prefixes
    expected = gradients((0.3 * nats - (probability * rewards).sum()) / LENGTH, trainer.model)
    engine, weights = torch.full(ids.shape, -np.log(5.0)).double(), 25 * probability.detach()[:, None]
    known = {"sampling_per_token_logps": engine, "importance_sampling_ratio": weights}
    unknown = {"sampling_per_token_logps": torch.full_like(engine, torch.nan), "old_per_token_logps": engine}
    unknown["importance_sampling_ratio"] = weights / (logp.detach() - engine).exp()
    for older in (known, known | {"old_per_token_logps": logp.detach()}, unknown):
        loss = trainer._compute_loss(trainer.model, with_reference(trainer, inputs | older))
        assert_close(gradients(loss, trainer.model), expected)


@pytest.mark.parametrize("scope", SCOPES)
def test_rloo_adds_mean_over_responses_of_summed_kl(rloo, scope):
    trainer = rloo(kl_scope=scope)
    inputs = with_reference(trainer, batch(tools=False))
    kl, logp, _ = dense(trainer, inputs)
    mask, run = counted(inputs), trainer._get_per_token_logps_and_entropies

    def with_nan_at_padding(*args, **more):
        found, *others = run(*args, **more)
        return found.where(mask, torch.nan), *others

    trainer._get_per_token_logps_and_entropies = with_nan_at_padding
    inputs["old_logps"] = torch.where(mask, logp.detach(), 0.0).sum(-1)
    kl = torch.where(mask, kl, 0.0)
    later = kl.detach().flip(-1).cumsum(-1).flip(-1) - kl.detach()
    surrogate = kl + (torch.where(mask, logp, 0.0) * later if scope == "sequence" else 0.0)
    found, value = both(trainer, inputs)
    assert value == pytest.approx(0.3 * kl.sum().item() / 4, rel=1e-4)
    assert_close(found, gradients(0.3 * surrogate.sum() / 4, trainer.model))
    assert logged(trainer, "kl") == pytest.approx(kl.sum().item() / 4, rel=1e-4)


@pytest.mark.parametrize("place", ["loss", "reward"])
def test_rloo_charges_kl_once(rloo, place):
    asked = {} if place == "loss" else {"kl": "k1", "kl_place": "reward"}
    trainer = rloo(kl_scope="sequence", **asked)
    output = trainer._generate_and_score_completions([{"prompt": "she counted"}] * 4)
    _, logp, logq = dense(trainer, output)
    kl = torch.where(output["completion_mask"].bool(), logp.detach() - logq, 0.0).sum(-1)
    texts = trainer.processing_class.batch_decode(output["completion_ids"], skip_special_tokens=True)
    rewards = torch.tensor(score(texts)) - (0.3 * kl if place == "reward" else 0.0)
    pairs = rewards.reshape(2, 2)
    torch.testing.assert_close(output["advantages"], (pairs - pairs.flip(1)).flatten(), rtol=1e-4, atol=1e-5)
    assert kl.abs().min() > 1e-3 and ("kleash_reference_hidden" in output) is (place == "loss")
    if place == "reward":
        assert logged(trainer, "kl") == pytest.approx(kl.mean().item(), rel=1e-4)


K1_REWARD = {"kl": "k1", "kl_place": "reward"}
HOT = {"temperature": 2.0, "top_k": -1, "generation_kwargs": {"temperature": 2.0, "top_p": 1.0}}


@pytest.mark.parametrize(
    ("asked", "settings", "reason"),
    [
        ({"kl": "k1", "kl_place": "reward", "kl_scope": "token"}, {}, "take kl_scope='sequence'"),
        ({"kl": "k3", "kl_gradient": "backpropagated"}, {}, r"follows KL\(q ‖ p\)"),
        ({"kl_scope": "sequence"}, {"loss_type": "grpo"}, "under 'grpo' divides each .* 'dr_grpo'"),
        (K1_REWARD, {"scale_rewards": "group"}, "scale_rewards is 'group'"),
        ({"kl_cap": 2.0}, {"num_iterations": 2}, "cap is 2.0 and there is no ratio"),
        (K1_REWARD, {"multi_objective_aggregation": "normalize_then_sum"}, "multi_objective_aggregation"),
        ({}, {"use_liger_kernel": True}, "replaces layers of the policy and not of the reference"),
        ({"kl": "k3"}, {"top_p": 0.9}, "top_p is 0.9, so tokens are drawn from another distribution"),
        ({"kl": "k2"}, {"min_p": 0.05}, "min_p is 0.05"),
        ({"kl_scope": "sequence"}, {"top_p": 0.9, "loss_type": "dr_grpo"}, "the KL after each token"),
        (K1_REWARD, {"top_k": 5}, "the KL that k1 estimates"),
        ({"kl": "k3"}, {"generation_kwargs": {"typical_p": 0.9}}, r"generation_kwargs\['typical_p'\] is 0.9"),
        ({"kl": "k3"}, {"generation_kwargs": {"temperature": 2.0}}, r"\['temperature'\] is 2.0"),
        ({"kl": "k3"}, {"generation_kwargs": {"do_sample": False}}, r"\['do_sample'\] is False"),
    ],
)
def test_settings_that_change_the_trained_kl_are_refused(grpo, asked, settings, reason):
    settings = {"scale_rewards": "none", **settings} if asked is K1_REWARD else settings
    with pytest.raises(OptionError, match=reason):
        grpo(settings.get("loss_type", "dapo"), config_of=settings, **asked)


@pytest.mark.parametrize(
    ("asked", "settings"),
    [
        ({"kl": "exact"}, {"top_p": 0.9, "top_k": 5, "repetition_penalty": 1.1}),
        ({"kl": "k3"}, HOT),
        ({"kl": "k3"}, {"beta": 0.0, "top_p": 0.9}),
    ],
)
def test_settings_that_leave_the_kl_unchanged_are_accepted(grpo, asked, settings):
    grpo(config_of=settings, **asked)


def test_sampling_settings_of_the_checkpoint_are_checked(trl, folder, tmp_path):
    network = AutoModelForCausalLM.from_pretrained(folder)
    network.generation_config.update(do_sample=True, top_p=0.8, top_k=20, repetition_penalty=1.05)
    make(trl.LeashedGRPOTrainer, trl.GRPOConfig, network, tmp_path, kl="k3")  # which TRL sets itself
    network.generation_config.no_repeat_ngram_size = 2
    with pytest.raises(OptionError, match=r"checkpoint's generation_config\.no_repeat_ngram_size is 2"):
        make(trl.LeashedGRPOTrainer, trl.GRPOConfig, network, tmp_path, kl="k3")


@pytest.mark.parametrize("settings", [{"top_p": 0.5}, {"normalize_advantages": True}], ids=str)
def test_rloo_refuses_settings_that_change_the_kl_in_its_reward(rloo, settings):
    with pytest.raises(OptionError, match=f"{next(iter(settings))} is "):
        rloo(**K1_REWARD, kl_scope="sequence", config_of=settings)


# --- standard errors of the logged KL ---


def clustered_errors(token_kl, mask, labels):
    """Errors of the mean over responses and of that over tokens, from the sums of each prompt."""
    nats, tokens = (np.where(mask, x, 0).sum(-1) for x in (token_kl, np.ones_like(token_kl)))
    errors = []
    for counts in (np.ones_like(nats), tokens):
        value = nats.sum() / counts.sum()
        residuals = [(nats - value * counts)[labels == label].sum() for label in set(labels)]
        clusters = len(residuals)
        errors.append((clusters / (clusters - 1) * np.square(residuals).sum()) ** 0.5 / counts.sum())
    return errors


def test_errors_are_clustered_by_prompt_over_all_ranks(trl, monkeypatch):
    """Responses to equal prompts are one cluster, however they are padded and on whichever rank they lie."""
    from kleash.integrations.trl.kl_mixin import KLMixin, rows_by_prompt

    draw = torch.Generator().manual_seed(0)
    labels = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 1, 3, 2, 0])
    token_kl = torch.rand(12, LENGTH, generator=draw) + labels[:, None] / 2
    mask = torch.rand(12, LENGTH, generator=draw) < 0.7
    mask[3] = False
    token_kl[~mask] = torch.nan
    prompts = torch.stack([labels, labels, 7 + labels], -1)
    padded = torch.cat([torch.full((12, 2), 2), prompts], -1)
    prompt_mask = torch.tensor([[0, 0, 1, 1, 1]]).expand(12, 5)
    bare = {"prompt_ids": prompts[:6], "prompt_mask": torch.ones(6, 3, dtype=torch.int64)}
    first = rows_by_prompt(token_kl[:6], mask[:6], bare)
    with_padding = {"prompt_ids": padded[6:], "prompt_mask": prompt_mask[6:]}
    second = rows_by_prompt(token_kl[6:], mask[6:], with_padding)
    logs = {}
    rank = SimpleNamespace(_log_metrics=lambda **metrics: logs.update(metrics), beta=0.5)
    rank.model = SimpleNamespace(training=False)
    rank._term, rank._kl_rows = SimpleNamespace(place="reward"), {"eval": first}
    monkeypatch.setattr("accelerate.utils.gather_object", lambda rows: [*rows, *second])
    KLMixin._log_kl_rows(rank)
    rows = mask.any(-1)  # a response that is masked as a whole has no KL
    mean = pytest.approx(token_kl[mask].sum().item() / int(rows.sum()), rel=1e-5)
    assert logs["kl"] == logs["kl/per_sequence"] == mean and not rows.all()
    assert logs["kl/per_token"] == pytest.approx(token_kl[mask].mean().item(), rel=1e-5)
    columns = token_kl[rows].double().numpy(), mask[rows].numpy(), labels[rows].numpy()
    per_sequence, per_token = clustered_errors(*columns)
    assert logs["kl/per_sequence_error"] == pytest.approx(per_sequence, rel=1e-5)
    assert logs["kl/per_token_error"] == pytest.approx(per_token, rel=1e-5)


def test_a_log_has_the_error_of_all_its_responses(grpo):
    """Of the micro-batches and updates since the last log, and not a mean of their errors."""
    trainer = grpo(accumulate=2)
    for seed in (1, 2):  # each response is to a prompt of its own
        trainer._compute_loss(trainer.model, with_reference(trainer, batch(seed=seed)))
    nats = np.array([row[1] for row in trainer._kl_rows["train"]])
    assert logged(trainer, "kl/per_sequence_error") == pytest.approx(nats.std(ddof=1) / 8**0.5)
