"""Groups of weights: every weight in one group, swapped as the state dict would be, and undone without a trace."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_models import ARCHITECTURES, save_tiny, tiny_adapter

from kleash.errors import ModelError
from kleash.models import Loading, Model, load_pair, load_reference
from kleash.models.pair_loading import load_alone
from kleash.models.weight_groups import swapped_weights, weight_groups

PairFolders = Callable[[str], tuple[Path, Path]]
IDS = torch.tensor([[0, 5, 9, 31, 200, 7, 7, 120]])


@pytest.fixture(scope="module")
def llamas(folders: PairFolders) -> tuple[Model, Model]:
    pair = load_pair(*map(str, folders("llama")), dtype="float64")
    return pair.policy, pair.reference


def logits_of(model: Model) -> torch.Tensor:
    return model.hidden_states(IDS) @ model.head.weight.T


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("grouping", ["layers", "modules"])
def test_every_weight_is_in_exactly_one_group(folders: PairFolders, architecture: str, grouping: str) -> None:
    pair = load_pair(*map(str, folders(architecture)))
    groups = weight_groups(pair.policy, pair.reference, grouping)
    assert sum(group.parameters for group in groups) == pair.reference.parameters
    layers = [group.name for group in groups if group.name.startswith("layer ")]
    assert layers == (["layer 0", "layer 1"] if grouping == "layers" else [])
    expected = "embeddings and head" if pair.reference.network.config.tie_word_embeddings else "head"
    assert expected in [group.name for group in groups]
    with swapped_weights(pair.policy, pair.reference, groups) as swapped:
        network = pair.policy.network
        assert torch.equal(network(IDS).logits, pair.reference.network(IDS).logits)
        assert swapped.head.weight is pair.reference.head.weight


def test_groups_of_modules_have_the_names_of_the_modules(llamas: tuple[Model, Model]) -> None:
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
def test_swapping_is_loading_a_mixed_state_dict(
    llamas: tuple[Model, Model], grouping: str, name: str, is_swapped: Callable[[str], bool]
) -> None:
    policy, reference = llamas
    before, other = policy.network.state_dict(), reference.network.state_dict()
    mixed = type(policy.network)(policy.network.config).to(torch.float64).eval()
    mixed.load_state_dict({key: other[key] if is_swapped(key) else before[key] for key in before})
    logits = logits_of(policy)
    (group,) = (group for group in weight_groups(policy, reference, grouping) if group.name == name)
    with swapped_weights(policy, reference, [group]) as swapped:
        assert torch.allclose(logits_of(swapped), mixed(IDS).logits, rtol=0, atol=1e-12)
    assert torch.equal(logits_of(policy), logits)


def test_an_error_within_undoes_the_swap(llamas: tuple[Model, Model]) -> None:
    policy, reference = llamas
    logits = logits_of(policy)
    with pytest.raises(KeyError), swapped_weights(policy, reference, weight_groups(*llamas, "layers")):
        raise KeyError
    assert torch.equal(logits_of(policy), logits)


def test_only_groups_that_differ_in_a_bit_are_not_identical(tmp_path: Path) -> None:
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


def test_a_norm_with_another_epsilon_is_not_identical(tmp_path: Path) -> None:
    first = save_tiny(tmp_path / "first")
    second = save_tiny(tmp_path / "second", rms_norm_eps=1e-5)
    pair = load_pair(str(first), str(second))
    groups = weight_groups(pair.policy, pair.reference, "modules")
    assert [group.name for group in groups if not group.is_identical] == ["norms"]


def test_modules_that_an_adapter_replaced_are_swapped_whole(folders: PairFolders, tmp_path: Path) -> None:
    _, base = folders("llama")
    adapter = tiny_adapter(tmp_path / "adapter", base)
    policy = load_alone("policy", str(adapter), None, Loading()).policy
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
        ({"architecture": "gpt2"}, "is a LlamaForCausalLM and the reference a GPT2LMHeadModel"),
        ({"num_hidden_layers": 3}, "3 decoder layers|of one architecture"),
        ({"intermediate_size": 64}, r"gate_proj.weight is \(48, 32\) in the policy and \(64, 32\)"),
    ],
)
def test_models_of_other_architectures_are_refused(
    folders: PairFolders, tmp_path: Path, options: dict[str, object], message: str
) -> None:
    _, policy = folders("llama")
    reference = save_tiny(tmp_path / "other", **options)
    pair = load_pair(str(policy), str(reference))
    with pytest.raises(ModelError, match=message):
        weight_groups(pair.policy, pair.reference, "modules")


def test_a_pair_that_shares_its_network_is_refused(folders: PairFolders, tmp_path: Path) -> None:
    _, base = folders("llama")
    pair = load_pair(str(tiny_adapter(tmp_path / "adapter", base)), str(base))
    with pytest.raises(ModelError, match="share one network"):
        weight_groups(pair.policy, pair.reference, "layers")
