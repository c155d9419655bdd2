"""GPTQ and AWQ checkpoints: unpacked weights, their KL, adapters on them, the record, and damaged files."""

import json
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packed_checkpoints import (
    IDS,
    SEQUENCE,
    pack_awq,
    pack_gptq,
    packed_checkpoint,
    read_module,
    save_packed,
    write_module,
)
from safetensors.torch import load_file, save_file
from scipy.special import log_softmax
from tiny_models import ATTENTION, CONFIGS, SHAPE, SPECIAL, double_logits, edit_json, save_tiny, tiny_adapter
from tiny_towers import save_tower
from transformers import Qwen3MoeConfig

from kleash.errors import ModelError
from kleash.models import load_pair, score, transformers_formats
from kleash.models.filling import unpack
from kleash.models.transformers_formats import has_kernels

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "checkpoint_format": "gptq"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
SHAPES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "head_dim": 16}
LAYOUTS = {
    f"gptq-{bits}-{version}": (
        pack_gptq(bits, 32, act_order=bits in (3, 4), version=version),
        GPTQ | {"bits": bits, "checkpoint_format": name},
        f"gptq int{bits}, groups of 32",
    )
    for bits in (2, 3, 4, 8)
    for version, name in ((1, "gptq"), (2, "gptq_v2"))
}
PLAIN = partial(pack_gptq, act_order=False, version=1)
ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32}, "auto-round int4, groups of 32"
OVERRIDDEN = GPTQ | {"dynamic": {"+:.*": {"bits": 8, "group_size": 16}}}
LAYOUTS |= {
    "one-group": (PLAIN(4, 96), {"quant_method": "gptq", "bits": 4, "group_size": -1}, "gptq int4, rows"),
    "smaller-last-group": (
        *(PLAIN(4, 40, with_groups=False), GPTQ | {"group_size": 40}, "gptq int4, groups of 40"),
    ),
    "overridden": (PLAIN(8, 16), OVERRIDDEN, "gptq int8, groups of 16"),
    "auto_round": (pack_gptq(4, 32, act_order=False, version=2, with_groups=False), *ROUND),
    "auto_round:auto_gptq": (PLAIN(4, 32, with_groups=False), *ROUND),
    "auto_round:auto_awq": (pack_awq(32), *ROUND),
    "awq": (pack_awq(32), AWQ, "awq int4, groups of 32"),
    "awq-one-group": (pack_awq(96), AWQ | {"group_size": -1}, "awq int4, rows"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_matrix_is_unpacked_to_the_numbers_that_were_packed(tmp_path, layout):
    pack, settings, kind = LAYOUTS[layout]
    settings = settings | ({"packing_format": layout} if "round" in layout else {})
    tensors, values = pack(np.random.default_rng(0).normal(size=(160, 96)))
    module = read_module(write_module(tmp_path, tensors, quantization_config=settings))
    assert (module.shape, module.kind) == ((160, 96), kind)
    for dtype in (torch.float32, torch.float64):
        weight = unpack(module, dtype)
        assert weight.dtype == dtype
        assert torch.equal(weight.double(), torch.from_numpy(values))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("source") / "llama", **SHAPES)


@pytest.fixture(scope="module")
def gptq(source: Path) -> tuple[Path, Path]:
    """A GPTQ checkpoint with activation order, and its dequantised twin."""
    folder, dense = source.parent / "gptq", source.parent / "gptq-dense"
    return save_packed(source, folder, pack_gptq(4, 32, act_order=True, version=1), GPTQ, dense=dense), dense


@pytest.fixture(scope="module")
def awq(source: Path) -> tuple[Path, Path]:
    folder, dense = source.parent / "awq", source.parent / "awq-dense"
    return save_packed(source, folder, pack_awq(32), AWQ, dense=dense), dense


def kl_of(policy: Path, reference: Path, dtype: str = "float64") -> np.ndarray:
    return score(load_pair(str(policy), str(reference), dtype=dtype), [SEQUENCE])["kl_policy_reference"]


@pytest.mark.parametrize("format_name", ["gptq", "awq"])
def test_the_kl_is_that_of_the_dequantised_weights(source, format_name, request):
    """By transformers' logits in float64."""
    folder, dense = request.getfixturevalue(format_name)
    logp, logq = (log_softmax(double_logits(one, IDS)[:-1].numpy(), axis=-1) for one in (dense, source))
    forward, backward = ((np.exp(p) * (p - q)).sum(-1) for p, q in ((logp, logq), (logq, logp)))
    assert forward.min() > 1e-4
    np.testing.assert_allclose(kl_of(folder, source), forward, rtol=2e-7, atol=1e-12)
    np.testing.assert_allclose(kl_of(folder, source, "float32"), forward, rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(kl_of(source, folder), backward, rtol=2e-7, atol=1e-12)
    pair = load_pair(str(folder), str(folder))
    assert np.all(score(pair, [SEQUENCE])["kl_policy_reference"] == 0)
    note = f"the policy {folder} is quantised ({format_name}), and its 7 packed matrices were unpacked"
    assert any(text.startswith(note) and "activations are not quantised" in text for text in pair.notes)


def test_an_adapter_is_measured_over_unpacked_weights(gptq, tmp_path):
    folder, dense = gptq
    adapters = [tiny_adapter(tmp_path / base.name, dense, base_name=str(base)) for base in gptq]
    over_packed = load_pair(str(adapters[0]), str(folder))
    assert over_packed.policy.network is over_packed.reference.network
    over_dense = load_pair(str(adapters[1]), str(dense))
    kl = score(over_packed, [SEQUENCE])["kl_policy_reference"]
    assert kl.min() > 1e-4
    np.testing.assert_array_equal(kl, score(over_dense, [SEQUENCE])["kl_policy_reference"])


def test_the_record_has_bytes_bits_and_the_kind_of_each_module(gptq, source):
    pair = load_pair(str(gptq[0]), str(source))
    weights = pair.policy.record().weights
    stored = load_file(gptq[0] / "model.safetensors")
    assert weights.bytes == sum(tensor.nbytes for tensor in stored.values())
    assert weights.bits_per_weight == 8 * weights.bytes / pair.reference.parameters
    assert weights.modules == {
        **{f"model.layers.0.self_attn.{part}_proj": "gptq int4, groups of 32" for part in "kqvo"},
        **{f"model.layers.0.mlp.{part}_proj": "gptq int4, groups of 32" for part in ("gate", "up", "down")},
        "model.embed_tokens": "F32",
        "lm_head": "F32",
    }
    assert pair.policy.parameters == pair.reference.parameters


def test_a_packed_head_is_unpacked_and_not_tied_to_the_embedding(tmp_path):
    source = save_tiny(tmp_path / "source", **SHAPES)
    edit_json(source / "config.json", tie_word_embeddings=True)
    dense = tmp_path / "dense"
    pack = pack_gptq(4, 32, act_order=False, version=2)
    settings = GPTQ | {"checkpoint_format": "gptq_v2", "lm_head": True}
    head = {"matches": lambda name: name == "lm_head.weight", "dense": dense}
    folder = save_packed(source, tmp_path / "packed", pack, settings, **head)
    edit_json(dense / "config.json", tie_word_embeddings=False)
    pair = load_pair(str(folder), str(dense))
    head = pair.policy.head.weight
    assert torch.equal(head.double(), load_file(dense / "model.safetensors")["lm_head.weight"])
    assert np.all(score(pair, [SEQUENCE])["kl_policy_reference"] == 0)


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_a_bias_that_the_network_does_not_have_is_left_out_or_named(gptq, tmp_path, value):
    folder = tmp_path / "biased"
    shutil.copytree(gptq[0], folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.bias"] = torch.full((96,), value)  # as AutoGPTQ writes zeros
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    notes = load_pair(str(folder), str(gptq[1])).notes
    assert any("are not used by its architecture" in note for note in notes) == (value != 0)


@pytest.mark.parametrize("name", ["act_fn.scales", "down_proj.had_K", "down_proj.lora_A.weight"])
def test_tensors_that_a_matrix_has_beside_its_format_are_refused(gptq, tmp_path, name):
    folder = shutil.copytree(gptq[0], tmp_path / "scaled")
    tensors = load_file(folder / "model.safetensors")
    tensors[f"model.layers.0.mlp.{name}"] = torch.full((96,), 2.0)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"1 tensors of a quantisation .*\.mlp\.{re.escape(name)}"):
        load_pair(str(folder), str(gptq[1]))
    tensors.pop(f"model.layers.0.mlp.{name}")
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(96, 64)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="1 matrices both packed and not, such"):
        load_pair(str(folder), str(gptq[1]))


def test_matrices_that_gpt2_has_transposed_are_packed_as_those_of_linear_layers(tmp_path):
    source = save_tiny(tmp_path / "source", "gpt2", n_embd=64)

    def pack(weight: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
        tensors, values = pack_gptq(4, 32, act_order=True, version=1)(weight.T)
        return tensors, values.T

    def matches(name: str) -> bool:
        return name.endswith(("c_attn.weight", "attn.c_proj.weight"))  # the second is a square

    dense = tmp_path / "dense"
    folder = save_packed(source, tmp_path / "packed", pack, GPTQ, matches=matches, dense=dense)
    pair = load_pair(str(folder), str(dense), dtype="float64")
    for name, weight in pair.policy.network.state_dict().items():
        assert torch.equal(weight, pair.reference.network.state_dict()[name]), name
    assert score(load_pair(str(folder), str(source)), [SEQUENCE])["kl_policy_reference"].min() > 1e-4


def test_experts_that_are_packed_one_by_one_are_unpacked(tmp_path, monkeypatch):
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    settings = SHAPE | ATTENTION | SPECIAL | SHAPES | experts
    config = Qwen3MoeConfig(**settings, norm_topk_prob=True)
    monkeypatch.setitem(CONFIGS, "qwen3_moe", lambda **_: config)
    source = save_tiny(tmp_path / "source", "qwen3_moe")
    dense = tmp_path / "dense"
    folder = save_packed(source, tmp_path / "packed", pack_awq(32), AWQ, dense=dense)
    pair = load_pair(str(folder), str(dense), dtype="float64")
    assert sum(name.endswith("qweight") for name in load_file(folder / "model.safetensors")) == 4 + 12
    assert np.all(score(pair, [SEQUENCE])["kl_policy_reference"] == 0)
    for name, weight in pair.policy.network.state_dict().items():
        assert torch.equal(weight, pair.reference.network.state_dict()[name]), name
    assert kl_of(folder, source).min() > 1e-4


@pytest.mark.parametrize(
    ("format_name", "part", "change", "reason"),
    [
        ("gptq", "qzeros", None, "has no tensor qzeros"),
        ("gptq", "scales", None, "has no tensor scales"),
        ("gptq", "qweight", lambda t: t[:, :0], r"has qweight as I32 \[8, 0\], and not as non-empty I32"),
        ("gptq", "qweight", lambda t: t[:, :32], "has scales of 2 x 64 and qzeros of 2 groups"),
        ("gptq", "g_idx", lambda t: t[:9], r"has g_idx of shape \[9\]"),
        ("gptq", "qweight", lambda t: t.float(), r"has qweight as F32 \[8, 64\], and not as non-empty I32"),
        ("gptq", "qzeros", lambda t: t[:, :7], "has 7 words of zero points for 64 outputs"),
        ("gptq", "qzeros", lambda t: t[:, :4], "is stored in 2 bits,"),
        ("gptq", "g_idx", lambda t: t + 1, "has a g_idx from 1 to 2, and groups from 0 to 1"),
        ("awq", "qzeros", None, "has no tensor qzeros"),
        ("awq", "scales", lambda t: t[:1], r"has scales of shape \[1, 64\], and not \[2"),
        ("awq", "qweight", lambda t: t[:, :4], r"has scales of shape \[2, 64\], and not \[2"),
        ("awq", "qweight", lambda t: t.long(), r"has qweight as I64 \[64, 8\], and not as non-empty I32"),
    ],
)
def test_damaged_tensors_are_refused_with_their_module(request, tmp_path, format_name, part, change, reason):
    source, dense = request.getfixturevalue(format_name)
    name = "model.layers.0.self_attn.q_proj"
    folder = shutil.copytree(source, tmp_path / "damaged")
    tensors = load_file(folder / "model.safetensors")
    tensor = tensors.pop(f"{name}.{part}")
    if change is not None:
        tensors[f"{name}.{part}"] = change(tensor).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    module = re.escape(f"{folder} cannot be unpacked: its module {name}")
    with pytest.raises(ModelError, match=f"the policy {module} {reason}"):
        load_pair(str(folder), str(dense))


@pytest.mark.parametrize(("layout", "byte", "other"), [("gptq", 0x77, "gptq_v2"), ("gptq_v2", 0x88, "gptq")])
def test_symmetric_weights_have_the_zero_points_of_their_layout(gptq, tmp_path, layout, byte, other):
    folder = shutil.copytree(gptq[0], tmp_path / "symmetric")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= {"sym": True, "checkpoint_format": layout}
    (folder / "config.json").write_text(json.dumps(config))

    def store(byte: int) -> None:
        tensors = load_file(folder / "model.safetensors")
        filled = {
            name: torch.full((*tensor.shape, 4), byte, dtype=torch.uint8)
            .view(torch.int32)[..., 0]
            .contiguous()
            for name, tensor in tensors.items()
            if name.endswith("qzeros")
        }
        save_file({**tensors, **filled}, folder / "model.safetensors", metadata={"format": "pt"})

    store(byte)
    weights = load_pair(str(folder), str(gptq[1])).policy.network.state_dict()
    up = "model.layers.0.mlp.up_proj"
    tensors = load_file(folder / "model.safetensors")
    codes = (tensors[f"{up}.qweight"][:, :, None] >> torch.arange(0, 32, 4)) & 15
    groups = tensors[f"{up}.g_idx"].long()
    expected = (codes.transpose(1, 2).flatten(0, 1) - 8) * tensors[f"{up}.scales"].float()[groups]
    assert torch.equal(weights[f"{up}.weight"], expected.T)
    store(0xFF - byte)
    with pytest.raises(ModelError, match=f"symmetric.*; set checkpoint_format to {other}$"):
        load_pair(str(folder), str(gptq[1]))


def test_a_tensor_in_two_files_has_the_same_contents(source, tmp_path):
    folder = shutil.copytree(source, tmp_path / "twice")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = ["a.safetensors", "b.safetensors"]
    index = {"weight_map": dict.fromkeys(tensors, files[0]) | {"model.norm.weight": files[1]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, **index}))
    norm = tensors.pop("model.norm.weight")
    head = tensors["lm_head.weight"]
    save_file(tensors, folder / files[0], metadata={"format": "pt"})
    save_file({"model.norm.weight": norm, "lm_head.weight": head}, folder / files[1])
    assert np.all(score(load_pair(str(folder), str(source)), [SEQUENCE])["kl_policy_reference"] == 0)
    save_file({"model.norm.weight": norm, "lm_head.weight": 2 * head}, folder / files[1])
    with pytest.raises(ModelError, match=r"a\.safetensors and b\.safetensors hold"):
        load_pair(str(folder), str(source))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"checkpoint_format": "marlin"}, "its checkpoint_format is 'marlin', and not"),
        ({"bits": "four"}, "its bits is 'four'"),
        ({"bits": 8}, "is stored in 4 bits,"),
        ({"group_size": 0}, "its group_size is 0"),
        ({"group_size": 1 << 60}, "its group_size is 1152921504606846976"),
        ({"group_size": 16}, "has 3 groups of scales, and 96 inputs"),
        ({"quant_method": "awq"}, "its version is 'gptq', and not gemm"),
        ({"quant_method": "awq", "version": "marlin"}, "its version is 'marlin'"),
        ({"quant_method": "awq", "version": "gemm", "bits": 3}, "it has 3 bits, and AWQ's layout 4"),
        ({"quant_method": "awq", "version": "gemm"}, "has 12 inputs in groups of 32"),
    ],
)
def test_settings_that_do_not_fit_are_refused(gptq, tmp_path, settings, reason):
    folder = tmp_path / "changed"
    shutil.copytree(gptq[0], folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= settings
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=reason):
        load_pair(str(folder), str(gptq[1]))


