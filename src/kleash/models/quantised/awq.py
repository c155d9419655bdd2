"""The layouts of AWQ: 4-bit integers with scales and zero points of groups of inputs.

    W[o, i] = scales[g, o] (q[o, i] - zeros[g, o]),   g = i // group_size

"gemm" packs outputs: a word of ``qweight`` [inputs, outputs / 8] has the outputs 0, 2, 4, 6, 1, 3, 5, 7 of eight, the
first in the lowest bits. "gemv" packs inputs in their order: ``qweight`` [outputs, inputs / 8], with scales and zero
points [outputs, groups], padded on the right.

Source: AutoAWQ, ``awq/modules/linear/gemm.py`` and ``gemv.py``.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kleash.models.checkpoints.resolution import Checkpoint
from kleash.models.quantised.gptq import SCALE_TYPES
from kleash.models.quantised.integers import WORD_BITS, scale_groups, unpack_words
from kleash.models.quantised.packed_modules import ModuleTensors, PackedModule, RowDecoder, modules_with
from kleash.models.quantised.settings import UnsupportedLayoutError, read_group_size, read_integer

PARTS = ("qweight", "qzeros", "scales")
"""Last parts of the names of a module's tensors."""
BITS, WEIGHTS_OF_WORD = 4, 8
GEMM_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output at each of the eight places in a word."""


AWQ_LAYOUTS = {"gemm": False, "exllama": False, "ipex": False, "gemv": True}
"""``version`` → whether the files have the layout "gemv"; the others are kernels for files in the layout "gemm"."""


def find_awq_modules(checkpoint: Checkpoint) -> list[PackedModule]:
    """The packed modules of an AWQ checkpoint.

    Raises:
        UnsupportedLayoutError: if its layout is none of ``AWQ_LAYOUTS``, or has other bits.
        ModelError: if the tensors of a module do not fit together.
    """
    settings: Mapping[str, Any] = checkpoint.quantisation or {}
    layout = str(settings.get("version") or settings.get("checkpoint_format") or "gemm").lower()
    bits = read_integer(settings, "bits", "w_bit")
    if bits != BITS:
        raise UnsupportedLayoutError(f"it has {bits} bits, and AWQ's layouts 4")
    if layout not in AWQ_LAYOUTS:
        raise UnsupportedLayoutError(f"its version is {layout!r:.60}, and not gemm or gemv")
    describe = _describe_gemv if AWQ_LAYOUTS[layout] else _describe_gemm
    group_size = read_group_size(settings)
    return [describe(tensors, group_size) for tensors in modules_with(checkpoint, "qweight")]


def find_gemm_modules(checkpoint: Checkpoint) -> list[PackedModule]:
    """The modules of an AutoRound checkpoint in the layout "gemm" of AWQ.

    Raises:
        ModelError: if the tensors of a module do not fit together.
    """
    group_size = read_group_size(checkpoint.quantisation or {})
    return [_describe_gemm(tensors, group_size) for tensors in modules_with(checkpoint, "qweight")]


def _describe_gemm(tensors: ModuleTensors, group_size: int) -> PackedModule:
    """A module in the layout "gemm", after checking the headers of its tensors."""
    columns, words = tensors.shape("qweight", ("I32",))
    rows = words * WEIGHTS_OF_WORD
    groups = tensors.shape("scales", SCALE_TYPES)
    zeros = tensors.shape("qzeros", ("I32",))
    size = group_size if group_size > 0 else columns
    tensors.require(min(columns, words) > 0, "has an empty tensor")
    tensors.require(
        columns % size == 0 and groups == (columns // size, rows) and zeros == (columns // size, words),
        f"has scales of {list(groups)} and qzeros of {list(zeros)} for {rows} outputs and {columns} inputs in groups "
        f"of {group_size}",
    )
    return _module(tensors, rows, columns, size, is_gemv=False)


def _describe_gemv(tensors: ModuleTensors, group_size: int) -> PackedModule:
    """A module in the layout "gemv", after checking the headers of its tensors."""
    rows, words = tensors.shape("qweight", ("I32",))
    columns = words * WEIGHTS_OF_WORD
    scale_rows, scale_columns = tensors.shape("scales", SCALE_TYPES)
    zero_rows, zero_words = tensors.shape("qzeros", ("I32",))
    size = group_size if group_size > 0 else columns
    tensors.require(min(rows, words) > 0, "has an empty tensor")
    tensors.require(
        columns % size == 0
        and scale_rows == zero_rows == rows
        and scale_columns >= columns // size
        and zero_words * WEIGHTS_OF_WORD >= columns // size,
        f"has scales of {[scale_rows, scale_columns]} and qzeros of {[zero_rows, zero_words]} for {rows} outputs and "
        f"{columns} inputs in groups of {group_size}",
    )
    return _module(tensors, rows, columns, size, is_gemv=True)


def _module(
    tensors: ModuleTensors, rows: int, columns: int, group_size: int, *, is_gemv: bool
) -> PackedModule:
    return PackedModule(
        name=tensors.name,
        parameter=tensors.full_name("weight"),
        shape=(rows, columns),
        kind=f"{tensors.method} int4, " + ("rows" if group_size == columns else f"groups of {group_size}"),
        parts=tuple(map(tensors.full_name, PARTS)),
        row_multiple=1 if is_gemv else WEIGHTS_OF_WORD,
        open=partial(_open_gemv if is_gemv else _open_gemm, tensors, columns, group_size),
    )


def _open_gemm(tensors: ModuleTensors, columns: int, group_size: int, dtype: torch.dtype) -> RowDecoder:
    """The decoder of rows in the layout "gemm"."""
    qweight, qzeros, scales = tensors.read_parts(*PARTS)
    groups = torch.arange(columns) // group_size

    def unpack(words: Tensor, start: int, stop: int) -> Tensor:
        used = words[:, start // WEIGHTS_OF_WORD : -(-stop // WEIGHTS_OF_WORD)]
        by_place = used.contiguous().view(torch.uint8).T.contiguous().view(-1, WORD_BITS // 8, len(words))
        values = torch.empty(len(by_place), WEIGHTS_OF_WORD, len(words), dtype=torch.uint8)
        for place, output in enumerate(GEMM_ORDER):
            stored = by_place[:, place // 2]
            values[:, output] = stored >> BITS if place % 2 else stored & 15
        return values.flatten(0, 1)

    def decode(start: int, stop: int) -> Tensor:
        codes, zeros = unpack(qweight, start, stop), unpack(qzeros, start, stop)
        return scale_groups(codes, zeros, scales[:, start:stop].T.to(dtype), groups)

    return decode


def _open_gemv(tensors: ModuleTensors, columns: int, group_size: int, dtype: torch.dtype) -> RowDecoder:
    """The decoder of rows in the layout "gemv"."""
    qweight, qzeros, scales = tensors.read_parts(*PARTS)
    groups = torch.arange(columns) // group_size
    count = columns // group_size

    def decode(start: int, stop: int) -> Tensor:
        codes = unpack_words(qweight[start:stop], BITS, columns)
        zeros = unpack_words(qzeros[start:stop], BITS, count)
        return scale_groups(codes, zeros, scales[start:stop, :count].to(dtype), groups)

    return decode
