"""The exact KL on the real functions of verl's FSDP engine, against sums over the vocabulary done apart."""

import inspect
from copy import deepcopy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from kleash_in_verl import kleash_in_verl
from tiny_models import CONFIGS
from transformers import AutoModelForCausalLM
from verl_engines import (
    PROMPTS,
    VOCABULARY,
    batch,
    counted,
    engine_of,
    gradients,
    kl_and_logp,
    logp_of,
    loss_of,
    nested,
    tiny,
)

from kleash.auditing.targets.packages import quiet
from kleash.errors import CannotRunError
from kleash.integrations.verl import REFERENCE_HIDDEN, install

pytestmark = pytest.mark.filterwarnings("ignore")  # nested tensors announce themselves


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """verl's modules with kleash installed, one process of gloo, no accelerator."""
    import torch.distributed as dist

    with quiet(), pytest.MonkeyPatch.context() as patch:
        pytest.importorskip("verl.trainer.ppo.core_algos")
        import verl.trainer.distillation.fsdp.losses as top_k_losses
        import verl.trainer.distillation.losses as distillation
        import verl.workers.engine.fsdp.transformer_impl as fsdp
        import verl.workers.utils.losses as losses
        from verl.plugin.platform import get_platform

        platform = type(get_platform())
        patch.setattr(platform, "current_device", lambda self: "cpu")
        patch.setattr(platform, "device_name", "cpu")
        engine = fsdp.FSDPEngineWithLMHead
        for name in ("forward_step", "prepare_model_outputs"):
            patch.setattr(engine, name, getattr(engine, name))
        place = tmp_path_factory.mktemp("gloo") / "store"
        dist.init_process_group("gloo", init_method=f"file://{place}", rank=0, world_size=1)
        with kleash_in_verl(exact=True):
            modules = {"fsdp": fsdp, "losses": losses, "distillation": distillation}
            yield SimpleNamespace(**modules, top_k_losses=top_k_losses)
        dist.destroy_process_group()


def with_reference(parts, reference, data):
    """The data after verl's reference pass, as its v1 trainer writes back what the pass put out."""
    found = engine_of(parts.fsdp, reference, forward_only=True).infer_batch(deepcopy(data))["model_output"]
    data[REFERENCE_HIDDEN] = found[REFERENCE_HIDDEN]
    return data


@pytest.mark.parametrize("settings", [{}, {"use_remove_padding": False}], ids=["packed", "padded"])
@pytest.mark.parametrize("kind", ["exact exact", "full exact", "exact+ k2", "low_var_kl k3", "k3+ k2"])
def test_each_kl_in_verls_loss_has_its_value_and_gradient(parts, kind, settings):
    name, trained = kind.split()
    policy, reference, found = tiny(0), tiny(1), []
    policy.lm_head.weight.data.mul_(2)
    data = with_reference(parts, reference, batch(**settings))
    data["ref_log_prob"] = nested([x.detach() for x in kl_and_logp(reference, reference, data)[1]])
    exact, logp, mask = map(torch.cat, kl_and_logp(policy, reference, data))
    u = logp - data["ref_log_prob"].values()
    assert (u < -2.62).any(), "verl's k3 has no gradient there"
    terms = {
        "exact": exact[mask].mean(),
        "k2": (u**2 / 2)[mask].mean(),
        "k3": ((-u).exp() - 1 + u)[mask].mean(),
    }
    terms[trained].backward()
    expected = gradients(policy)
    for asked in ({"kl_loss_type": name}, {"use_kl_loss": False}):
        policy.zero_grad()
        loss = loss_of(parts.losses, **asked)
        metrics = engine_of(parts.fsdp, policy).forward_backward_batch(deepcopy(data), loss)["metrics"]
        found.append((gradients(policy), metrics))
    (whole, metrics), (rest, others) = found
    assert "kl_loss" not in others
    value = terms["k3" if name in ("low_var_kl", "k3+") else "exact"].item()
    assert metrics["kl_loss"].aggregate() == pytest.approx(value, rel=1e-6)
    for weight, gradient in expected.items():
        torch.testing.assert_close((whole[weight] - rest[weight]) / 0.3, gradient, rtol=1e-4, atol=1e-5)