def test_packed_weights_run_on_an_accelerator_that_has_the_package(gptq, monkeypatch):
    assert not has_kernels(packed_checkpoint(gptq[0]), torch.device("cuda"))
    monkeypatch.setitem(transformers_formats.KERNEL_PACKAGES, "gptq", "json")
    assert has_kernels(packed_checkpoint(gptq[0]), torch.device("cuda"))
    assert not has_kernels(packed_checkpoint(gptq[0]), torch.device("cpu"))
    assert not has_kernels(packed_checkpoint(gptq[1]), torch.device("cuda"))


@pytest.mark.parametrize("name", ["m", ".*"])
@pytest.mark.parametrize("with_groups", [True, False])
def test_groups_of_single_modules_are_those_of_the_settings_where_the_shapes_allow_others(
    tmp_path, name, with_groups
):
    pack = pack_gptq(4, 96, act_order=False, version=1, with_groups=with_groups)
    tensors, expected = pack(np.random.default_rng(0).normal(size=(32, 192)))
    settings = GPTQ | {"group_size": 128, "dynamic": {name: {"group_size": 96}}}
    write_module(tmp_path, tensors, quantization_config=settings)
    if name == ".*" and not with_groups:
        with pytest.raises(ModelError, match="2 groups of scales for 192 inputs, which may"):
            read_module(tmp_path)
        return
    weight = unpack(read_module(tmp_path), torch.float64)
    np.testing.assert_allclose(weight.numpy(), expected, rtol=1e-12, atol=0)


