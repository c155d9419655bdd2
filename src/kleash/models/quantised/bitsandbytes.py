"""The layouts of bitsandbytes: codes of 4 bits with scales of blocks, and integers of 8 bits with scales of rows.

4 bits: the elements of a matrix, row after row, are codes of a table of 16 numbers (NF4, FP4), two in a byte with the
first in the upper half. ``absmax`` scales blocks of them. With double quantisation it is itself codes of a table of 256
numbers, scaled in blocks by ``nested_absmax``, less ``nested_offset``.

    W[e] = quant_map[code[e]] absmax[e // blocksize]
    absmax[b] = nested_quant_map[code[b]] nested_absmax[b // nested_blocksize] + nested_offset

8 bits (LLM.int8()): W[o, i] = q[o, i] SCB[o] / 127.

Source: bitsandbytes, ``functional.py`` (``QuantState``, ``dequantize_4bit``, ``int8_vectorwise_dequant``).
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from kleash.models.checkpoints.files import StoredTensor
from kleash.models.checkpoints.resolution import Checkpoint
from kleash.models.quantised.integers import look_up_halves
from kleash.models.quantised.packed_modules import (
    ModuleTensors,
    PackedModule,
    RowDecoder,
    group_by_module,
    modules_with,
)

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
        *(_describe_codes(modules, name, state) for name, state in codes),
    ]


def _describe_integers(tensors: ModuleTensors) -> PackedModule:
    """A module of 8 bits, after checking the headers of its tensors."""
    rows, columns = tensors.shape("weight", ("I8",))
    tensors.require(min(rows, columns) > 0, "has an empty weight")
    scales = tensors.shape("SCB", ("F32", "F16", "BF16"), (1,))
    tensors.require(scales == (rows,), f"has {scales[0]} scales SCB for {rows} rows")
    parts = ["weight", "SCB"]
    if "weight_format" in tensors.headers:
        parts.append("weight_format")
        shape = tensors.shape("weight_format", ("U8", "I32", "I64"), (0, 1))
        tensors.require(shape in ((), (1,)), f"has a weight_format of shape {list(shape)}")
        stored_format = int(tensors.read("weight_format"))
        tensors.require(
            stored_format == 0, f"has the weight_format {stored_format}, which only a GPU kernel reads"
        )
    return PackedModule(
        name=tensors.name,
        parameter=tensors.full_name("weight"),
        shape=(rows, columns),
        kind=f"{METHOD} int8, rows",
        parts=tuple(tensors.full_name(part) for part in parts),
        open=partial(_open_integers, tensors),
    )


def _open_integers(tensors: ModuleTensors, dtype: torch.dtype) -> RowDecoder:
    """The decoder of the rows of a module of 8 bits."""
    codes, scales = tensors.read_parts("weight", "SCB")
    factors = scales.to(dtype) / INTEGER_MAX
    return lambda start, stop: codes[start:stop].to(dtype) * factors[start:stop, None]


def _describe_codes(modules: Mapping[str, ModuleTensors], name: str, state: str) -> PackedModule:
    """A module of 4 bits, after checking the headers of its tensors and its settings."""
    headers: dict[str, StoredTensor] = {}
    for prefix in ("", "weight.", "weight.quant_state."):
        module = modules.get(f"{name}.{prefix}".removesuffix("."))
        headers |= {} if module is None else {f"{prefix}{part}": x for part, x in module.headers.items()}
    state_tensors = modules[f"{name}.weight.quant_state"]
    tensors = ModuleTensors(checkpoint=state_tensors.checkpoint, name=name, headers=headers)
    codes = _read_settings(tensors, state)
    parts = ["weight", "weight.absmax", "weight.quant_map", state]
    count = codes.shape[0] * codes.shape[1]
    stored = tensors.shape("weight", ("U8", "I8", "BF16", "F16", "F32"), (1, 2))
    item_bytes = {"U8": 1, "I8": 1, "BF16": 2, "F16": 2, "F32": 4}[tensors.headers["weight"].kind]
    size = torch.Size(stored).numel() * item_bytes
    tensors.require(size == -(-count // 2), f"has {size} bytes for {count} weights of 4 bits")
    blocks = -(-count // codes.block_size)
    _require_size(tensors, "weight.quant_map", TABLE_SIZE, ("F32", "F16", "BF16"))
    if codes.nested_block_size is None:
        _refuse_transposed_scales(tensors, codes)
        _require_size(tensors, "weight.absmax", blocks, ("F32",))
    else:
        _require_size(tensors, "weight.absmax", blocks, ("U8",))
        _require_size(tensors, "weight.nested_quant_map", NESTED_TABLE_SIZE, ("F32",))
        _require_size(tensors, "weight.nested_absmax", -(-blocks // codes.nested_block_size), ("F32",))
        parts += ["weight.nested_quant_map", "weight.nested_absmax"]
    return PackedModule(
        name=name,
        parameter=f"{name}.weight",
        shape=codes.shape,
        kind=f"{METHOD} {codes.kind}, groups of {codes.block_size}",
        parts=tuple(tensors.full_name(part) for part in parts),
        open=partial(_open_codes, tensors, codes),
    )


def _refuse_transposed_scales(tensors: ModuleTensors, codes: BlockCodes) -> None:
    """Refuse scales that bitsandbytes transposed for a kernel of the CPU and saved so, which it reads in another order.

    Raises:
        ModelError: if they are transposed.
    """
    rows, columns = codes.shape
    header = tensors.headers.get("weight.absmax")
    tensors.require(
        header is None or (header.kind, header.shape) != ("BF16", (columns // codes.block_size, rows)),
        "was saved after a forward pass on a CPU, in which bitsandbytes transposed its scales (absmax) and rounded "
        "them to bfloat16; bitsandbytes itself loads other weights from this file. Call save_pretrained before the "
        "first forward pass",
    )


def _require_size(tensors: ModuleTensors, part: str, size: int, dtypes: tuple[str, ...]) -> None:
    """Check that a tensor is a vector of ``size`` numbers."""
    shape = tensors.shape(part, dtypes, (1,))
    tensors.require(shape == (size,), f"has {shape[0]} numbers in {part}, and not {size}")


def _read_settings(tensors: ModuleTensors, state: str) -> BlockCodes:
    """The settings of a module of 4 bits, from the JSON in its tensor ``quant_state``.

    Raises:
        ModelError: if they are damaged.
    """
    (length,) = tensors.shape(state, ("U8",), (1,))
    tensors.require(length <= MAX_STATE_BYTES, f"has a quant_state of {length} bytes")
    try:
        values = json.loads(bytes(tensors.read(state).tolist()))
    except (ValueError, RecursionError) as error:
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


def _open_codes(tensors: ModuleTensors, codes: BlockCodes, dtype: torch.dtype) -> RowDecoder:
    """The decoder of the rows of a module of 4 bits."""
    packed = tensors.read("weight").reshape(-1).view(torch.uint8)
    table = tensors.read("weight.quant_map").to(dtype)
    scales = tensors.read("weight.absmax")
    if codes.nested_block_size is not None:
        nested_table = tensors.read("weight.nested_quant_map").to(dtype)
        nested_scales = tensors.read("weight.nested_absmax").to(dtype)
        blocks = torch.arange(len(scales)) // codes.nested_block_size
        scales = nested_table[scales.long()] * nested_scales[blocks] + codes.nested_offset
    scales = scales.to(dtype)
    columns = codes.shape[1]

    def decode(start: int, stop: int) -> Tensor:
        first, last = start * columns, stop * columns
        stored = packed[first // 2 : -(-last // 2)]
        swapped = (stored << 4) | (stored >> 4)  # the first weight of a byte is in its upper half
        values = look_up_halves(swapped, table)[first % 2 : first % 2 + last - first]
        if columns % codes.block_size == 0:
            blocks = slice(first // codes.block_size, last // codes.block_size)
            return (values.view(-1, codes.block_size) * scales[blocks, None]).view(-1, columns)
        return (values * scales[torch.arange(first, last) // codes.block_size]).view(-1, columns)

    return decode
