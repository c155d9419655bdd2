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

from kleash.checkpoints.quantised.gptq import SCALE_TYPES
from kleash.checkpoints.quantised.integers import scale_groups, unpack_words
from kleash.checkpoints.quantised.packed_modules import ModuleTensors, PackedModule, modules_with
from kleash.checkpoints.quantised.settings import UnsupportedLayoutError, read_group_size, read_integer
from kleash.checkpoints.resolution import Checkpoint

PARTS = ("qweight", "qzeros", "scales")
"""Last parts of the names of a module's tensors."""
BITS, WEIGHTS_OF_WORD = 4, 8
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in a word of each of eight outputs in the layout "gemm"."""


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
    return describe_modules(checkpoint, is_gemv=AWQ_LAYOUTS[layout])


def describe_modules(checkpoint: Checkpoint, *, is_gemv: bool = False) -> list[PackedModule]:
    """The modules of a checkpoint in the layout "gemm", which AutoRound shares, or "gemv".

    Raises:
        ModelError: if the tensors of a module do not fit together.
    """
    group_size = read_group_size(checkpoint.quantisation or {})
    return [_describe(tensors, group_size, is_gemv) for tensors in modules_with(checkpoint, "qweight")]


def _describe(tensors: ModuleTensors, group_size: int, is_gemv: bool) -> PackedModule:
    """A module, after checking the headers of its tensors."""
    stored = tensors.shape("qweight", ("I32",))
    scales, zeros = tensors.shape("scales", SCALE_TYPES), tensors.shape("qzeros", ("I32",))
    tensors.require(min(stored) > 0, "has an empty tensor")
    if is_gemv:
        rows, columns = stored[0], stored[1] * WEIGHTS_OF_WORD
    else:
        rows, columns = stored[1] * WEIGHTS_OF_WORD, stored[0]
    size = group_size if group_size > 0 else columns
    groups = columns // size
    if is_gemv:
        is_padded = scales[1] >= groups and zeros[1] * WEIGHTS_OF_WORD >= groups
        fits = scales[0] == zeros[0] == rows and is_padded
    else:
        fits = scales == (groups, rows) and zeros == (groups, stored[1])
    tensors.require(
        columns % size == 0 and fits,
        f"has scales of {list(scales)} and qzeros of {list(zeros)} for {rows} outputs and {columns} inputs in groups "
        f"of {group_size}",
    )
    return PackedModule(
        name=tensors.name,
        parameter=tensors.full_name("weight"),
        shape=(rows, columns),
        kind=f"{tensors.method} int4, " + ("rows" if size == columns else f"groups of {size}"),
        parts=tuple(map(tensors.full_name, PARTS)),
        decode=partial(_decode, tensors, columns, size, is_gemv),
    )


def _decode(
    tensors: ModuleTensors, columns: int, group_size: int, is_gemv: bool, dtype: torch.dtype
) -> Tensor:
    """The matrix of a module."""
    qweight, qzeros, scales = tensors.read_parts(*PARTS)
    groups = torch.arange(columns) // group_size
    if is_gemv:
        count = columns // group_size
        codes, zeros = unpack_words(qweight, BITS, columns), unpack_words(qzeros, BITS, count)
        return scale_groups(codes, zeros, scales[:, :count].to(dtype), groups)
    return scale_groups(_outputs(qweight), _outputs(qzeros), scales.T.to(dtype), groups)


def _outputs(words: Tensor) -> Tensor:
    """The integers of packed outputs, in their order: [outputs, rows of words]."""
    values = unpack_words(words, BITS, words.shape[1] * WEIGHTS_OF_WORD)
    return values.unflatten(1, (-1, WEIGHTS_OF_WORD))[..., PLACES].flatten(1).T.contiguous()
