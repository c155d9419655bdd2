"""MLX checkpoints: packed by the formulas of its documentation, in numpy, and read as transformers' networks."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packed_checkpoints import FLOATS_4, SEQUENCE, bit_string, read_module, write_module
from safetensors.torch import load_file, save_file
from tiny_architectures import tiny_config
from tiny_models import edit_json, save_tiny, tiny_tokenizer
from tiny_towers import save_tower
from transformers import AutoModelForCausalLM

from kleash.errors import ModelError
from kleash.models import load_pair, score
from kleash.models.filling import unpack

AFFINE = {"group_size": 32, "bits": 4}
NORMS = ("layernorm.weight", "model.norm.weight", ".q_norm.weight", ".k_norm.weight")
Tensors = dict[str, torch.Tensor]
Renaming = Callable[[str], str]


def pack_affine(weight: torch.Tensor, bits: int, group_size: int) -> tuple[Tensors, torch.Tensor]:
    """The tensors of a module [..., columns], and the matrix that they stand for in float64: q scale + bias."""
    groups = weight.double().numpy().reshape(-1, group_size)
    low, high = groups.min(1, keepdims=True), groups.max(1, keepdims=True)
    scales = np.maximum((high - low) / (2**bits - 1), 1e-4).astype(np.float32)
    biases = low.astype(np.float32)
    codes = np.clip(np.round((groups - biases) / scales), 0, 2**bits - 1)
    values = codes * scales.astype(np.float64) + biases.astype(np.float64)
    shape = (*weight.shape[:-1], -1)
    words = bit_string(codes.reshape(-1, weight.shape[-1]), bits).view(np.uint32)
    parts = {"weight": words, "scales": scales, "biases": biases}
    tensors = {part: torch.from_numpy(value.copy()).reshape(shape) for part, value in parts.items()}
    return tensors, torch.from_numpy(values).reshape(weight.shape)


def pack_floats(mode: str) -> tuple[Tensors, torch.Tensor]:
    """Random codes of a mode of floating-point numbers as a module, and the matrix that they stand for."""
    draws = np.random.default_rng(0)
    rows, columns = 40, 64
    group_size = 16 if mode == "nvfp4" else 32
    scales = draws.integers(90, 127, (rows, columns // group_size), dtype=np.uint8)
    if mode == "nvfp4":  # numbers E4M3 instead of exponents
        factors = torch.from_numpy(scales).view(torch.float8_e4m3fn).double().numpy()
    else:
        factors = np.exp2(scales.astype(np.float64) - 127)
    if mode == "mxfp8":
        codes = draws.integers(0, 127, (rows, columns), dtype=np.uint8)
        numbers = torch.from_numpy(codes).view(torch.float8_e4m3fn).double().numpy()
    else:
        codes = draws.integers(0, 16, (rows, columns), dtype=np.uint8)
        numbers = FLOATS_4[codes]
    words = bit_string(codes, 8 if mode == "mxfp8" else 4).view(np.uint32)
    tensors = {"weight": torch.from_numpy(words.copy()), "scales": torch.from_numpy(scales)}
    return tensors, torch.from_numpy(numbers * factors.repeat(group_size, axis=1))


@pytest.mark.parametrize(
    ("bits", "group_size"), [(1, 32), (2, 32), (3, 64), (4, 32), (5, 32), (6, 64), (8, 64)]
)
def test_integers_are_unpacked(tmp_path, bits, group_size):
    weight = torch.randn(40, 192, generator=torch.Generator().manual_seed(bits))
    tensors, values = pack_affine(weight, bits, group_size)
    module = read_module(
        write_module(tmp_path, tensors, quantization={"bits": bits, "group_size": group_size})
    )
    assert torch.equal(unpack(module, torch.float64), values)
    assert module.kind == f"mlx int{bits}, groups of {group_size}"


@pytest.mark.parametrize("mode", ["mxfp4", "nvfp4", "mxfp8"])
def test_small_floats_are_unpacked(tmp_path, mode):
    tensors, values = pack_floats(mode)
    group_size = 16 if mode == "nvfp4" else 32
    settings = {"bits": 8 if mode == "mxfp8" else 4, "group_size": group_size, "mode": mode}
    module = read_module(write_module(tmp_path, tensors, quantization=settings))
    assert torch.equal(unpack(module, torch.float64), values)
    assert module.kind == f"mlx {mode}, groups of {group_size}"


def convert(weights: Tensors, rename: Renaming) -> Tensors:
    """The tensors of a model as mlx-lm names and arranges them: experts stacked, kernels moved, norms shifted."""
    converted = Tensors()
    for name, tensor in weights.items():
        expert = re.fullmatch(r"(.*)\.experts\.\d+\.(\w+)\.weight", name)
        fused = re.fullmatch(r"(.*)\.experts\.(gate_up|down)_proj", name)
        if expert is not None:
            block, part = expert.groups()
            count = sum(key.startswith(f"{block}.experts.") for key in weights) // 3
            part_name = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}.get(part, part)
            converted[rename(f"{block}.switch_mlp.{part_name}.weight")] = torch.stack(
                [weights[f"{block}.experts.{number}.{part}.weight"] for number in range(count)]
            )
        elif fused is not None:
            parts = ("gate_proj", "up_proj") if fused[2] == "gate_up" else ("down_proj",)
            for part, matrices in zip(parts, tensor.chunk(len(parts), dim=1), strict=True):
                converted[rename(f"{fused[1]}.switch_mlp.{part}.weight")] = matrices.contiguous()
        elif name.endswith("conv1d.weight"):
            converted[rename(name)] = tensor.transpose(1, 2).contiguous()
        elif name.endswith(NORMS) and any(key.endswith("conv1d.weight") for key in weights):
            converted[rename(name)] = tensor + 1
        else:
            converted[rename(name)] = tensor
    return converted


def save_mlx(
    source: Path, folder: Path, *, own: dict[str, Any] | None = None, rename: Renaming = str
) -> tuple[Path, Path]:
    """A copy of a checkpoint as mlx-lm converts it, and its dequantised twin; ``own`` settings by MLX's names."""
    weights = {name: x for name, x in load_file(source / "model.safetensors").items() if "vis" not in name}
    settings = {**AFFINE, **(own or {})}

    def settings_of(name: str, tensor: torch.Tensor) -> dict[str, Any] | None:
        is_matrix = tensor.dim() > 1 and tensor.shape[-1] % 32 == 0 and name.endswith((".weight", "_proj"))
        values = settings.get(rename(name).removesuffix(".weight"), AFFINE)
        return values if is_matrix and values is not False and "conv1d" not in name else None

    stored, decoded = Tensors(), Tensors()
    for name, tensor in convert(weights, rename).items():
        values = settings_of(name, tensor)
        module = name.removesuffix(".weight")
        parts = {} if values is None else pack_affine(tensor, values["bits"], values["group_size"])[0]
        stored |= {f"{module}.{part}": packed for part, packed in parts.items()} or {name: tensor}
    for name, tensor in weights.items():
        values = settings_of(name, tensor)
        exact = tensor if values is None else pack_affine(tensor, values["bits"], values["group_size"])[1]
        decoded[name] = exact
    for copy, tensors in ((folder / "mlx", stored), (folder / "dense", decoded)):
        shutil.copytree(source, copy)
        save_file(tensors, copy / "model.safetensors", metadata={"format": "mlx"})
    edit_json(folder / "mlx" / "config.json", quantization=settings, quantization_config=settings)
    return folder / "mlx", folder / "dense"