def test_disabled_adapter_is_the_reference(parts):
    from peft import LoraConfig, get_peft_model

    bare = tiny(1)
    lora = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    adapted = get_peft_model(deepcopy(bare), lora).double()
    engine, data = engine_of(parts.fsdp, adapted), batch()
    with engine.disable_adapter():
        found = engine.infer_batch(deepcopy(data))["model_output"][REFERENCE_HIDDEN]
    assert REFERENCE_HIDDEN not in engine.infer_batch(deepcopy(data))["model_output"], "this was the policy"
    for row, ids in zip(found.unbind(), data["input_ids"].unbind(), strict=True):
        expected, moved = (
            model(input_ids=ids[None]).last_hidden_state[0].detach()
            for model in (bare.model, adapted.base_model.model.model)
        )
        torch.testing.assert_close(row, expected)
        assert not torch.allclose(row, moved)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "cohere"])
def test_head_of_the_reference_is_read_at_each_pass(parts, kind):
    """One with a softcap, and one with a scale, too."""
    torch.manual_seed(4)
    reference = AutoModelForCausalLM.from_config(CONFIGS[kind](vocab_size=VOCABULARY)).double()
    policy, data = tiny(0), batch()
    for _ in range(2):
        kl, _, mask = map(torch.cat, kl_and_logp(policy, reference, data))
        engine, given = engine_of(parts.fsdp, policy), with_reference(parts, reference, data)
        metrics = engine.forward_backward_batch(given, loss_of(parts.losses))["metrics"]
        assert metrics["kl_loss"].aggregate() == pytest.approx(kl[mask].mean().item(), rel=1e-6)
        reference.lm_head.weight.data.mul_(2)


def test_reference_without_separate_head_is_refused(parts):
    class Odd(type(tiny(1))):
        def forward(self, *given, **named):
            found = super().forward(*given, **named)
            found.logits = found.logits**3
            return found

    odd = tiny(1)
    odd.__class__ = Odd
    with pytest.raises(CannotRunError, match=r"Odd\) does not come apart .* nats off its own logits"):
        with_reference(parts, odd, batch())


def test_unsupported_exact_kl_is_refused(parts, unhooked):
    policy, reference, loss = tiny(0), tiny(1), loss_of(parts.losses)
    engine = engine_of(parts.fsdp, policy)
    with pytest.raises(CannotRunError, match="its hidden states are not in the data; install"):
        engine.forward_backward_batch(batch(), loss)
    data = with_reference(parts, reference, batch())
    engine.use_ulysses_sp = True
    with pytest.raises(CannotRunError, match="logits sharded over ranks, which the exact KL"):
        engine.forward_backward_batch(deepcopy(data), loss)
    engine.use_ulysses_sp = False
    policy.forward = lambda **_: SimpleNamespace(logits=None)
    with pytest.raises(CannotRunError, match="no logits, which the exact KL is computed from; set use_fused"):
        engine.forward_backward_batch(deepcopy(data), loss)


def test_states_of_the_reference_that_predict_no_counted_token_are_not_read(parts):
    """Those of prompts and last tokens, and before the second token of the third response, which is masked."""
    policy, data = tiny(0), with_reference(parts, tiny(1), batch())
    found = []
    for poison in (0.0, torch.nan):
        rows = [row.clone() for row in data[REFERENCE_HIDDEN].unbind()]
        rows[2][PROMPTS[2]] += poison
        for row, prompt in zip(rows, PROMPTS, strict=True):
            row[: prompt - 1] += poison
            row[-1] += poison
        data[REFERENCE_HIDDEN] = nested(rows)
        engine = engine_of(parts.fsdp, deepcopy(policy))
        out = engine.forward_backward_batch(deepcopy(data), loss_of(parts.losses))
        found.append([out["metrics"]["kl_loss"].aggregate(), *gradients(engine.module).values()])
    assert found[0][0] > 0.2
    for clean, poisoned in zip(*found, strict=True):
        torch.testing.assert_close(poisoned, clean, rtol=0, atol=0)


