"""The layout of HQQ: codes of 1, 2, 3, 4 or 8 bits with scales and zero points of groups of consecutive elements.

The elements of a matrix, row after row, are a table whose rows (axis 1) or columns (axis 0) are groups:

    W = (q - zero) scale, reshaped

The table is packed along its rows: an item of ``W_q`` [packed rows, columns] holds one element of each of several
equally high parts of the table, the first part in the highest bits. 8 / bits parts are in a byte; with 3 bits, 10 are
in a word of 32 bits, and the last part may be padded.

Source: hqq, ``core/quantize.py`` (``Quantizer.dequantize``) and ``core/bitpack.py``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kleash.models.quantised.packed_modules import ModuleTensors, PackedModule, RowDecoder, TensorReader

PARTS = {1: 8, 2: 4, 3: 10, 4: 2, 8: 1}
"""Bits → elements in an item of ``W_q``."""
SCALE_TYPES = ("F16", "BF16", "F32")
FLAG_TYPES = ("BOOL", "U8", "I32", "I64")
UNREAD_FLAGS = {
    "quant_scale": "has quantised scales",
    "quant_zero": "has quantised zero points",
    "view_as_float": "stores its codes as floating-point numbers",
}
OPTIONAL_PARTS = (
    *("packing", "unpack_view_dtype", "compute_dtype", "offload_meta", "encoded_state_dict"),
    *("stores_quant_config", "channel_wise", "optimize", "round_zero", *UNREAD_FLAGS),
)
"""Tensors of settings that do not change the weights."""


@dataclass(frozen=True, kw_only=True)
class GroupTable:
    """The table of groups that a matrix is stored as."""

    bits: int
    rows: int
    columns: int
    axis: int
    """1 if rows are groups, 0 if columns are."""


def find_hqq_modules(modules: Mapping[str, ModuleTensors], reader: TensorReader) -> list[PackedModule]:
    """The modules that are stored in the layout of HQQ: those with a tensor ``W_q``.

    Args:
        modules: the tensors of the checkpoint by module.
        reader: of the checkpoint, for the tensors that hold settings.

    Raises:
        ModelError: if the tensors of a module do not fit together.
    """
    return [_describe_module(tensors, reader) for tensors in modules.values() if "W_q" in tensors.headers]


def _describe_module(tensors: ModuleTensors, reader: TensorReader) -> PackedModule:
    """A module, after checking its settings and the headers of its tensors."""
    bits, group_size, axis = (_read_number(tensors, reader, part) for part in ("nbits", "group_size", "axis"))
    for flag, meaning in UNREAD_FLAGS.items():
        tensors.require(
            flag not in tensors.headers or _read_number(tensors, reader, flag) == 0,
            f"{meaning}, which is not read",
        )
    length = tensors.shape("shape", ("I32", "I64"), (1,))
    tensors.require(length == (2,), f"has a shape of {length[0]} numbers")
    rows, columns = (int(size) for size in reader.read(tensors.full_name("shape")))
    tensors.require(
        bits in PARTS
        and axis in (0, 1)
        and min(rows, columns, group_size) > 0
        and rows * columns % group_size == 0,
        f"has {bits} bits, groups of {group_size} along axis {axis} and the shape {[rows, columns]}",
    )
    groups = rows * columns // group_size
    table = GroupTable(
        bits=bits,
        rows=groups if axis == 1 else group_size,
        columns=group_size if axis == 1 else groups,
        axis=axis,
    )
    packed = tensors.shape("W_q", ("I32",) if bits == 3 else ("U8",))
    tensors.require(
        packed == (-(-table.rows // PARTS[bits]), table.columns),
        f"has W_q of shape {list(packed)} for {groups} groups of {group_size} weights of {bits} bits",
    )
    for part in ("scale", "zero"):
        shape = tensors.shape(part, SCALE_TYPES)
        expected = (groups, 1) if axis == 1 else (1, groups)
        tensors.require(shape == expected, f"has {part} of shape {list(shape)}, and not {list(expected)}")
    parts = ("W_q", "scale", "zero", "shape", "nbits", "group_size", "axis")
    return PackedModule(
        name=tensors.name,
        parameter=f"{tensors.name}.weight",
        shape=(rows, columns),
        kind=f"hqq int{bits}, groups of {group_size}",
        parts=tuple(
            tensors.full_name(part) for part in (*parts, *(set(OPTIONAL_PARTS) & set(tensors.headers)))
        ),
        open=partial(_open, tensors, table, columns),
    )


def _read_number(tensors: ModuleTensors, reader: TensorReader, part: str) -> int:
    """A setting that is stored as a tensor of one integer.

    Raises:
        ModelError: if it is none.
    """
    shape = tensors.shape(part, FLAG_TYPES, (0, 1))
    tensors.require(shape in ((), (1,)), f"has {part} of shape {list(shape)}, and not one number")
    return int(reader.read(tensors.full_name(part)))


def _open(
    tensors: ModuleTensors, table: GroupTable, columns: int, reader: TensorReader, dtype: torch.dtype
) -> RowDecoder:
    """The decoder of a module's rows."""
    packed = reader.read(tensors.full_name("W_q"))
    scales, zeros = (reader.read(tensors.full_name(part)).to(dtype) for part in ("scale", "zero"))
    mask = (1 << table.bits) - 1

    def decode(start: int, stop: int) -> Tensor:
        first_row, last_row = start * columns // table.columns, -(-stop * columns // table.columns)
        places = torch.arange(first_row, last_row)
        shifts = table.bits * (PARTS[table.bits] - 1 - places // len(packed))
        codes = (packed[places % len(packed)].int() >> shifts[:, None].int()) & mask
        groups = slice(first_row, last_row) if table.axis == 1 else slice(None)
        values = ((codes.to(dtype) - zeros[groups]) * scales[groups]).view(-1)
        offset = start * columns - first_row * table.columns
        return values[offset : offset + (stop - start) * columns].view(-1, columns)

    return decode
