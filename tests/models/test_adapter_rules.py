"""Every kind of PEFT adapter: the same numbers as two models in two processes, or a refusal in a sentence."""

import json
import shutil
from functools import cache
from typing import Any

import peft
import pytest
import torch
from tiny_models import edit_json, save_tiny
from transformers import AutoModelForCausalLM

from kleash.errors import ModelError
from kleash.models import Loading, load_pair, load_reference, shared_base
from kleash.models import adapters as rules
from kleash.models.heads import head_logits
from kleash.precision import bitwise_equal

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT's, of merging, biases and what transformers renamed
QV: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"]}
TOKENS = [290, 299]


def lora(**more: Any) -> tuple[str, dict[str, Any]]:
    return "LoraConfig", {"r": 4, "lora_alpha": 8, **QV, **more}


SHARED: dict[str, Any] = {
    "lora": lora(),
    "patterns": lora(
        rank_pattern={"layers.0.self_attn.q_proj": 2}, alpha_pattern={"layers.1.self_attn.v_proj": 3}
    ),
    "dora": lora(use_dora=True),
    "saved": lora(modules_to_save=["embed_tokens", "norm"]),
    "saved-head": lora(modules_to_save=["lm_head"]),
    "saved-tied": lora(modules_to_save=["embed_tokens"], ensure_weight_tying=True),
    "tokens": lora(trainable_token_indices=TOKENS),
    "tokens-tied": lora(trainable_token_indices=TOKENS),
    "embedding": lora(target_modules=["embed_tokens", "q_proj"]),
    "parameters": lora(target_modules=[], target_parameters=["mlp.up_proj.weight"]),
    "loha": ("LoHaConfig", QV),
    "ia3": ("IA3Config", {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    "oft": ("OFTConfig", {"oft_block_size": 8, **QV}),
    "boft": ("BOFTConfig", {"boft_block_size": 4, **QV}),
    "vera": ("VeraConfig", QV),
    "norms": ("LNTuningConfig", {"target_modules": ["input_layernorm", "norm"]}),
    "adalora": ("AdaLoraConfig", {"total_step": 10, **QV}),
    "trainable": ("TrainableTokensConfig", {"token_indices": TOKENS}),
}
SEPARATE: dict[str, Any] = {
    "pissa": lora(init_lora_weights="pissa"),
    "olora": lora(init_lora_weights="olora"),
    "repeated": lora(layer_replication=[[0, 2], [0, 2]]),
    "biases": lora(bias="all", target_modules=["c_attn"]),
    "own-biases": lora(bias="lora_only", target_modules=["c_attn"]),
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "pissa-random": ({"init_lora_weights": "pissa_niter_4"}, "changed by random draws or by data"),
    "corda": ({"init_lora_weights": "corda"}, "changed by random draws or by data"),
    "loftq": ({"init_lora_weights": "loftq"}, "changed by random draws or by data"),
    "lora-ga": ({"init_lora_weights": "lora_ga"}, "changed by random draws or by data"),
    "alora": ({"alora_invocation_tokens": [50, 51]}, "needs a forward pass of PEFT"),
    "pvera": ({"peft_type": "PVERA", "sample_at_inference": True}, "or at random, and needs a forward pass"),
    "xlora": ({"peft_type": "XLORA"}, "needs a forward pass of PEFT"),
    "poly": ({"peft_type": "POLY"}, "needs a forward pass of PEFT"),
    "prompt": ({"peft_type": "PROMPT_TUNING"}, "that kleash was not tested with"),
    "future": ({"peft_type": "NEVER_HEARD_OF"}, "that kleash was not tested with"),
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    root = tmp_path_factory.mktemp("bases")
    return {name: save_tiny(root / name, name) for name in ("llama", "gpt2", "qwen3")}


@pytest.fixture(scope="module")
def ids():
    torch.manual_seed(3)
    rows = torch.randint(3, 300, (2, 40))
    rows[0, 5], rows[1, 7] = TOKENS
    return rows


@pytest.fixture(scope="module")
def made(bases, tmp_path_factory):
    """Adapters, made once: name → (its folder, its base's)."""
    root = tmp_path_factory.mktemp("adapters")

    @cache
    def make(name):
        kind, settings = (SHARED | SEPARATE)[name]
        if not hasattr(peft, kind):
            pytest.skip(f"this PEFT has no {kind}")
        base = bases["gpt2" if "biases" in name else "qwen3" if "tied" in name else "llama"]
        return save(root / name, base, kind, settings)

    return make


def save(folder, base, kind, settings):
    """An adapter that was trained: every weight of it has moved."""
    torch.manual_seed(len(folder.name))
    try:
        config = getattr(peft, kind)(task_type="CAUSAL_LM", **settings)
    except TypeError:
        pytest.skip("this PEFT has no such setting")
    network = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if weight.requires_grad:
                spread = 1.0 if "lora" in name else float(weight.std().nan_to_num(1.0)) or 1.0
                weight.add_(0.1 * min(spread, 1.0) * torch.randn_like(weight))
    network.peft_config["default"].base_model_name_or_path = str(base)
    network.save_pretrained(folder)
    return folder, base


@pytest.fixture(scope="module")
def truth(ids):
    """Log-probabilities by PEFT alone: the adapter merged into a fresh base, and a fresh base; each computed once."""

    @cache
    def alone(adapter, base):
        network = AutoModelForCausalLM.from_pretrained(base).eval()
        if adapter is not None:
            network = peft.PeftModel.from_pretrained(network, adapter).eval()
            # which PEFT cannot merge
            if not network.peft_config["default"].to_dict().get("layer_replication"):
                network = network.merge_and_unload()
        with torch.no_grad():
            return network(input_ids=ids).logits.double().log_softmax(-1)

    return alone


def seen(model, ids):
    with torch.no_grad():
        return head_logits(model.hidden_states(ids), model.head).double().log_softmax(-1)


def assert_right(pair, sides, base, ids, truth):
    """Each side gives its truth, also after the other was asked in between."""
    models = [(pair.policy, sides[0]), (pair.reference, sides[1])]
    for model, adapter in models * 2:
        torch.testing.assert_close(seen(model, ids), truth(adapter, base), rtol=0, atol=2e-4)


@pytest.mark.parametrize("name", SHARED)
def test_adapters_that_do_not_change_their_base_share_it(made, ids, truth, name):
    adapter, base = made(name)
    pair = load_pair(str(adapter), str(base))
    assert_right(pair, (adapter, None), base, ids, truth)
    assert pair.policy.network is pair.reference.network
    assert "an adapter and its base, which is loaded once and switched" in pair.notes[1]


@pytest.mark.parametrize("name", SEPARATE)
def test_adapters_that_change_their_base_get_a_separate_base(made, ids, truth, name):
    adapter, base = made(name)
    for sides in ((adapter, None), (None, adapter)) if name == "pissa" else ((adapter, None),):
        pair = load_pair(*(str(side or base) for side in sides))
        assert_right(pair, sides, base, ids, truth)
        assert pair.policy.network is not pair.reference.network
        assert "one base, which is in memory 2 times (2 x " in pair.notes[1]
        config = json.loads((adapter / "adapter_config.json").read_text())
        assert rules.find_rule(config).reason in pair.notes[1]


@pytest.mark.parametrize("name", [*SEPARATE, "lora", "tokens"])
def test_a_changed_base_is_detected_without_a_rule(made, ids, truth, name, monkeypatch):
    if name == "own-biases":
        pytest.importorskip("peft", "0.21", "older ones do not change the base")
    monkeypatch.setattr(rules, "RULES", ())
    adapter, base = made(name)
    pair = load_pair(str(adapter), str(base))
    assert_right(pair, (adapter, None), base, ids, truth)
    assert (pair.policy.network is pair.reference.network) is (name in SHARED)
    if name in SEPARATE:
        assert f"since the adapter {adapter} changes " in pair.notes[1]


def test_a_changed_row_that_the_probe_does_not_read_is_detected(made, monkeypatch):
    adapter, base = made("lora")
    attach = shared_base.attach_adapter

    def attach_and_change(network, wrapper, checkpoint):
        wrapper = attach(network, wrapper, checkpoint)
        probe = shared_base.make_probe(network)
        embedding = network.get_input_embeddings().weight
        row = next(row for row in range(len(embedding)) if row not in probe)
        with torch.no_grad():
            embedding[row, 0] *= -1.0
        return wrapper

    monkeypatch.setattr(shared_base, "attach_adapter", attach_and_change)
    pair = load_pair(str(adapter), str(base))
    assert any("in memory 2 times" in note and "embed_tokens" in note for note in pair.notes), pair.notes


@pytest.mark.parametrize("names", ["lora dora", "dora lora", "lora pissa", "ia3 lora"])
def test_two_adapters_share_one_base_in_either_order(made, ids, truth, names):
    (policy, base), (reference, _) = map(made, names.split())
    pair = load_pair(str(policy), str(reference))
    assert_right(pair, (policy, reference), base, ids, truth)
    assert (pair.policy.network is pair.reference.network) is ("dora" in names)


def test_an_adapter_that_changes_another_adapters_output_is_detected(made, ids, truth, monkeypatch):
    """As PEFT's tuners with shared projections or wrapped modules could."""
    put_on = shared_base.attach_adapter
    (policy, base), (reference, _) = made("lora"), made("dora")

    def meddling(network, wrapper, side):
        done = put_on(network, wrapper, side)
        if wrapper is not None:
            with torch.no_grad():
                next(p for name, p in done.named_parameters() if "lora_B.policy" in name).mul_(1.5)
        return done

    monkeypatch.setattr(shared_base, "attach_adapter", meddling)
    pair = load_pair(str(policy), str(reference))
    assert "changes what another adapter on its base gives" in pair.notes[2]
    assert_right(pair, (policy, reference), base, ids, truth)


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.usefixtures("unhooked")
def test_unsupported_adapters_are_refused(made, tmp_path, name):
    adapter, base = made("lora")
    settings, reason = REFUSED[name]
    changed = shutil.copytree(adapter, tmp_path / "changed")
    edit_json(changed / "adapter_config.json", **settings)
    for sides in ((changed, base), (base, changed), (changed, changed)):
        with pytest.raises(ModelError, match=reason):
            load_pair(str(sides[0]), str(sides[1]))
    with pytest.raises(ModelError, match=reason):
        load_reference(str(changed), None, Loading())


@pytest.mark.parametrize("settings", [{"target_modules": ["embed_tokens"]}, {"target_modules": ["lm_head"]}])
@pytest.mark.usefixtures("unhooked")
def test_an_adapter_on_one_of_two_tied_embeddings_is_refused(bases, tmp_path, settings):
    adapter, base = save(tmp_path / "tied", bases["qwen3"], *lora(**settings))
    with pytest.raises(ModelError, match="running it and merging it give two models"):
        load_pair(str(adapter), str(base))


def test_the_reference_of_a_cache_may_be_any_supported_adapter(made, ids, truth):
    adapter, base = made("pissa")
    pair = load_reference(str(adapter), None, Loading())
    assert_right(pair, (adapter, adapter), base, ids, truth)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_bitwise_equal_compares_bits(dtype):
    zero = torch.zeros(3, dtype=dtype)
    assert bitwise_equal(zero, zero.clone()) and not bitwise_equal(zero, -zero)
    nan = torch.full((2, 2), torch.nan, dtype=dtype)
    assert bitwise_equal(nan, nan.clone()) and bitwise_equal(nan.T, nan)
    payload = nan.clone()
    payload.view(torch.uint8)[0, 0] ^= 1
    assert payload.isnan().all() and not bitwise_equal(nan, payload)
    assert not bitwise_equal(zero.to("meta"), zero.to("meta"))  # no bits to compare
    assert not bitwise_equal(zero, zero[None]) and not bitwise_equal(zero.double(), zero.float())
    assert bitwise_equal(torch.tensor(1.0, dtype=dtype), torch.tensor(1.0, dtype=dtype))