def test_second_install_has_no_effect(parts):
    before = parts.fsdp.FSDPEngineWithLMHead.forward_step, parts.losses.ppo_loss
    install(exact=True)
    install()
    assert before == (parts.fsdp.FSDPEngineWithLMHead.forward_step, parts.losses.ppo_loss)
    assert parts.distillation.ppo_loss is parts.losses.ppo_loss, "imported by name before kleash came"


K = 3


def with_teacher(teacher, data):
    """The data with the teacher's 3 likeliest tokens at each position; the last, which predicts nothing, is padding."""
    from verl.utils.tensordict_utils import assign_non_tensor

    lists = [logp_of(teacher, ids).detach().topk(K) for ids in data["input_ids"].unbind()]
    for top in lists:
        top.values[-1], top.indices[-1] = 0.0, 5
    data["teacher_logprobs"] = nested([top.values for top in lists])
    data["teacher_ids"] = nested([top.indices for top in lists])
    assign_non_tensor(data, distillation_use_topk=True, distillation_only=True)
    return data


def distillation_loss_of(parts):
    """verl's loss of a distillation without rewards, as its actor binds it."""
    from verl.workers.config import ActorConfig

    settings = {"loss_mode": "forward_kl_topk", "topk": K, "use_chunked_topk": False}
    settings |= {"loss_max_clamp": None, "log_prob_min_clamp": -10.0}
    settings |= {"use_task_rewards": False, "use_policy_gradient": False}
    return partial(
        parts.distillation.distillation_ppo_loss,
        config=ActorConfig(strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=2),
        distillation_config=SimpleNamespace(distillation_loss=SimpleNamespace(**settings)),
    )


def coarse_terms(name, policy, data):
    """D(teacher || student) of the coarse distributions at each counted token, and the sum over the lists alone."""
    lists = zip(data["teacher_logprobs"].unbind(), data["teacher_ids"].unbind(), strict=True)
    values, listed_only = [], []
    for (ids, prompt, response, mask), (logp, top) in zip(counted(data), lists, strict=True):
        rows = slice(prompt - 1, prompt + response - 1)
        q, p = logp_of(policy, ids).exp().gather(-1, top)[rows], logp.exp()[rows]
        listed_only.append((p * (p / q).log()).sum(-1)[mask.bool()])
        p, q = (torch.cat([x, 1 - x.sum(-1, keepdim=True)], -1) for x in (p, q))
        terms = {"kl": p * (p / q).log(), "reverse_kl": q * (q / p).log()}[name].sum(-1)
        values.append(terms[mask.bool()])
    return torch.cat(values), torch.cat(listed_only)


@pytest.mark.parametrize("settings", [{}, {"use_remove_padding": False}], ids=["packed", "padded"])
@pytest.mark.parametrize("name", ["kl", "reverse_kl", None])
def test_top_k_distillation_has_the_gradient_of_the_coarse_divergence(parts, monkeypatch, name, settings):
    """verl's own loss is the sum over the list alone, cut off at 0, where the student has more mass there."""
    own = inspect.unwrap(parts.top_k_losses.compute_forward_kl_topk)
    monkeypatch.setattr(parts.top_k_losses, "compute_forward_kl_topk", own)
    if name is not None:
        install(top_k_distillation=name)
    policy, data = tiny(1), with_teacher(tiny(1), batch(**settings))
    noise = torch.randn(policy.lm_head.weight.shape, generator=torch.Generator().manual_seed(5))
    policy.lm_head.weight.data.mul_(1.1).add_(0.2 * noise)
    whole, listed_only = coarse_terms(name or "kl", policy, data)
    assert 0.2 < (listed_only < 0).double().mean() < 1 and (whole > 0).all()
    expected = (listed_only.clamp(min=0) if name is None else whole).mean()
    assert listed_only.mean() < expected <= whole.mean()
    expected.backward()
    right = gradients(policy)
    policy.zero_grad()
    out = engine_of(parts.fsdp, policy).forward_backward_batch(data, distillation_loss_of(parts))
    assert out["metrics"]["distillation/loss"].aggregate() == pytest.approx(expected.item(), rel=1e-6)
    for weight, gradient in gradients(policy).items():
        torch.testing.assert_close(gradient, right[weight], rtol=1e-4, atol=1e-5)
