"""Weights that are stored as integers or small floating-point numbers beside scales, as compressed-tensors does.

    W[o, i] = (q[o, i] - zeros[b]) scale[b],   b = the block that (o, i) is in

The blocks are the whole matrix, rows, groups of columns in a row, or rectangles, as the shape of the scales says.

| tensors | q |
| --- | --- |
| ``weight_packed`` (I32), ``weight_shape`` | integers of 1 to 8 bits without gaps along a row, plus 2^(bits - 1) |
| ``weight_packed`` or ``weight`` (U8) | pairs of 4-bit floating-point numbers E2M1, the first in the lower bits |
| ``weight`` (I8, F8_E4M3, F8_E5M2) | the numbers themselves |

The scales are ``weight_scale``, or ``weight_scale_inv`` in fine-grained FP8, which are factors as well. Scales stored
as U8 or F8_E8M0 are powers of two, 2^(s - 127). Those of 4-bit floating-point numbers are divided by
``weight_global_scale``, or multiplied by ``weight_scale_2`` (ModelOpt). ModelOpt's AWQ multiplies the inputs of a
matrix by ``pre_quant_scale``, which are factors of its columns here.

Source: compressed-tensors, ``compressors/``; NVIDIA ModelOpt, ``export/quant_utils.py``; DeepSeek-V3,
``inference/fp8_cast_bf16.py``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kleash.checkpoints.quantised.packed_modules import (
    ModuleTensors,
    PackedModule,
    UnsupportedLayoutError,
    check_modelopt_algorithms,
    modules_with,
    read_block,
    read_group_size,
    read_integer,
    read_object,
    read_weight_groups,
    scale_groups,
    unpack_float_4,
    unpack_words,
    words_of,
)
from kleash.checkpoints.resolution import Checkpoint

INTEGER_TYPES, FLOAT_TYPES = ("I8",), ("F8_E4M3", "F8_E5M2")
SCALE_TYPES = ("F16", "BF16", "F32", "F64", "F8_E4M3", "F8_E8M0", "U8")
SCALES, BLOCK_SCALES = "weight_scale", "weight_scale_inv"
SCALED_PARTS = (SCALES, BLOCK_SCALES, "weight_packed")
"""Last parts of the names of tensors, of which a module with scales has one."""
DIVISOR, FACTOR = "weight_global_scale", "weight_scale_2"
COLUMN_FACTORS = "pre_quant_scale"
PACKED_BITS = range(1, 9)
COMPRESSED_FORMATS = frozenset(
    (
        *(
            "pack-quantized",
            "int-quantized",
            "float-quantized",
            "naive-quantized",
            "dense",
            "mixed-precision",
        ),
        *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"),
    )
)
"""Formats of compressed-tensors that are read."""
SCALE_MEANING = "weight_scale_semantics"


@dataclass(frozen=True, kw_only=True)
class WeightScheme:
    """What the settings say of the weights of some modules."""

    bits: int
    group_size: int | None = None
    """Columns of a group; None or -1 if the scales are not of groups."""
    block: tuple[int, int] | None = None
    """Rows and columns of a block; None if the scales are of the matrix, of rows or of groups in a row."""


def find_compressed_modules(checkpoint: Checkpoint) -> list[PackedModule]:
    """The packed modules of a compressed-tensors checkpoint.

    Raises:
        UnsupportedLayoutError: if a format is none of ``COMPRESSED_FORMATS``.
        ModelError: if the tensors of a module do not fit together or contradict the settings.
    """
    settings = checkpoint.quantisation
    groups = read_weight_groups(settings)
    formats = [
        settings.get("format", "dense"),
        *(group.get("format") or "dense" for group in groups),
        read_object(settings, "sparsity_config").get("format", "dense"),
    ]
    unknown = sorted(set(map(str, formats)) - COMPRESSED_FORMATS)
    if unknown:
        raise UnsupportedLayoutError(f"its format is {unknown[0]!r:.60}")
    schemes = [
        WeightScheme(
            bits=read_integer(weights, "num_bits"),
            group_size=None if weights.get("group_size") is None else read_group_size(weights),
            block=read_block(weights, "block_structure"),
        )
        for weights in (read_object(group, "weights") for group in groups)
        if weights
    ]
    return [_describe_module(tensors, schemes) for tensors in modules_with(checkpoint, *SCALED_PARTS)]


def find_scaled_float_modules(checkpoint: Checkpoint) -> list[PackedModule]:
    """The packed modules of an FP8 or NVFP4 checkpoint of AutoFP8, FBGEMM, ModelOpt, or with the blocks of DeepSeek-V3.

    None of fine-grained FP8 in which all experts of a layer are one tensor, which transformers decodes.

    Raises:
        UnsupportedLayoutError: if a setting is not supported.
        ModelError: if the tensors of a module do not fit together or contradict the settings.
    """
    settings = checkpoint.quantisation
    if checkpoint.quant_method == "modelopt":
        check_modelopt_algorithms(settings)
    ends = [name.rpartition(".")[2] for name in checkpoint.tensors]
    if any(end.endswith("_scale_inv") and end != BLOCK_SCALES for end in ends):
        return []
    if settings.get(SCALE_MEANING) is not None:  # of GPTQModel, whose scales are divisors
        raise UnsupportedLayoutError(f"its {SCALE_MEANING} is not that of DeepSeek-V3")
    block = read_block(settings, "weight_block_size") or (128, 128)  # fine-grained FP8
    schemes = [WeightScheme(bits=8, block=block)] if BLOCK_SCALES in ends else []
    return [_describe_module(tensors, schemes) for tensors in modules_with(checkpoint, *SCALED_PARTS)]


def _describe_module(tensors: ModuleTensors, schemes: Sequence[WeightScheme]) -> PackedModule:
    """A module that is stored with scales, after checking the headers of its tensors."""
    codes = "weight_packed" if "weight_packed" in tensors.headers else "weight"
    stored = tensors.shape(
        codes, ("I32", "U8") if codes == "weight_packed" else (*INTEGER_TYPES, *FLOAT_TYPES, "U8")
    )
    dtype = tensors.headers[codes].kind
    bits, kind = 8, "int8" if dtype in INTEGER_TYPES else "fp8"
    shape = (stored[0], stored[1])
    if dtype == "U8":
        bits, kind, shape = 4, "fp4", (stored[0], 2 * stored[1])
    elif dtype == "I32":
        shape = _read_shape(tensors, stored[0])
        bits = _integer_bits(tensors, stored[1], shape[1], schemes)
        kind = f"int{bits}"
    scales = tensors.shape(_scale_part(tensors), SCALE_TYPES, (0, 1, 2))
    block = _find_block(tensors, shape, scales, schemes)
    if COLUMN_FACTORS in tensors.headers:
        tensors.check_shape(COLUMN_FACTORS, SCALE_TYPES[:3], shape[1:])
    return PackedModule(
        name=tensors.name,
        parameter=f"{tensors.name}.weight",
        shape=shape,
        kind=f"{' '.join(dict.fromkeys((tensors.method, kind)))}, {_block_words(shape, block)}",
        parts=tensors.full_names(
            *(codes, _scale_part(tensors), "weight_zero_point", "weight_g_idx", DIVISOR, FACTOR),
            *("weight_shape", COLUMN_FACTORS),
        ),
        decode=partial(_decode, tensors, codes, shape, bits, block),
    )


def _scale_part(tensors: ModuleTensors) -> str:
    """The last part of the name of the tensor that holds the scales."""
    return BLOCK_SCALES if BLOCK_SCALES in tensors.headers else SCALES


def _block_words(shape: tuple[int, ...], block: tuple[int, int]) -> str:
    """The blocks of a matrix in words, for records."""
    rows, columns = block
    if rows > 1:
        return "one scale" if rows >= shape[0] else f"blocks of {rows} x {columns}"
    return "rows" if columns == shape[1] else f"groups of {columns}"


def _read_shape(tensors: ModuleTensors, rows: int) -> tuple[int, int]:
    """The shape of the matrix, which ``weight_shape`` holds.

    Raises:
        ModelError: if it is missing or contradicts the packed tensor.
    """
    tensors.check_shape("weight_shape", ("I32", "I64"), (2,))
    stored_rows, columns = (int(size) for size in tensors.read("weight_shape"))
    tensors.require(
        stored_rows == rows and columns > 0,
        f"has a weight_shape of {[stored_rows, columns]} and {rows} packed rows",
    )
    return stored_rows, columns


def _integer_bits(tensors: ModuleTensors, words: int, columns: int, schemes: Sequence[WeightScheme]) -> int:
    """The bits of packed integers: those of a scheme with which a row has this number of words.

    Raises:
        ModelError: if there is none.
    """
    candidates = sorted({scheme.bits for scheme in schemes})
    for bits in candidates:
        if bits in PACKED_BITS and words_of(columns, bits) == words:
            return bits
    listed = ", ".join(map(str, candidates)) or "none"
    raise tensors.error(f"packs {columns} columns into {words} words, and its settings name {listed} bits")


def _find_block(
    tensors: ModuleTensors, shape: tuple[int, ...], scales: tuple[int, ...], schemes: Sequence[WeightScheme]
) -> tuple[int, int]:
    """Rows and columns of the blocks that have a scale of their own.

    Raises:
        ModelError: if no blocks have scales of this shape.
    """
    rows, columns = shape
    if scales in ((), (1,), (1, 1)):
        return rows, columns
    for block in (scheme.block for scheme in schemes):
        if block is not None and scales == (-(-rows // block[0]), -(-columns // block[1])):
            return block
    if scales == (rows,):
        return 1, columns
    # without a group size, or with -1, a row is one group
    sizes = {scheme.group_size if (scheme.group_size or 0) > 0 else columns for scheme in schemes}
    tensors.require(
        len(scales) == 2
        and scales[0] == rows
        and 0 < scales[1] <= columns
        and columns % scales[1] == 0
        and (not sizes or columns // scales[1] in sizes),
        f"has scales of shape {list(scales)} for {rows} x {columns} weights, and its settings name "
        f"{[scheme.block or scheme.group_size for scheme in schemes]}",
    )
    return 1, columns // scales[1]


def _decode(
    tensors: ModuleTensors,
    codes_part: str,
    shape: tuple[int, int],
    bits: int,
    block: tuple[int, int],
    dtype: torch.dtype,
) -> Tensor:
    """The matrix of a module."""
    rows, columns = shape
    codes = tensors.read(codes_part)
    zeros, scales = None, _read_scales(tensors, dtype).reshape(-(-rows // block[0]), -1)
    if "weight_zero_point" in tensors.headers:
        stored = _read_zeros(tensors, scales, bits, codes.dtype).to(dtype)
        zeros = stored.repeat_interleave(block[0], dim=0)[:rows]
    scales = scales.repeat_interleave(block[0], dim=0)[:rows]
    if codes.dtype == torch.int32:
        values = unpack_words(codes, bits, columns).to(dtype).sub_(1 << (bits - 1))
    else:
        values = unpack_float_4(codes, dtype) if codes.dtype == torch.uint8 else codes
    # compressed-tensors fills an index that has no meaning with -1
    if "weight_g_idx" in tensors.headers and bool((tensors.read("weight_g_idx") != -1).any()):
        groups = tensors.read_groups("weight_g_idx", columns, columns // block[1])
    else:
        groups = torch.arange(columns) // block[1]
    weights = scale_groups(values, zeros, scales, groups)
    if COLUMN_FACTORS in tensors.headers:
        weights = weights * tensors.read(COLUMN_FACTORS).to(dtype)
    return weights


def _read_scales(tensors: ModuleTensors, dtype: torch.dtype) -> Tensor:
    """The scales of a module in ``dtype``, with the factor of the whole matrix."""
    stored = tensors.read(_scale_part(tensors))
    scales = (stored.view(torch.float8_e8m0fnu) if stored.dtype == torch.uint8 else stored).to(dtype)
    for part in (DIVISOR, FACTOR):
        if part in tensors.headers:
            tensors.check_shape(part, ("F32", "F16", "BF16"), (), (1,))
            factor = tensors.read(part).to(dtype).reshape(())
            scales = scales / factor if part == DIVISOR else scales * factor
    return scales


def _read_zeros(tensors: ModuleTensors, scales: Tensor, bits: int, codes: torch.dtype) -> Tensor:
    """The zero points of the blocks, in the shape of their scales; those of packed weights are packed along rows.

    Raises:
        ModelError: if they do not fit the scales.
    """
    blocks, groups = scales.shape
    header = tensors.headers["weight_zero_point"]
    if codes != torch.int32 or header.kind != "I32":
        shape = tensors.shape("weight_zero_point", ("I8", "U8", "I32", *FLOAT_TYPES), (0, 1, 2))
        tensors.require(header.elements == blocks * groups, f"has a weight_zero_point of shape {list(shape)}")
        return tensors.read("weight_zero_point").reshape(blocks, groups).float()
    tensors.check_shape("weight_zero_point", ("I32",), (words_of(blocks, bits), groups))
    words = tensors.read("weight_zero_point").T.contiguous()
    return unpack_words(words, bits, blocks).T.to(torch.int16) - (1 << (bits - 1))
