"""Groups of weights: every weight in one group, swapped as the state dict would be, and undone without a trace."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_architectures import tiny_config
from tiny_models import edit_json, save_tiny, tiny_adapter
from transformers import AutoModelForCausalLM

from kleash.errors import ModelError
from kleash.linear import Head
from kleash.models import Loading, Model, load_pair, load_reference
from kleash.models.weight_groups import swapped_weights, weight_groups

PairFolders = Callable[[str], tuple[Path, Path]]
ARCHITECTURES = (
    *("bloom", "deepseek_v3", "falcon_h1", "gemma3n_text", "gpt2", "gpt_oss", "jamba", "llama", "mamba"),
    *("mixtral", "qwen3_next", "rwkv"),
)
IDS = torch.tensor([[0, 5, 9, 31, 200, 7, 7, 120]])


@pytest.fixture(scope="module")
def llamas(folders: PairFolders) -> tuple[Model, Model]:
    pair = load_pair(*map(str, folders("llama")), dtype="float64")
    return pair.policy, pair.reference


def logits_of(model: Model) -> torch.Tensor:
    return model.hidden_states(IDS) @ model.head.weight.T


@dataclass(frozen=True, kw_only=True)
class LoadedNetwork:
    """A network without files, with the fields of a model that groups depend on."""

    network: Any
    role: str
    dtype: torch.dtype
    head: Head
    vocab_size: int = 1


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_weight_is_in_exactly_one_group_and_all_together_are_the_reference(architecture):
    if architecture == "deepseek_v3":
        pytest.importorskip("transformers", "5.15", "older ones do not divide its projections so")
    networks = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        networks.append(AutoModelForCausalLM.from_config(tiny_config(architecture)).eval())
    policy, reference = (
        LoadedNetwork(network=network, role=role, dtype=network.dtype, head=Head(weight=None))
        for network, role in zip(networks, ("policy", "reference"), strict=True)
    )
    ids = torch.tensor([[1, 5, 9, 3, 7, 2]])
    with torch.no_grad():
        before, expected = (network(ids, use_cache=False).logits for network in networks)
        for grouping in ("layers", "modules"):
            groups = weight_groups(policy, reference, grouping)
            assert sum(group.parameters for group in groups) == reference.network.num_parameters()
            layers = [group for group in groups if group.name.startswith("layer ")]
            assert len(layers) == (policy.network.config.num_hidden_layers if grouping == "layers" else 0)
            with swapped_weights(policy, reference, groups):
                assert torch.equal(policy.network(ids, use_cache=False).logits, expected)
            assert torch.equal(policy.network(ids, use_cache=False).logits, before)


@pytest.mark.parametrize(("architecture", "name"), [("llama", "head"), ("qwen3", "embeddings and head")])
def test_the_head_is_swapped_with_its_module_and_with_tied_embeddings(folders, architecture, name):
    pair = load_pair(*map(str, folders(architecture)))
    for grouping in ("layers", "modules"):
        (group,) = (
            group for group in weight_groups(pair.policy, pair.reference, grouping) if "head" in group.name
        )
        assert group.name == name
        with swapped_weights(pair.policy, pair.reference, [group]) as swapped:
            assert swapped.head.weight is pair.reference.head.weight
            assert torch.allclose(logits_of(swapped), swapped.network(IDS).logits, atol=1e-4)


class PackedLinear(torch.nn.Module):
    """A linear layer of int8 codes and scales, as packed checkpoints have it."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("codes", (linear.weight.detach() / scale).round().to(torch.int8))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(hidden, self.codes * self.scale)


def test_packed_layers_give_way_to_plain_ones(tmp_path):
    first, second = (save_tiny(tmp_path / name) for name in ("first", "second"))
    pair = load_pair(str(first), str(second))
    for layer in pair.policy.network.model.layers:
        layer.mlp.up_proj = PackedLinear(layer.mlp.up_proj)
    different = [
        group for group in weight_groups(pair.policy, pair.reference, "modules") if not group.is_identical
    ]
    assert [group.name for group in different] == ["mlp.up_proj"]
    assert not torch.equal(logits_of(pair.policy), logits_of(pair.reference))
    with swapped_weights(pair.policy, pair.reference, different) as swapped:
        assert torch.equal(logits_of(swapped), logits_of(pair.reference))


def test_groups_of_modules_have_the_names_of_the_modules(llamas):
    names = [group.name for group in weight_groups(*llamas, "modules")]
    assert names == [
        "embeddings",
        *(f"self_attn.{name}_proj" for name in "qkvo"),
        *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
        "norms",
        "head",
    ]


@pytest.mark.parametrize(
    ("grouping", "name", "is_swapped"),
    [
        ("layers", "layer 1", lambda key: ".layers.1." in key),
        ("modules", "mlp.up_proj", lambda key: ".up_proj." in key),
        ("modules", "norms", lambda key: "norm" in key),
        ("modules", "embeddings", lambda key: "embed_tokens" in key),
        ("modules", "head", lambda key: "lm_head" in key),
    ],
)
def test_swapping_is_loading_a_mixed_state_dict(llamas, grouping, name, is_swapped):
    policy, reference = llamas
    before, other = policy.network.state_dict(), reference.network.state_dict()
    mixed = type(policy.network)(policy.network.config).to(torch.float64).eval()
    mixed.load_state_dict({key: other[key] if is_swapped(key) else before[key] for key in before})
    logits = logits_of(policy)
    (group,) = (group for group in weight_groups(policy, reference, grouping) if group.name == name)
    with swapped_weights(policy, reference, [group]) as swapped:
        assert torch.allclose(logits_of(swapped), mixed(IDS).logits, rtol=0, atol=1e-12)
    assert torch.equal(logits_of(policy), logits)


