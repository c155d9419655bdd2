"""bitsandbytes checkpoints: weights unpacked without the package, and what transformers is left with."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packed_checkpoints import FLOATS_4, SEQUENCE, read_module, save_packed, write_module
from safetensors.torch import load_file, save_file
from tiny_models import edit_json, save_tiny, tiny_adapter
from torch._dynamo.utils import counters as dynamo_counters
from transformers import AutoModelForCausalLM, GptOssConfig

from kleash.checkpoints.resolution import find_checkpoint
from kleash.errors import ModelError
from kleash.models import load_pair, score
from kleash.models.filling import unpack
from kleash.models.model_building import describe_weights
from kleash.models.shared_base import LoadedNetwork

ROWS, COLUMNS = 30, 35
"""An odd number of columns, so that rows begin within a byte and blocks within a row."""
BITSANDBYTES = {"quant_method": "bitsandbytes", "load_in_4bit": True}
# Quantiles of a normal distribution, scaled to [-1, 1]: Dettmers et al. 2023, appendix E.
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023),
    1.0,
)
Module = tuple[dict[str, np.ndarray], np.ndarray]


def pack_codes(weight: np.ndarray, *, nested: bool = False, kind: str = "nf4", **changes: Any) -> Module:
    """NF4 codes of blocks of 16 elements, two in a byte with the first in the upper half; nested scales of 8 blocks."""
    table = np.array(NF4, np.float32).astype(np.float64)
    blocks = -(-weight.size // 16)
    flat = np.zeros(16 * blocks)
    flat[: weight.size] = weight.reshape(-1)
    scales = np.abs(flat.reshape(-1, 16)).max(1).astype(np.float32)
    state = {"quant_type": kind, "blocksize": 16, "dtype": "float32", "shape": list(weight.shape)}
    tensors = {"weight.absmax": scales, "weight.quant_map": np.array(NF4, np.float32)}
    values = scales.astype(np.float64)
    if nested:
        codes_of_scales = np.arange(256, dtype=np.float32) / 255
        offset = float(scales.mean())
        groups = -(-blocks // 8)
        nested_scales = np.linspace(0.5, 1.5, groups).astype(np.float32)
        stored = np.random.default_rng(3).integers(0, 256, size=blocks).astype(np.uint8)
        factors = np.repeat(nested_scales.astype(np.float64), 8)[:blocks]
        values = codes_of_scales.astype(np.float64)[stored] * factors + offset
        tensors |= {"weight.absmax": stored, "weight.nested_absmax": nested_scales}
        tensors["weight.nested_quant_map"] = codes_of_scales
        state |= {"nested_blocksize": 8, "nested_dtype": "float32", "nested_offset": offset}
    codes = np.abs(flat.reshape(-1, 16)[:, :, None] / values[:, None, None] - table).argmin(-1).reshape(-1)
    decoded = (table[codes] * np.repeat(values, 16))[: weight.size].reshape(weight.shape)
    pairs = np.append(codes[: weight.size], [0] * (weight.size % 2)).reshape(-1, 2)
    tensors["weight"] = (16 * pairs[:, :1] + pairs[:, 1:]).astype(np.uint8)
    name = f"weight.quant_state.bitsandbytes__{kind}"
    tensors[name] = np.frombuffer(json.dumps(state | changes).encode(), np.uint8).copy()
    return tensors, decoded


def pack_integers(weight: np.ndarray) -> Module:
    """LLM.int8(): rows of int8 with their largest absolute value."""
    largest = np.abs(weight).max(1).astype(np.float32)
    codes = np.round(weight * 127 / largest[:, None]).astype(np.int8)
    tensors = {"weight": codes, "SCB": largest, "weight_format": np.zeros((), np.uint8)}
    return tensors, codes * largest.astype(np.float64)[:, None] / 127


@pytest.mark.parametrize(
    ("pack", "kind"),
    [
        (pack_codes, "bitsandbytes nf4, groups of 16"),
        (lambda weight: pack_codes(weight, nested=True), "bitsandbytes nf4, groups of 16"),
        (pack_integers, "bitsandbytes int8, rows"),
    ],
)
def test_codes_of_bitsandbytes_are_unpacked(tmp_path, pack, kind):
    tensors, expected = pack(np.random.default_rng(1).normal(size=(ROWS, COLUMNS)))
    module = read_module(write_module(tmp_path, tensors, quantization_config=BITSANDBYTES))
    np.testing.assert_allclose(unpack(module, torch.float64).numpy(), expected, rtol=1e-12, atol=0)
    assert module.kind == kind


def refused(folder: Path, tensors: dict[str, Any]) -> None:
    unpack(read_module(write_module(folder, tensors, quantization_config=BITSANDBYTES)), torch.float64)


@pytest.mark.parametrize(
    ("part", "value", "reason"),
    [
        ("weight.absmax", np.ones(3, np.float32), r"has weight.absmax of shape \[3\], and not \[66\]"),
        (
            "weight.quant_map",
            np.ones(256, np.float32),
            r"has weight.quant_map of shape \[256\], and not \[16\]",
        ),
        ("weight.quant_map", None, "has no tensor weight.quant_map"),
        ("weight", np.ones((9, 1), np.uint8), "has 9 bytes for 1050 weights of 4 bits"),
        ("weight.quant_state.bitsandbytes__nf4", np.frombuffer(b"{", np.uint8), "has a quant_state that is"),
        ("weight.quant_state.bitsandbytes__nf4", np.zeros(9999, np.uint8), "has a quant_state of 9999 bytes"),
        ("blocksize", 0, "has the quant_state .*'blocksize': 0"),
        ("shape", [2**50, 2], "has the quant_state"),
    ],
)
def test_damaged_codes_are_refused(tmp_path, part, value, reason):
    changes = {} if part.startswith("weight") else {part: value}
    tensors, _ = pack_codes(np.random.default_rng(1).normal(size=(ROWS, COLUMNS)), **changes)
    if not changes:
        del tensors[part]
        tensors |= {} if value is None else {part: value.copy()}
    with pytest.raises(ModelError, match=f"cannot be unpacked: its module m {reason}"):
        refused(tmp_path, tensors)


@pytest.mark.parametrize("columns", [16, 48])
def test_scales_that_bitsandbytes_transposed_on_a_cpu_are_refused(tmp_path, columns):
    tensors, _ = pack_codes(np.random.default_rng(1).normal(size=(32, columns)))
    transposed = torch.from_numpy(tensors["weight.absmax"]).view(32, -1).T.bfloat16()
    with pytest.raises(ModelError, match="absmax as BF16"):
        refused(tmp_path, tensors | {"weight.absmax": transposed})


def test_damaged_integers_are_refused(tmp_path):
    tensors, _ = pack_integers(np.ones((4, 6)))
    with pytest.raises(ModelError, match="has the weight_format 2, which only a GPU"):
        refused(tmp_path, tensors | {"weight_format": np.array(2, np.uint8)})
    with pytest.raises(ModelError, match=r"has SCB of shape \[3\], and not \[4\]"):
        refused(tmp_path, tensors | {"SCB": np.ones(3, np.float32)})


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bnb") / "source"
    return save_tiny(folder, hidden_size=64, intermediate_size=96, num_hidden_layers=1, head_dim=16)


@pytest.mark.parametrize(
    ("pack", "settings"),
    [
        (lambda weight: pack_codes(weight, nested=True), BITSANDBYTES),
        (pack_integers, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    ],
)
def test_a_model_of_bitsandbytes_is_measured_by_its_weights_also_under_an_adapter(
    source, tmp_path, pack, settings
):
    dense = tmp_path / "dense"
    folder = save_packed(source, tmp_path / "packed", pack, settings, dense=dense)
    pair = load_pair(str(folder), str(dense), dtype="float64")
    for name, weight in pair.policy.network.state_dict().items():
        torch.testing.assert_close(weight, pair.reference.network.state_dict()[name], rtol=1e-12, atol=0)
    assert np.abs(score(pair, [SEQUENCE])["kl_policy_reference"]).max() < 1e-12
    assert pair.policy.parameters == pair.reference.parameters
    note = next(note for note in pair.notes if "bitsandbytes" in note)
    assert ("also quantises activations" in note) == settings.get("load_in_8bit", False)
    adapter = tiny_adapter(tmp_path / "adapter", dense, base_name=str(folder))
    adapted = load_pair(str(adapter), str(folder))
    assert adapted.policy.network is adapted.reference.network
    assert score(adapted, [SEQUENCE])["kl_policy_reference"].min() > 1e-4


def test_experts_of_gpt_oss_in_mxfp4_are_decoded_by_transformers(tmp_path):
    pytest.importorskip("torch", "2.11", "the grouped product of older ones differs between calls")
    source = save_tiny(tmp_path / "source")
    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=320, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=2, num_experts_per_tok=1, max_position_embeddings=128,
        bos_token_id=0, eos_token_id=1, pad_token_id=2, initializer_range=0.3,
    )  # fmt: skip
    dense, packed = tmp_path / "dense", tmp_path / "packed"
    network = AutoModelForCausalLM.from_config(config)
    table = torch.from_numpy(FLOATS_4)
    tensors: dict[str, torch.Tensor] = {}
    state = network.state_dict()
    for name, weight in state.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            tensors[name] = weight
            continue
        experts, inputs, outputs = weight.shape  # files have outputs before inputs, in blocks of 32 inputs
        codes = torch.randint(16, (experts, outputs, inputs // 32, 32))
        exponents = torch.randint(121, 126, (experts, outputs, inputs // 32))
        tensors[f"{name}_blocks"] = (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8)
        tensors[f"{name}_scales"] = exponents.to(torch.uint8)
        values = table[codes] * torch.exp2(exponents - 127.0)[..., None]
        state[name].copy_(values.flatten(2).transpose(1, 2))
    for folder in (dense, packed):
        network.save_pretrained(folder)
        for path in source.glob("*token*"):
            (folder / path.name).write_bytes(path.read_bytes())
    save_file(tensors, packed / "model.safetensors", metadata={"format": "pt"})
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    edit_json(packed / "config.json", quantization_config=settings)
    pair = load_pair(str(packed), str(dense))
    for name, weight in pair.policy.network.state_dict().items():
        assert torch.equal(weight, pair.reference.network.state_dict()[name]), name
    assert np.all(score(pair, [SEQUENCE])["kl_policy_reference"] == 0)
    assert any("is quantised (mxfp4), and its weights were decoded" in note for note in pair.notes)
    weights = pair.policy.record().weights
    assert weights.modules["model.layers.0.mlp.experts.gate_up_proj_blocks"] == "mxfp4 (U8)"
    codes, scales = (f"model.layers.0.mlp.experts.gate_up_proj_{part}" for part in ("blocks", "scales"))
    for damaged in (
        {**tensors, codes: tensors[codes][:, :, :1].contiguous()},
        {name: tensor for name, tensor in tensors.items() if name != scales},
        {name: tensor for name, tensor in tensors.items() if name != codes},
    ):
        save_file(damaged, packed / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ModelError, match=r"cannot be loaded|lacks"):
            load_pair(str(packed), str(dense))


@pytest.mark.parametrize("method", ["hqq", "torchao", "exl3"])
def test_a_format_that_cannot_be_loaded_is_named(source, tmp_path, method):
    def pack(weight: np.ndarray) -> Module:
        return {"_weight_qdata": weight.astype(np.int8)}, weight  # as torchao calls it

    folder = save_packed(source, tmp_path / "packed", pack, {"quant_method": method})
    with pytest.raises(ModelError, match=rf"it is quantised \({method}\).* save it dequantised"):
        load_pair(str(folder), str(source))
    loaded = LoadedNetwork(network=None, parameters=1000)
    stored = describe_weights(find_checkpoint(str(folder)), loaded)
    assert stored.types == f"{method} (I8) and F32" and stored.bits_per_weight == 8 * stored.bytes / 1000


@pytest.mark.parametrize(
    ("settings", "dtype"), [(None, torch.int8), ({"quant_method": "ptpc_fp8"}, torch.float8_e4m3fn)]
)
def test_codes_that_nothing_decodes_are_no_weights(source, tmp_path, settings, dtype):
    folder = shutil.copytree(source, tmp_path / "codes")
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    scale = tensors[name].abs().amax(1, keepdim=True) / 100
    tensors |= {name: (tensors[name] / scale).to(dtype), f"{name}_scale": scale}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    edit_json(folder / "config.json", quantization_config=settings)
    advice = "names no quantisation" if settings is None else r"it is quantised \(ptpc_fp8\)"
    with pytest.raises(ModelError, match=rf"codes that are not decoded here, 1 in all, .*{name}.*{advice}"):
        load_pair(str(folder), str(source))


def test_one_matrix_without_its_scales_is_refused(source, tmp_path):
    def pack(weight: np.ndarray) -> Module:
        scale = np.ones((len(weight), 1), np.float32)
        return {"weight": weight.astype(np.int8), "weight_scale": scale}, weight

    settings = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    settings |= {"config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8}}}}
    folder = save_packed(source, tmp_path / "packed", pack, settings)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight_scale"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"up_proj\.weight \(I8\)"):
        load_pair(str(folder), str(source))


def test_ordinary_weights_with_settings_of_a_quantisation_are_read_and_named(source, tmp_path):
    folder = shutil.copytree(source, tmp_path / "dense")
    edit_json(folder / "config.json", quantization_config={"quant_method": "exl3"})
    pair = load_pair(str(folder), str(source))
    assert any("its files hold ordinary weights, which were read as they are" in note for note in pair.notes)


def test_bitnet_counts_its_packed_weights_and_says_that_activations_are_rounded(source, tmp_path):
    compiled = dict(dynamo_counters["frames"])

    def pack(weight: np.ndarray) -> Module:
        scale = 1 / np.abs(weight).mean()
        codes = np.clip(np.round(weight * scale), -1, 1).astype(np.int64) + 1
        rows = len(codes) // 4
        packed = sum(codes[part * rows : (part + 1) * rows] << 2 * part for part in range(4))
        parts = {"weight": packed.astype(np.uint8), "weight_scale": np.array([scale], np.float32)}
        return parts, (codes - 1) / scale

    settings = {"quant_method": "bitnet", "linear_class": "bitlinear", "quantization_mode": "offline"}
    folder = save_packed(source, tmp_path / "packed", pack, settings, dense=tmp_path / "dense")
    pair = load_pair(str(folder), str(tmp_path / "dense"))
    assert pair.policy.parameters == pair.reference.parameters
    assert any("its layers round activations to 8 bits" in note for note in pair.notes)
    inputs = torch.randn(5, pair.reference.network.model.layers[0].mlp.up_proj.in_features)
    outputs = [model.network.model.layers[0].mlp.up_proj(inputs) for model in (pair.policy, pair.reference)]
    assert (outputs[0] - outputs[1]).abs().max() < 0.02 * outputs[1].abs().max()
    assert dynamo_counters["frames"] == compiled, "nothing is compiled, which needs a compiler for C++"
