"""The layouts of GPTQ and AWQ: unsigned integers in words of 32 bits, with scales and zero points of groups of inputs.

    W[o, i] = scales[g, o] (q[i, o] - zeros[g, o]),   g = g_idx[i] (AWQ: i // group_size)

GPTQ: ``qweight`` holds q along the first dimension, ``qzeros`` the zero points along the second. Files of version 1
store each zero point less one, modulo 2^bits. ``g_idx`` is the group of each input; without it, groups are consecutive
inputs. With activation order it is a permutation that kernels sort by; the product is the same.

AWQ ("gemm"): a word of ``qweight`` [inputs, outputs / 8] has the outputs 0, 2, 4, 6, 1, 3, 5, 7 of eight, the first in
the lowest bits; a word of ``qzeros`` [groups, outputs / 8] has the zero points of eight outputs in that order.

Source: GPTQModel, ``nn_modules/qlinear/torch.py`` and ``utils/model_dequant.py``; AutoAWQ,
``awq/modules/linear/gemm.py``.
"""

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kleash.checkpoints.quantised.packed_modules import (
    MAX_SHOWN_CHARACTERS,
    WORD_BITS,
    ModuleTensors,
    PackedModule,
    UnsupportedLayoutError,
    modules_with,
    read_group_size,
    read_integer,
    read_object,
    scale_groups,
    unpack_words,
)
from kleash.checkpoints.resolution import Checkpoint
from kleash.errors import ModelError

BITS = (2, 3, 4, 8)
"""Of GPTQ."""
SCALE_TYPES = ("F16", "BF16", "F32")