def require_equal(folder: Path, dense: Path) -> Any:
    """Check that the networks of two checkpoints have equal parameters; return the first model."""
    pair = load_pair(str(folder), str(dense), dtype="float64")
    expected = pair.reference.network.state_dict()
    for name, weight in pair.policy.network.state_dict().items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-7, msg=name)
    return pair


def test_a_model_with_a_tied_embedding_and_settings_of_single_modules(tmp_path):
    source = save_tiny(tmp_path / "source", "qwen3", hidden_size=64, intermediate_size=96)
    own = {
        "model.embed_tokens": {"group_size": 64, "bits": 6},
        "model.layers.0.self_attn.q_proj": {"group_size": 32, "bits": 8},
        "model.layers.1.mlp.up_proj": False,
    }
    folder, dense = save_mlx(source, tmp_path, own=own)
    pair = require_equal(folder, dense)
    assert np.all(score(pair, [SEQUENCE])["kl_policy_reference"] == 0)
    assert pair.policy.parameters == pair.reference.parameters
    assert pair.policy.weights.modules["model.embed_tokens"] == "mlx int6, groups of 64"
    assert pair.policy.weights.modules["model.layers.1.mlp.up_proj"] == "F32"
    assert any("is quantised (mlx), and its 14 packed matrices were unpacked" in note for note in pair.notes)
    assert score(load_pair(str(folder), str(source)), [SEQUENCE])["kl_policy_reference"].min() > 1e-6


@pytest.mark.parametrize("architecture", ["mixtral", "qwen2_moe", "qwen3_next"])
def test_stacked_experts_moved_kernels_and_shifted_norms(tmp_path, architecture):
    config = tiny_config(architecture)
    config.initializer_range = 0.2
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weight in network.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    network.save_pretrained(tmp_path / "source")
    tiny_tokenizer().save_pretrained(tmp_path / "source")
    require_equal(*save_mlx(tmp_path / "source", tmp_path))


@pytest.mark.parametrize("family", ["qwen3_5_moe", "gemma3"])
def test_a_text_tower_has_the_names_of_mlx(tmp_path, family):
    def rename(name: str) -> str:
        inner = name.replace("model.language_model.", "model.")
        return inner if inner.startswith("language_model.") else f"language_model.{inner}"

    source = save_tower(tmp_path / "source", family, apart=0.1)
    require_equal(*save_mlx(source, tmp_path, rename=rename))


@pytest.mark.parametrize(
    ("change", "part", "reason"),
    [
        ({"mode": "mxfp3"}, "", r"its mode is 'mxfp3' of 4 bits"),
        ({"bits": 7.5}, "", r"its bits is 7.5"),
        ({"bits": 8}, "", r"24 words in a row and scales of \[40, 6\]"),
        ({"mode": "mxfp4"}, "", r"has scales as F32 \[40, 6\], and not as non-empty U8"),
        ({}, "biases", r"has no tensor biases"),
    ],
)
def test_settings_and_tensors_that_do_not_fit_are_refused(tmp_path, change, part, reason):
    tensors, _ = pack_affine(torch.randn(40, 192), 4, 32)
    with pytest.raises(ModelError, match=reason):
        tensors.pop(part, None)
        unpack(read_module(write_module(tmp_path, tensors, quantization=AFFINE | change)), torch.float64)


def test_an_architecture_whose_weights_mlx_changes_is_refused(tmp_path):
    write_module(tmp_path, {"weight": torch.zeros(2, 2)}, model_type="falcon_h1", quantization=AFFINE)
    with pytest.raises(ModelError, match="mlx-lm changes weights of falcon_h1"):
        read_module(tmp_path)
