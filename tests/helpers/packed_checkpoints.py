"""Checkpoints in the layouts of GPTQ and AWQ, packed bit by bit from the published formulas, in numpy."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from scoring_cases import sequence_of
from tiny_models import edit_json

from kleash.checkpoints.quantised.packed_formats import find_packed_modules
from kleash.checkpoints.resolution import Checkpoint

Packer = Callable[[np.ndarray], tuple[dict[str, np.ndarray], np.ndarray]]
"""Packs a float64 matrix; returns the tensors of a module, and the matrix that they stand for, exact in float32."""


IDS = [0, 40, 80, 120, 160, 200, 240, 33]
SEQUENCE = sequence_of(IDS[:1], IDS[1:])
FLOATS_4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
"""The numbers E2M1 by their codes."""


def write_module(folder: Path, tensors: dict[str, Any], **settings: Any) -> Path:
    """A folder with the tensors, of numpy or torch, of the module "m", and the settings of its quantisation."""
    stored = {f"m.{part}": torch.as_tensor(value).contiguous() for part, value in tensors.items()}
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def read_module(folder: Path) -> Any:
    """The only packed module of a folder."""
    (module,) = find_packed_modules(packed_checkpoint(folder)).modules
    return module


def packed_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint in a folder, as the policy; its files may be those of one matrix alone."""
    return Checkpoint(role="policy", name=str(folder), folder=folder)


def bit_string(values: np.ndarray, bits: int) -> np.ndarray:
    """Rows of unsigned integers as int32 words, whose bits are those of the integers one after the other."""
    rows = []
    for row in values:
        text = "".join(format(int(value), f"0{bits}b")[::-1] for value in row)
        text += "0" * (-len(text) % 32)
        rows.append([int(text[start : start + 32][::-1], 2) for start in range(0, len(text), 32)])
    return np.array(rows, dtype=np.uint32).view(np.int32)


def quantise(
    weight: np.ndarray, bits: int, group_of: np.ndarray, *, zeros_from: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes [rows, columns], zero points and float16 scales [groups, rows] of a matrix [rows, columns]."""
    groups = int(group_of.max()) + 1
    most = 2**bits - 1
    scales, zeros = np.zeros((groups, len(weight)), np.float16), np.zeros((groups, len(weight)), np.int64)
    codes = np.zeros(weight.shape, np.int64)
    for group in range(groups):
        part = weight[:, group_of == group]
        low, high = part.min(1), part.max(1)
        scales[group] = np.maximum((high - low) / most, 1e-3).astype(np.float16)
        zeros[group] = np.clip(np.round(-low / scales[group].astype(np.float64)), zeros_from, most)
        codes[:, group_of == group] = np.clip(
            np.round(part / scales[group].astype(np.float64)[:, None]) + zeros[group][:, None], 0, most
        )
    return codes, zeros, scales


def dequantised(codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, group_of: np.ndarray) -> np.ndarray:
    """The matrix in float64: (codes - zeros) scales of each input's group."""
    return (codes - zeros[group_of].T) * scales.astype(np.float64)[group_of].T


def pack_gptq(
    bits: int, group_size: int, *, act_order: bool, version: int, with_groups: bool = True
) -> Packer:
    """GPTQ's packing: q along the inputs, zero points along the outputs, less one in version 1."""

    def pack(weight: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
        columns = weight.shape[1]
        group_of = np.arange(columns) // group_size
        if act_order:
            group_of = np.random.default_rng(columns).permutation(group_of)
        codes, zeros, scales = quantise(weight, bits, group_of, zeros_from=1 if version == 1 else 0)
        tensors = {
            "qweight": bit_string(codes, bits).T.copy(),
            "qzeros": bit_string(zeros - (1 if version == 1 else 0), bits),
            "scales": scales,
        }
        if with_groups:
            tensors["g_idx"] = group_of.astype(np.int32)
        return tensors, dequantised(codes, zeros, scales, group_of)

    return pack


def pack_awq(group_size: int) -> Packer:
    """AWQ's packing "gemm": along the outputs in the order 0, 2, 4, 6, 1, 3, 5, 7."""

    def pack(weight: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
        group_of = np.arange(weight.shape[1]) // group_size
        codes, zeros, scales = quantise(weight, 4, group_of)
        order = np.concatenate([np.array([0, 2, 4, 6, 1, 3, 5, 7]) + 8 * i for i in range(len(weight) // 8)])
        tensors = {
            "qweight": bit_string(codes.T[:, order], 4),
            "qzeros": bit_string(zeros[:, order], 4),
            "scales": scales,
        }
        return tensors, dequantised(codes, zeros, scales, group_of)

    return pack


def save_packed(
    source: Path,
    folder: Path,
    pack: Packer,
    settings: dict[str, Any],
    *,
    matches: Callable[[str], bool] = lambda name: name.endswith("proj.weight"),
    dense: Path | None = None,
) -> Path:
    """A copy of a checkpoint with packed matrices and a quantization_config; ``dense`` gets their dequantised twin."""
    shutil.copytree(source, folder)
    stored: dict[str, torch.Tensor] = {}
    decoded: dict[str, torch.Tensor] = {}
    for name, weight in load_file(source / "model.safetensors").items():
        if not matches(name):
            stored[name] = decoded[name] = weight
            continue
        tensors, values = pack(weight.double().numpy())
        module = name.removesuffix(".weight")
        stored |= {f"{module}.{part}": torch.from_numpy(tensor.copy()) for part, tensor in tensors.items()}
        decoded[name] = torch.from_numpy(values)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    edit_json(folder / "config.json", quantization_config=settings)
    if dense is not None:
        shutil.copytree(source, dense)
        exact = {name: tensor.contiguous() for name, tensor in decoded.items()}
        save_file(exact, dense / "model.safetensors", metadata={"format": "pt"})
    return folder