GPTQ_LAYOUTS = {"gptq": True, "gptq_v2": False}
"""``checkpoint_format`` → whether zero points are stored less one."""
AUTO_ROUND_LAYOUTS = {
    **dict.fromkeys(("auto_round:auto_gptq", "auto_round:gptq"), True),
    **dict.fromkeys(("auto_round", "auto_round:gptqmodel"), False),
}
"""``packing_format`` of AutoRound in the layout of GPTQ → whether zero points are stored less one."""
AWQ_LAYOUTS = ("gemm", "exllama", "ipex")
"""``version``: kernels for files in the layout "gemm"."""
AWQ_PARTS = ("qweight", "qzeros", "scales")
"""Last parts of the names of a module's tensors."""
AWQ_BITS, AWQ_WEIGHTS_OF_WORD = 4, 8
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in a word of each of eight outputs."""


def find_gptq_modules(checkpoint: Checkpoint) -> list[PackedModule]:
    """The packed modules of a GPTQ checkpoint.

    Raises:
        UnsupportedLayoutError: if its layout is none of ``GPTQ_LAYOUTS``.
        ModelError: if the tensors of a module do not fit together or contradict the settings.
    """
    settings = checkpoint.quantisation
    layout = str(settings.get("checkpoint_format") or settings.get("format") or "gptq")
    if layout not in GPTQ_LAYOUTS or settings.get("is_marlin_format") is True:
        raise UnsupportedLayoutError(f"its checkpoint_format is {layout!r:.60}, and not gptq or gptq_v2")
    return _find_word_modules(checkpoint, "dynamic", has_shifted_zeros=GPTQ_LAYOUTS[layout])


def find_auto_round_modules(checkpoint: Checkpoint) -> list[PackedModule]:
    """The packed modules of an AutoRound checkpoint, which are those of GPTQ or AWQ.

    Source: auto-round, ``inference/backend.py``. Versions before 0.5 have no ``packing_format`` and are refused.

    Raises:
        UnsupportedLayoutError: if its ``packing_format`` is of neither.
        ModelError: if the tensors of a module do not fit together or contradict the settings.
    """
    layout = str(checkpoint.quantisation.get("packing_format"))
    if layout in ("auto_round:auto_awq", "auto_round:awq"):
        return find_awq_modules(checkpoint)
    if layout not in AUTO_ROUND_LAYOUTS:
        raise UnsupportedLayoutError(f"its packing_format is {layout!r:.60}")
    return _find_word_modules(checkpoint, "extra_config", has_shifted_zeros=AUTO_ROUND_LAYOUTS[layout])


def _find_word_modules(
    checkpoint: Checkpoint, overrides: str, *, has_shifted_zeros: bool
) -> list[PackedModule]:
    """The modules in the layout of GPTQ; ``overrides`` is the name of the settings of single modules."""
    settings = checkpoint.quantisation
    values = _GPTQSettings(
        bits=read_integer(settings, "bits"),
        group_size=read_group_size(settings),
        has_shifted_zeros=has_shifted_zeros,
        has_overrides=bool(settings.get(overrides)),
        group_sizes={
            name: read_group_size(values)
            for name, values in read_object(settings, overrides).items()
            if isinstance(values, dict) and values.get("group_size") is not None
        },
        is_symmetric=settings.get("sym") is True,
    )
    return [_describe_module(tensors, values) for tensors in modules_with(checkpoint, "qweight")]


class _GPTQSettings(NamedTuple):
    """What the settings say of the modules."""

    bits: int
    group_size: int
    """Inputs in a group; -1 for all."""
    has_shifted_zeros: bool
    has_overrides: bool
    """Whether some modules have other bits or groups."""
    group_sizes: Mapping[str, int]
    """Group sizes of single modules, by their names or the patterns of them that the settings have."""
    is_symmetric: bool
    """Whether all zero points are 2^(bits - 1)."""


def _describe_module(tensors: ModuleTensors, settings: _GPTQSettings) -> PackedModule:
    """A module, after checking the headers of its tensors."""
    words, rows = tensors.shape("qweight", ("I32",))
    groups, scale_rows = tensors.shape("scales", SCALE_TYPES)
    zero_groups, zero_words = tensors.shape("qzeros", ("I32",))
    tensors.require(
        scale_rows == rows and zero_groups == groups,
        f"has scales of {groups} x {scale_rows} and qzeros of {zero_groups} groups for {rows} outputs",
    )
    bits = WORD_BITS * zero_words / rows
    tensors.require(
        bits in BITS,
        f"has {zero_words} words of zero points for {rows} outputs, which are not 2, 3, 4 or 8 bits",
    )
    tensors.require(
        bits == settings.bits or settings.has_overrides,
        f"is stored in {bits:.0f} bits, and its quantization_config says {settings.bits}",
    )
    columns = words * WORD_BITS // int(bits)
    group_size = _group_size(tensors, columns, groups, settings)
    return PackedModule(
        name=tensors.name,
        parameter=tensors.full_name("weight"),
        shape=(rows, columns),
        kind=f"{tensors.method} int{bits:.0f}, " + ("rows" if groups == 1 else f"groups of {group_size}"),
        parts=tensors.full_names("qweight", "scales", "qzeros", "g_idx"),
        decode=partial(_decode, tensors, int(bits), group_size, settings),
    )


def _group_size(tensors: ModuleTensors, columns: int, groups: int, settings: _GPTQSettings) -> int:
    """The number of inputs in a group; the last group may be smaller.

    Raises:
        ModelError: if the settings have no size with this number of groups, or several and no ``g_idx`` decides.
    """
    named = settings.group_sizes.get(tensors.name)
    sizes = [settings.group_size, *settings.group_sizes.values()] if named is None else [named]
    in_columns = [min(size, columns) if size > 0 else columns for size in sizes]
    fitting = list(dict.fromkeys(size for size in in_columns if -(-columns // size) == groups))
    if fitting:
        tensors.require(
            len(fitting) == 1 or "g_idx" in tensors.headers,
            f"has {groups} groups of scales for {columns} inputs, which may be of {' or '.join(map(str, fitting))} by "
            "its quantization_config",
        )
        return fitting[0]
    tensors.require(
        settings.has_overrides and columns % groups == 0,
        f"has {groups} groups of scales, and {columns} inputs in groups of {settings.group_size}",
    )
    return columns // groups


def _decode(
    tensors: ModuleTensors, bits: int, group_size: int, settings: _GPTQSettings, dtype: torch.dtype
) -> Tensor:
    """The matrix of a module."""
    qweight, qzeros, scales = map(tensors.read, ("qweight", "qzeros", "scales"))
    columns, rows = len(qweight) * WORD_BITS // bits, scales.shape[1]
    if "g_idx" in tensors.headers:
        groups = tensors.read_groups("g_idx", columns, len(scales))
    else:
        groups = torch.arange(columns) // group_size
    zeros = unpack_words(qzeros, bits, rows)
    if settings.is_symmetric:
        _check_symmetric_zeros(tensors, zeros, bits, settings.has_shifted_zeros)
    if settings.has_shifted_zeros:
        zeros = (zeros + 1) & ((1 << bits) - 1)
    return scale_groups(unpack_words(qweight.T, bits, columns), zeros.T, scales.T.to(dtype), groups)


def _check_symmetric_zeros(tensors: ModuleTensors, zeros: Tensor, bits: int, has_shifted_zeros: bool) -> None:
    """Refuse symmetric weights whose stored zero points show that the layout is the other version than it says.

    The zero points of symmetric weights are 2^(bits - 1); "gptq" stores them minus 1 (``has_shifted_zeros``),
    "gptq_v2" as they are.

    Raises:
        ModelError: if all stored zero points are what the other version stores.
    """
    middle = 1 << (bits - 1)
    stored, other = (middle - 1, middle) if has_shifted_zeros else (middle, middle - 1)
    if bool((zeros == other).all()):
        raise ModelError(
            f"{tensors.checkpoint} is symmetric (sym) by its quantization_config, whose layout stores its zero points "
            f"as {stored}, and all those of {tensors.name[:MAX_SHOWN_CHARACTERS]} are {other}; set checkpoint_format "
            f"to {'gptq_v2' if has_shifted_zeros else 'gptq'}"
        )


def find_awq_modules(checkpoint: Checkpoint) -> list[PackedModule]:
    """The packed modules of an AWQ checkpoint.

    Raises:
        UnsupportedLayoutError: if its layout is none of ``AWQ_LAYOUTS``, or has other bits.
        ModelError: if the tensors of a module do not fit together.
    """
    settings = checkpoint.quantisation
    layout = str(settings.get("version") or settings.get("checkpoint_format") or "gemm").lower()
    bits = read_integer(settings, "bits", "w_bit")
    if bits != AWQ_BITS:
        raise UnsupportedLayoutError(f"it has {bits} bits, and AWQ's layout 4")
    if layout not in AWQ_LAYOUTS:
        raise UnsupportedLayoutError(f"its version is {layout!r:.60}, and not gemm")
    group_size = read_group_size(settings)
    return [_describe_awq_module(tensors, group_size) for tensors in modules_with(checkpoint, "qweight")]


def _describe_awq_module(tensors: ModuleTensors, group_size: int) -> PackedModule:
    """A module of AWQ, after checking the headers of its tensors."""
    columns, words = tensors.shape("qweight", ("I32",))
    rows = words * AWQ_WEIGHTS_OF_WORD
    size = group_size if group_size > 0 else columns
    groups = columns // size
    tensors.require(columns % size == 0, f"has {columns} inputs in groups of {group_size}")
    tensors.check_shape("scales", SCALE_TYPES, (groups, rows))
    tensors.check_shape("qzeros", ("I32",), (groups, words))
    return PackedModule(
        name=tensors.name,
        parameter=tensors.full_name("weight"),
        shape=(rows, columns),
        kind=f"{tensors.method} int4, " + ("rows" if size == columns else f"groups of {size}"),
        parts=tensors.full_names(*AWQ_PARTS),
        decode=partial(_decode_awq, tensors, columns, size),
    )


def _decode_awq(tensors: ModuleTensors, columns: int, group_size: int, dtype: torch.dtype) -> Tensor:
    """The matrix [outputs, inputs] of a module of AWQ, in ``dtype``; ``columns`` is the number of inputs."""
    qweight, qzeros, scales = map(tensors.read, AWQ_PARTS)
    groups = torch.arange(columns) // group_size
    return scale_groups(_awq_outputs(qweight), _awq_outputs(qzeros), scales.T.to(dtype), groups)


def _awq_outputs(words: Tensor) -> Tensor:
    """The integers of packed outputs, in their order: [outputs, rows of words]."""
    values = unpack_words(words, AWQ_BITS, words.shape[1] * AWQ_WEIGHTS_OF_WORD)
    return values.unflatten(1, (-1, AWQ_WEIGHTS_OF_WORD))[..., AWQ_PLACES].flatten(1).T.contiguous()
