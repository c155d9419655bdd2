"""The layouts of bitsandbytes: codes of 4 bits with scales of blocks, and integers of 8 bits with scales of rows.

4 bits: the elements of a matrix, row after row, are codes of a table of 16 numbers (NF4, FP4), two in a byte with the
first in the upper half. ``absmax`` scales blocks of them. With double quantisation it is itself codes of a table of 256
numbers, scaled in blocks by ``nested_absmax``, less ``nested_offset``.

    W[e] = quant_map[code[e]] absmax[e // blocksize]
    absmax[b] = nested_quant_map[code[b]] nested_absmax[b // nested_blocksize] + nested_offset

8 bits (LLM.int8()): W[o, i] = q[o, i] SCB[o] / 127.

Source: bitsandbytes, ``functional.py`` (``QuantState``, ``dequantize_4bit``, ``int8_vectorwise_dequant``).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from kleash.checkpoints.files import StoredTensor
from kleash.checkpoints.quantised.packed_modules import (
    ModuleTensors,
    PackedModule,
    group_by_module,
    look_up_halves,
    modules_with,
)
from kleash.checkpoints.resolution import Checkpoint
from kleash.store.codec import parse_json

QUANT_STATE = re.compile(r"(.+)\.(weight\.quant_state\.bitsandbytes__\w+)")
"""Name of the tensor that holds the settings of a matrix of 4 bits, as JSON."""
MAX_STATE_BYTES = 4096
TABLE_SIZE, NESTED_TABLE_SIZE = 16, 256
INTEGER_MAX = 127
METHOD = "bitsandbytes"


@dataclass(frozen=True, kw_only=True)
class BlockCodes:
    """The settings of a matrix of 4 bits."""

    kind: str
    """"nf4" or "fp4"."""
    shape: tuple[int, int]
    block_size: int
    nested_block_size: int | None
    """None without double quantisation."""
    nested_offset: float = 0.0


def find_bitsandbytes_modules(checkpoint: Checkpoint) -> list[PackedModule]:
    """The packed modules of a bitsandbytes checkpoint.

    Raises:
        ModelError: if the tensors of a module do not fit together.
    """
    matches = (QUANT_STATE.fullmatch(name) for name in checkpoint.safetensors)
    codes = [(match[1], match[2]) for match in matches if match is not None]
    modules = group_by_module(checkpoint)
    return [
        *(_describe_integers(tensors) for tensors in modules_with(checkpoint, "SCB")),
        *(_describe_codes(checkpoint, modules, name, state) for name, state in codes),
    ]


def _describe_integers(tensors: ModuleTensors) -> PackedModule:
    """A module of 8 bits, after checking the headers of its tensors."""
    rows, columns = tensors.shape("weight", ("I8",))
    tensors.check_shape("SCB", ("F32", "F16", "BF16"), (rows,))
    if "weight_format" in tensors.headers:
        tensors.check_shape("weight_format", ("U8", "I32", "I64"), (), (1,))
        stored_format = int(tensors.read("weight_format"))
        tensors.require(
            stored_format == 0, f"has the weight_format {stored_format}, which only a GPU kernel reads"
        )
    return PackedModule(
        name=tensors.name,
        parameter=tensors.full_name("weight"),
        shape=(rows, columns),
        kind=f"{METHOD} int8, rows",
        parts=tensors.full_names("weight", "SCB", "weight_format"),
        decode=partial(_decode_integers, tensors),
    )


def _decode_integers(tensors: ModuleTensors, dtype: torch.dtype) -> Tensor:
    """The matrix of a module of 8 bits."""
    codes, scales = map(tensors.read, ("weight", "SCB"))
    return codes.to(dtype) * (scales.to(dtype) / INTEGER_MAX)[:, None]


def _describe_codes(
    checkpoint: Checkpoint, modules: Mapping[str, Mapping[str, StoredTensor]], name: str, state: str
) -> PackedModule:
    """A module of 4 bits, after checking the headers of its tensors and its settings."""
    headers = {
        f"{prefix}{part}": header
        for prefix in ("", "weight.", "weight.quant_state.")
        for part, header in modules.get(f"{name}.{prefix}".removesuffix("."), {}).items()
    }
    tensors = ModuleTensors(checkpoint=checkpoint, name=name, headers=headers)
    codes = _read_settings(tensors, state)
    count = codes.shape[0] * codes.shape[1]
    tensors.shape("weight", ("U8", "I8", "BF16", "F16", "F32"), (1, 2))
    size = tensors.headers["weight"].num_bytes
    tensors.require(size == -(-count // 2), f"has {size} bytes for {count} weights of 4 bits")
    blocks = -(-count // codes.block_size)
    tensors.check_shape("weight.quant_map", ("F32", "F16", "BF16"), (TABLE_SIZE,))
    tensors.check_shape("weight.absmax", ("F32",) if codes.nested_block_size is None else ("U8",), (blocks,))
    if codes.nested_block_size is not None:
        tensors.check_shape("weight.nested_quant_map", ("F32",), (NESTED_TABLE_SIZE,))
        tensors.check_shape("weight.nested_absmax", ("F32",), (-(-blocks // codes.nested_block_size),))
    return PackedModule(
        name=name,
        parameter=f"{name}.weight",
        shape=codes.shape,
        kind=f"{METHOD} {codes.kind}, groups of {codes.block_size}",
        parts=tensors.full_names(
            *("weight", "weight.absmax", "weight.quant_map", state),
            *("weight.nested_quant_map", "weight.nested_absmax"),
        ),
        decode=partial(_decode_codes, tensors, codes),
    )


def _read_settings(tensors: ModuleTensors, state: str) -> BlockCodes:
    """The settings of a module of 4 bits, from the JSON in its tensor ``quant_state``.

    Raises:
        ModelError: if they are damaged.
    """
    (length,) = tensors.shape(state, ("U8",), (1,))
    tensors.require(length <= MAX_STATE_BYTES, f"has a quant_state of {length} bytes")
    try:
        values = parse_json(bytes(tensors.read(state).tolist()))
    except ValueError as error:
        raise tensors.error("has a quant_state that is not JSON") from error
    settings: dict[str, Any] = values if isinstance(values, dict) else {}
    shape = settings.get("shape")
    sizes = shape if isinstance(shape, list) else []
    is_nested = "weight.nested_absmax" in tensors.headers
    integers = [*sizes, settings.get("blocksize"), *([settings.get("nested_blocksize")] if is_nested else [])]
    offset = settings.get("nested_offset", 0.0) if is_nested else 0.0
    kind = settings.get("quant_type")
    tensors.require(
        len(sizes) == 2
        and all(type(value) is int and 0 < value < 1 << 40 for value in integers)
        and isinstance(offset, int | float)
        and isfinite(offset)
        and kind in ("nf4", "fp4"),
        f"has the quant_state {settings!r:.150}",
    )
    return BlockCodes(
        kind=str(kind),
        shape=(sizes[0], sizes[1]),
        block_size=settings["blocksize"],
        nested_block_size=settings["nested_blocksize"] if is_nested else None,
        nested_offset=float(offset),
    )


def _decode_codes(tensors: ModuleTensors, codes: BlockCodes, dtype: torch.dtype) -> Tensor:
    """The matrix of a module of 4 bits."""
    packed = tensors.read("weight").reshape(-1).view(torch.uint8)
    table, scales = tensors.read("weight.quant_map").to(dtype), tensors.read("weight.absmax")
    if codes.nested_block_size is not None:
        nested_table = tensors.read("weight.nested_quant_map").to(dtype)
        nested_scales = tensors.read("weight.nested_absmax").to(dtype)
        nested_scales = nested_scales.repeat_interleave(codes.nested_block_size)[: len(scales)]
        scales = nested_table[scales.long()] * nested_scales + codes.nested_offset
    count = codes.shape[0] * codes.shape[1]
    swapped = (packed << 4) | (packed >> 4)  # the first weight of a byte is in its upper half
    weights = look_up_halves(swapped, table)[:count]
    return (weights * scales.to(dtype).repeat_interleave(codes.block_size)[:count]).view(codes.shape)
