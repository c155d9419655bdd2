"""The layout of GPTQ: unsigned integers packed along the input dimension, with scales and zero points of groups.

    W[o, i] = scales[g, o] (q[i, o] - zeros[g, o]),   g = g_idx[i]

``qweight`` holds q in words of 32 bits along the first dimension, ``qzeros`` the zero points along the second. Files of
version 1 store each zero point less one, modulo 2^bits. ``g_idx`` is the group of each input; without it, groups are
consecutive inputs. With activation order it is a permutation that kernels sort by; the product is the same.

Source: GPTQModel, ``nn_modules/qlinear/torch.py`` and ``utils/model_dequant.py``; auto-round, ``inference/backend.py``.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kleash.checkpoints.quantised.integers import WORD_BITS, scale_groups, unpack_words
from kleash.checkpoints.quantised.packed_modules import (
    MAX_SHOWN_CHARACTERS,
    ModuleTensors,
    PackedModule,
    modules_with,
)
from kleash.checkpoints.quantised.settings import (
    UnsupportedLayoutError,
    read_group_size,
    read_integer,
    read_module_group_sizes,
)
from kleash.checkpoints.resolution import Checkpoint
from kleash.errors import ModelError

BITS = (2, 3, 4, 8)
SCALE_TYPES = ("F16", "BF16", "F32")


GPTQ_LAYOUTS = {"gptq": True, "gptq_v2": False}
"""``checkpoint_format`` → whether zero points are stored less one."""


def find_gptq_modules(checkpoint: Checkpoint) -> list[PackedModule]:
    """The packed modules of a GPTQ checkpoint.

    Raises:
        UnsupportedLayoutError: if its layout is none of ``GPTQ_LAYOUTS``.
        ModelError: if the tensors of a module do not fit together or contradict the settings.
    """
    settings: Mapping[str, Any] = checkpoint.quantisation or {}
    layout = str(settings.get("checkpoint_format") or settings.get("format") or "gptq")
    if layout not in GPTQ_LAYOUTS or settings.get("is_marlin_format") is True:
        raise UnsupportedLayoutError(f"its checkpoint_format is {layout!r:.60}, and not gptq or gptq_v2")
    return find_word_modules(checkpoint, has_shifted_zeros=GPTQ_LAYOUTS[layout])


def find_word_modules(checkpoint: Checkpoint, *, has_shifted_zeros: bool) -> list[PackedModule]:
    """The modules that are stored in the layout of GPTQ, which AutoRound shares: those with a tensor ``qweight``.

    Args:
        checkpoint: of GPTQ or AutoRound.
        has_shifted_zeros: whether zero points are stored less one (version 1).

    Raises:
        ModelError: if the tensors of a module do not fit together or contradict the settings.
    """
    settings: Mapping[str, Any] = checkpoint.quantisation or {}
    overrides = ("dynamic",) if checkpoint.quant_method == "gptq" else ("extra_config", "dynamic")
    values = _GPTQSettings(
        bits=read_integer(settings, "bits"),
        group_size=read_group_size(settings),
        has_shifted_zeros=has_shifted_zeros,
        has_overrides=any(settings.get(name) for name in overrides),
        group_sizes={
            module: size
            for name in overrides
            for module, size in read_module_group_sizes(settings, name).items()
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
    tensors.require(min(words, rows, groups) > 0, "has an empty tensor")
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
    names = ["qweight", "scales", "qzeros"]
    if "g_idx" in tensors.headers:
        names.append("g_idx")
    group_size = _group_size(tensors, columns, groups, settings)
    return PackedModule(
        name=tensors.name,
        parameter=tensors.full_name("weight"),
        shape=(rows, columns),
        kind=f"{tensors.method} int{bits:.0f}, " + ("rows" if groups == 1 else f"groups of {group_size}"),
        parts=tuple(tensors.full_name(name) for name in names),
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
    qweight, qzeros, scales = tensors.read_parts("qweight", "qzeros", "scales")
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
    """Refuse the zero points of symmetric weights that are 2^(bits - 1) only by the other version of the layout.

    Raises:
        ModelError: if all of them are.
    """
    stored, other = (1 << (bits - 1)) - 1, 1 << (bits - 1)
    names = "gptq_v2 (AutoRound: packing_format to auto_round)"
    if not has_shifted_zeros:
        stored, other = other, stored
        names = "gptq (AutoRound: packing_format to auto_round:auto_gptq)"
    if bool((zeros == other).all()):
        raise ModelError(
            f"{tensors.checkpoint} is symmetric (sym) by its quantization_config, whose layout stores its zero points "
            f"as {stored}, and all those of {tensors.name[:MAX_SHOWN_CHARACTERS]} are {other}; set checkpoint_format "
            f"to {names}"
        )
