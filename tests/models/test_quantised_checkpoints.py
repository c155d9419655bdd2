"""Checkpoints with a ``quantization_config`` that are decoded when they are loaded."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import edit_json, save_tiny

from kleash.errors import ModelError
from kleash.models import live_model, load_pair


def with_settings(source: Path, folder: Path, **settings: Any) -> Path:
    """A copy of a checkpoint with a quantization_config."""
    shutil.copytree(source, folder)
    edit_json(folder / "config.json", quantization_config=settings)
    return folder


def test_matrices_of_8_bits_without_scales_are_named(tmp_path):
    source = save_tiny(tmp_path / "source")
    folder = with_settings(source, tmp_path / "fp8", quant_method="fp8", activation_scheme="dynamic")
    stored = {
        name: weight.to(torch.float8_e4m3fn) if name.endswith("proj.weight") else weight
        for name, weight in load_file(source / "model.safetensors").items()
    }
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="codes that are not decoded here, 14 in all"):
        load_pair(str(folder), str(source))
    shutil.copy(source / "config.json", folder)
    pair = load_pair(str(folder), str(source))
    assert any("has weights in F8_E4M3 without scales, which were read as" in note for note in pair.notes)
    projection = pair.policy.network.model.layers[0].mlp.up_proj
    assert torch.equal(projection.weight, stored["model.layers.0.mlp.up_proj.weight"].float())
    projection.to(torch.float8_e4m3fn)  # as a format's package runs packed weights, in their dtype alone
    with pytest.raises(ModelError, match=r"cannot be run on a few tokens: .*; packed .* --dtype bfloat16"):
        live_model(pair.policy.network, pair.tokenizer)


@pytest.mark.parametrize(
    ("block", "dtype", "kv_cache"),
    [(16, torch.float32, None), (20, torch.bfloat16, None), (20, torch.float8_e8m0fnu, "static")],
)
def test_fp8_blocks_are_decoded_bit_for_bit(tmp_path, block, dtype, kv_cache):
    """Blocks of 20 rows and columns do not divide the matrices, as those of DeepSeek-V3 do not."""
    source = save_tiny(tmp_path / "source")
    settings = {"weight_block_size": [block] * 2, "activation_scheme": "dynamic", "kv_cache_scheme": kv_cache}
    settings |= {"quant_method": "fp8", "modules_to_not_convert": ["lm_head"]}
    folder = with_settings(source, tmp_path / "fp8", **settings)
    stored, decoded = {}, {}
    for name, weight in load_file(source / "model.safetensors").items():
        stored[name] = decoded[name] = weight
        if name.endswith("proj.weight"):
            rows, columns = weight.shape
            scale = torch.rand(-(-rows // block), -(-columns // block)).add(0.5).to(dtype)
            spread = scale.double().repeat_interleave(block, 0).repeat_interleave(block, 1)[:rows, :columns]
            codes = (weight / spread).to(torch.float8_e4m3fn)
            stored |= {name: codes, f"{name}_scale_inv": scale}
            decoded[name] = (codes.double() * spread).float()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    pair = load_pair(str(folder), str(source))
    for name, weight in pair.policy.network.state_dict().items():
        assert torch.equal(weight, decoded[name]), name
    rounded = "activations and the key-value cache" if kv_cache else "activations"
    unpacked = f"is quantised (fp8), and its 14 packed matrices were unpacked; the format also quantises {rounded} in"
    assert any(unpacked in note for note in pair.notes)
    weights = pair.policy.record().weights
    assert weights.modules["model.layers.0-1.mlp.up_proj"] == f"fp8, blocks of {block} x {block}"
    assert weights.bits_per_weight == 8 * weights.bytes / pair.reference.parameters
