"""HQQ and optimum-quanto checkpoints: weights unpacked without the packages, against their formulas in float64."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packed_checkpoints import save_packed
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny

from kleash.errors import ModelError
from kleash.models import load_pair, score
from kleash.models.quantised import unpacking
from kleash.models.quantised.packed_formats import find_packed_modules
from kleash.models.quantised.packed_modules import TensorReader
from kleash.sources.sequences import TokenSequence

GROUP = 16
Module = tuple[dict[str, np.ndarray], np.ndarray]


def pack_hqq(weight: np.ndarray, bits: int, axis: int) -> Module:
    """Codes of groups of 16 elements, packed from bit strings: equal parts of the table, the first the highest."""
    table = weight.reshape(-1, GROUP) if axis == 1 else weight.reshape(GROUP, -1)
    low, high = table.min(axis, keepdims=True), table.max(axis, keepdims=True)
    scale = ((high - low) / (2**bits - 1)).astype(np.float16)
    zero = (-low / scale.astype(np.float64)).astype(np.float16)
    codes = np.clip(
        np.round(table / scale.astype(np.float64) + zero.astype(np.float64)), 0, 2**bits - 1
    ).astype(int)
    decoded = ((codes - zero.astype(np.float64)) * scale.astype(np.float64)).reshape(weight.shape)
    count = 10 if bits == 3 else 8 // bits
    height = -(-len(codes) // count)
    padded = np.zeros((count * height, codes.shape[1]), int)
    padded[: len(codes)] = codes
    parts = padded.reshape(count, height, -1)
    texts = np.vectorize(lambda *values: int("".join(format(value, f"0{bits}b") for value in values), 2))(
        *parts
    )
    tensors = {
        "W_q": texts.astype(np.int32 if bits == 3 else np.uint8),
        "scale": scale,
        "zero": zero,
        "shape": np.array(weight.shape),
        "nbits": np.array(bits, np.int32),
        "group_size": np.array(GROUP, np.int32),
        "axis": np.array(axis),
        "packing": np.frombuffer(b"4bit_u8", np.uint8),
        "view_as_float": np.array(0, np.uint8),
    }
    return tensors, decoded


def pack_quanto(weight: np.ndarray) -> Module:
    scale = (np.abs(weight).max(1, keepdims=True) / 127).astype(np.float32)
    codes = np.round(weight / scale).astype(np.int8)
    tensors = {
        "weight._data": codes,
        "weight._scale": scale,
        "input_scale": np.ones(()),
        "output_scale": np.ones(()),
    }
    return tensors, codes * scale.astype(np.float64)


def write_module(folder: Path, tensors: dict[str, np.ndarray], method: str) -> Path:
    stored = {f"m.{part}": torch.from_numpy(np.array(value, order="C")) for part, value in tensors.items()}
    save_file(stored, folder / "model.safetensors")
    settings = {"quantization_config": {"quant_method": method}} if method == "hqq" else {}
    (folder / "config.json").write_text(json.dumps(settings))
    if method == "quanto":
        (folder / "quanto_qmap.json").write_text(
            json.dumps({"m": {"weights": "qint8", "activations": "none"}})
        )
    return folder


def unpacked(folder: Path) -> tuple[torch.Tensor, str]:
    packed = find_packed_modules(folder, "the policy")
    assert packed is not None
    with TensorReader(packed.headers) as reader:
        return unpacking.unpack(packed.modules[0], reader, torch.float64), packed.modules[0].kind


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("axis", [0, 1])
def test_groups_of_hqq_are_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bits: int, axis: int
) -> None:
    monkeypatch.setattr(unpacking, "TILE_WEIGHTS", 24 * 7)  # tiles that begin within groups
    tensors, expected = pack_hqq(np.random.default_rng(5).normal(size=(40, 24)), bits, axis)
    weight, kind = unpacked(write_module(tmp_path, tensors, "hqq"))
    np.testing.assert_allclose(weight.numpy(), expected, rtol=1e-15, atol=0)
    assert kind == f"hqq int{bits}, groups of 16"


@pytest.mark.parametrize(
    ("part", "value", "reason"),
    [
        ("zero", None, "has no tensor zero"),
        ("nbits", np.array(5), "has 5 bits, groups of 16 along axis 1"),
        ("axis", np.array(2), "has 4 bits, groups of 16 along axis 2"),
        ("group_size", np.array(-16), "has 4 bits, groups of -16 along axis 1"),
        ("shape", np.array([40, 25]), r"groups of 16 along axis 1 and the shape \[40, 25\]"),
        ("shape", np.array([40, 48]), r"has W_q of shape \[30, 16\] for 120 groups of 16 weights of 4 bits"),
        ("shape", np.array([40]), "has a shape of 1 numbers"),
        ("scale", np.ones((9, 1), np.float16), r"has scale of shape \[9, 1\], and not \[60, 1\]"),
        ("W_q", np.ones((30, 16), np.int32), r"has W_q as I32 \[30, 16\], and not as U8 of 2 dimensions"),
        ("quant_scale", np.array(1), "has quantised scales, which is not read"),
        ("view_as_float", np.array(1), "stores its codes as floating-point numbers, which is not read"),
        ("nbits", np.array([4, 4]), r"has nbits of shape \[2\], and not one number"),
    ],
)
def test_damaged_groups_of_hqq_are_refused(tmp_path: Path, part: str, value: Any, reason: str) -> None:
    tensors, _ = pack_hqq(np.random.default_rng(5).normal(size=(40, 24)), 4, 1)
    tensors.pop(part, None)
    folder = write_module(tmp_path, tensors | ({} if value is None else {part: value}), "hqq")
    with pytest.raises(ModelError, match=f"the policy cannot be unpacked: its module m .*{reason}"):
        unpacked(folder)


def test_weights_of_quanto_with_8_bits_are_unpacked(tmp_path: Path) -> None:
    tensors, expected = pack_quanto(np.random.default_rng(5).normal(size=(40, 24)))
    weight, kind = unpacked(write_module(tmp_path, tensors, "quanto"))
    np.testing.assert_allclose(weight.numpy(), expected, rtol=1e-15, atol=0)
    assert kind == "quanto int8, rows"


def test_weights_of_quanto_with_4_bits_or_without_scales_are_refused(tmp_path: Path) -> None:
    tensors, _ = pack_quanto(np.ones((4, 6)))
    folder = write_module(tmp_path, {"weight._data._data": np.ones((2, 6), np.uint8)}, "quanto")
    with pytest.raises(ModelError, match="its m has weights of 4 or 2 bits, whose shape is not stored"):
        unpacked(folder)
    folder = write_module(tmp_path, {"weight._data": tensors["weight._data"]}, "quanto")
    with pytest.raises(ModelError, match="its module m has no tensor weight_scale"):
        unpacked(folder)


def test_models_are_measured_by_their_unpacked_weights(tmp_path: Path) -> None:
    source = save_tiny(
        tmp_path / "source", hidden_size=64, intermediate_size=96, num_hidden_layers=1, head_dim=16
    )
    ids = [0, 40, 80, 120, 160]
    sequence = TokenSequence(
        prompt_id=0, sample_id=0, prompt_ids=ids[:1], response_ids=ids[1:], prompt_text="", response_text=""
    )
    settings = {"quant_method": "hqq", "quant_config": {}}
    hqq, quanto = tmp_path / "hqq", tmp_path / "quanto"
    save_packed(source, hqq, lambda weight: pack_hqq(weight, 4, 1), settings, dense=tmp_path / "hqq-dense")
    save_packed(source, quanto, pack_quanto, {}, dense=tmp_path / "quanto-dense")
    (quanto / "quanto_qmap.json").write_text("{}")
    for folder in (hqq, quanto):
        pair = load_pair(str(folder), f"{folder}-dense", dtype="float64")
        assert np.all(score(pair, [sequence])["kl_policy_reference"] == 0)
        assert any(f"is quantised ({folder.name}), and its 7 packed matrices" in note for note in pair.notes)
        assert not any("not used by its architecture" in note for note in pair.notes)
        assert score(load_pair(str(folder), str(source)), [sequence])["kl_policy_reference"].min() > 1e-9
    assert "model.layers.0.mlp.up_proj.W_q" in load_file(hqq / "model.safetensors")
