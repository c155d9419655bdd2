"""Checkpoints with a ``quantization_config`` that are decoded when they are loaded."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny

from kleash.models import load_pair

BLOCK = 16


def with_settings(source: Path, folder: Path, **settings: Any) -> Path:
    """A copy of a checkpoint with a quantization_config."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return folder


def test_fp8_blocks_are_decoded_bit_for_bit(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "source")
    folder = with_settings(
        source,
        tmp_path / "fp8",
        quant_method="fp8",
        weight_block_size=[BLOCK, BLOCK],
        activation_scheme="dynamic",
        modules_to_not_convert=["lm_head"],
    )
    stored, decoded = {}, {}
    for name, weight in load_file(source / "model.safetensors").items():
        stored[name] = decoded[name] = weight
        if name.endswith("proj.weight"):
            blocks = weight.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
            scale = blocks.abs().amax((1, 3)) / 448
            codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
            stored |= {name: codes.reshape(weight.shape), f"{name}_scale_inv": scale}
            decoded[name] = (codes.float() * scale[:, None, :, None]).reshape(weight.shape)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    pair = load_pair(str(folder), str(source))
    for name, weight in pair.policy.network.state_dict().items():
        assert torch.equal(weight, decoded[name]), name
    assert any("is quantised (fp8), and its weights were decoded" in note for note in pair.notes)
    weights = pair.policy.record().weights
    assert weights is not None
    assert weights.modules["model.layers.0-1.mlp.up_proj"] == "fp8 (F8_E4M3)"
    assert weights.bits_per_weight == 8 * weights.bytes / pair.reference.parameters