def test_an_error_within_undoes_the_swap(llamas):
    policy, reference = llamas
    logits = logits_of(policy)
    with pytest.raises(KeyError), swapped_weights(policy, reference, weight_groups(*llamas, "layers")):
        raise KeyError
    assert torch.equal(logits_of(policy), logits)


def test_only_groups_that_differ_in_a_bit_are_not_identical(tmp_path):
    first, second = (save_tiny(tmp_path / name) for name in ("first", "second"))
    pair = load_pair(str(first), str(second))
    assert all(group.is_identical for group in weight_groups(pair.policy, pair.reference, "modules"))
    weight = pair.policy.network.model.layers[1].self_attn.o_proj.weight
    with torch.no_grad():
        weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(torch.inf))
    different = [
        group.name
        for grouping in ("layers", "modules")
        for group in weight_groups(pair.policy, pair.reference, grouping)
        if not group.is_identical
    ]
    assert different == ["layer 1", "self_attn.o_proj"]


def test_a_norm_with_another_epsilon_is_not_identical(tmp_path):
    first = save_tiny(tmp_path / "first")
    second = save_tiny(tmp_path / "second", rms_norm_eps=1e-5)
    pair = load_pair(str(first), str(second))
    groups = weight_groups(pair.policy, pair.reference, "modules")
    assert [group.name for group in groups if not group.is_identical] == ["norms"]


def test_a_copy_in_other_files_is_the_same_model_until_a_bit_or_a_setting_changes(tmp_path):
    first = str(save_tiny(tmp_path / "first", "gemma2"))
    network = AutoModelForCausalLM.from_pretrained(first)

    def is_one_model(name: str) -> bool:
        copy = shutil.copytree(first, tmp_path / name, ignore=shutil.ignore_patterns("*.safetensors"))
        network.save_pretrained(copy, max_shard_size="20KB")
        pair = load_pair(str(copy), first)
        assert pair.policy.fingerprint != pair.reference.fingerprint
        return pair.is_one_model

    assert is_one_model("shards")
    network.config.final_logit_softcapping += 1.0  # which the network reads as it runs
    assert not is_one_model("setting")
    network.config.final_logit_softcapping -= 1.0
    weight = network.model.embed_tokens.weight.data
    weight[-1, 0] = torch.nextafter(weight[-1, 0], torch.tensor(torch.inf))  # of a token that no text has
    assert not is_one_model("bit")


def test_embeddings_with_another_padding_index_are_identical(tmp_path):
    """It changes gradients only, and a GGUF file has none where a checkpoint names one."""
    first, second = (save_tiny(tmp_path / name) for name in ("first", "second"))
    edit_json(second / "config.json", pad_token_id=None)
    pair = load_pair(str(first), str(second))
    indices = [model.network.model.embed_tokens.padding_idx for model in (pair.policy, pair.reference)]
    assert indices == [2, None]
    assert all(group.is_identical for group in weight_groups(pair.policy, pair.reference, "modules"))


def test_modules_that_an_adapter_replaced_are_swapped_whole(folders, tmp_path):
    _, base = folders("llama")
    adapter = tiny_adapter(tmp_path / "adapter", base)
    policy = load_reference(str(adapter), None, Loading(), role="policy").policy
    reference = load_reference(str(base), None, Loading()).reference
    groups = weight_groups(policy, reference, "modules")
    different = [group for group in groups if not group.is_identical]
    assert [group.name for group in different] == ["self_attn.q_proj", "self_attn.v_proj"]
    assert not torch.equal(logits_of(policy), logits_of(reference))
    with swapped_weights(policy, reference, different) as swapped:
        assert torch.equal(logits_of(swapped), logits_of(reference))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "gpt2"}, "is a LlamaForCausalLM and the reference"),
        ({"num_hidden_layers": 3}, "is a ModuleList of 2 and the reference's a ModuleList of 3"),
        ({"intermediate_size": 64}, r"gate_proj.weight is \(48, 32\) in the policy"),
    ],
)
def test_models_of_other_architectures_are_refused(folders, tmp_path, options, message):
    _, policy = folders("llama")
    reference = save_tiny(tmp_path / "other", **options)
    pair = load_pair(str(policy), str(reference))
    with pytest.raises(ModelError, match=message):
        weight_groups(pair.policy, pair.reference, "modules")


def test_a_pair_that_shares_its_network_is_refused(folders, tmp_path):
    _, base = folders("llama")
    pair = load_pair(str(tiny_adapter(tmp_path / "adapter", base)), str(base))
    with pytest.raises(ModelError, match="share one network"):
        weight_groups(pair.policy, pair.reference, "layers")