def test_settings_in_a_file_of_their_own_are_read(gptq, tmp_path):
    folder = tmp_path / "old"
    shutil.copytree(gptq[0], folder)
    config = json.loads((folder / "config.json").read_text())
    settings = config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    plain = {"bits": 4, "group_size": settings["group_size"]}
    (folder / "quantize_config.json").write_text(json.dumps(plain))
    assert np.all(kl_of(folder, gptq[1], "float32") == 0)


def test_a_text_tower_is_unpacked_under_the_names_of_the_composite_model(tmp_path):
    source = save_tower(tmp_path / "source", "gemma3n")  # whole models are as any other
    dense, folder = tmp_path / "dense", tmp_path / "packed"
    settings = {"quant_method": "gptq", "bits": 8, "group_size": -1}
    pack = pack_gptq(8, 1 << 20, act_order=False, version=1)
    save_packed(source, folder, pack, settings, matches=_is_text_projection, dense=dense)
    pair = load_pair(str(folder), str(dense), dtype="float64")
    assert any("packed matrices were unpacked" in note for note in pair.notes)
    assert np.all(score(pair, [SEQUENCE])["kl_policy_reference"] == 0)
    assert score(load_pair(str(folder), str(source)), [SEQUENCE])["kl_policy_reference"].max() > 1e-7


def _is_text_projection(name: str) -> bool:
    is_text = not re.search("vision|visual|audio", name)
    return is_text and name.endswith(
        ("self_attn.o_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight")
    )
