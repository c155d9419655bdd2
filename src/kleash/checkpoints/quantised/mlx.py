"""The layouts of MLX: codes along the rows of a matrix, in words of 32 bits without gaps, with scales of groups.

    W[o, i] = q[o, i] scales[o, g] + biases[o, g],   g = i // group_size

| mode | q | scales |
| --- | --- | --- |
| affine | unsigned integers of 1 to 8 bits | floating-point numbers, with biases |
| mxfp4, mxfp8 | floating-point numbers E2M1, E4M3 | powers of two, 2^(s - 127), as bytes |
| nvfp4 | floating-point numbers E2M1 | floating-point numbers E4M3, as bytes |

"X.weight" of linear layers and embeddings holds the words, "X.scales" and "X.biases" the rest. The settings have the
bits, the size of the groups and the mode, and others of single modules by their names. All experts of a layer are one
tensor, "switch_mlp".

Some tensors that are not packed differ from those of transformers: the kernels of convolutions have their channels
last, and the norms of Qwen3-Next and Qwen3.5 have the 1 that is added to them in their weights.

Source: mlx, ``mlx/backend/cpu/quantized.cpp``; mlx-lm, ``utils.py`` and the ``sanitize`` functions of ``models/``.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kleash.checkpoints.quantised.packed_modules import (
    WORD_BITS,
    ModuleTensors,
    PackedModule,
    UnsupportedLayoutError,
    modules_with,
    read_group_size,
    read_integer,
    scale_groups,
    unpack_float_4,
    unpack_words,
)
from kleash.checkpoints.resolution import Checkpoint

METHOD = "mlx"
AFFINE = "affine"
MODES = {AFFINE: range(1, 9), "mxfp4": (4,), "nvfp4": (4,), "mxfp8": (8,)}
"""Mode → bits of a weight."""
BYTE_SCALES = {
    "mxfp4": torch.float8_e8m0fnu,
    "mxfp8": torch.float8_e8m0fnu,
    "nvfp4": torch.float8_e4m3fn,
}
"""Mode → floating-point numbers that its scales are, as bytes: of the first two powers of two."""
FLOAT_TYPES = ("F16", "BF16", "F32")
EXPERTS = ".switch_mlp."
"""Part of the names of modules that hold all experts of a layer."""
MIXTRAL_NAMES = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
CHANGED_ARCHITECTURES = ("baichuan", "bailing", "falcon_h1", "step3p5")
"""Beginnings of the ``model_type`` of architectures of which mlx-lm stores other numbers than transformers reads."""
SHIFTED_ARCHITECTURES = ("qwen3_5", "qwen3_next")
"""Beginnings of the ``model_type`` of architectures whose norms mlx-lm stores with the 1 that transformers adds."""
TEXT_PART = "language_model"
"""Name of the text part: MLX has "language_model.model" for transformers' "model.language_model"."""
SHIFTED_NORMS = (
    *(".input_layernorm.weight", ".post_attention_layernorm.weight", ".q_norm.weight", ".k_norm.weight"),
    "model.norm.weight",
)


@dataclass(frozen=True, kw_only=True)
class MLXSettings:
    """How a module is quantised."""

    bits: int
    group_size: int
    mode: str


def find_mlx_modules(checkpoint: Checkpoint) -> list[PackedModule]:
    """The packed modules of an MLX checkpoint: those with a tensor ``scales``.

    Raises:
        UnsupportedLayoutError: if a mode is not one of ``MODES``, or mlx-lm changes the weights of the architecture.
        ModelError: if the tensors of a module do not fit together or contradict the settings.
    """
    model_type = str(checkpoint.config.get("model_type", ""))
    if model_type.startswith(CHANGED_ARCHITECTURES):
        raise UnsupportedLayoutError(f"mlx-lm changes weights of {model_type:.40} when it converts them")
    return [
        module
        for tensors in modules_with(checkpoint, "scales")
        for module in _describe_module(tensors, _read_settings(checkpoint.quantisation, tensors.name))
    ]


def _read_settings(settings: Mapping[str, Any], name: str) -> MLXSettings:
    """The settings of a module: its own, or those of the checkpoint.

    Raises:
        UnsupportedLayoutError: if a value is not supported.
    """
    module_settings = settings.get(name)
    values = module_settings if isinstance(module_settings, dict) else settings
    mode = str(values.get("mode", AFFINE))
    bits = read_integer(values, "bits")
    if mode not in MODES or bits not in MODES[mode]:
        raise UnsupportedLayoutError(f"its mode is {mode!r:.40} of {bits} bits")
    return MLXSettings(bits=bits, group_size=read_group_size(values), mode=mode)


def _describe_module(tensors: ModuleTensors, settings: MLXSettings) -> Iterator[PackedModule]:
    """A module, or one for each of its experts, after checking the headers of its tensors."""
    *experts, rows, words = tensors.shape("weight", ("U32",), (2, 3))
    scale_types = FLOAT_TYPES if settings.mode == AFFINE else ("U8",)
    scales = tensors.shape("scales", scale_types, (2, 3))
    columns = scales[-1] * settings.group_size
    tensors.require(
        scales[:-1] == (*experts, rows) and words * WORD_BITS == columns * settings.bits,
        f"has {words} words in a row and scales of {list(scales)}, which are not {settings.bits} bits in groups of "
        f"{settings.group_size}",
    )
    biases = (_biases_part(tensors),) if settings.mode == AFFINE else ()
    for part in biases:
        tensors.check_shape(part, FLOAT_TYPES, scales)
    tensors.require("global_scale" not in tensors.headers, "has a global_scale, which is not read")
    code = f"int{settings.bits}" if settings.mode == AFFINE else settings.mode
    for expert in range(experts[0]) if experts else (None,):
        yield PackedModule(
            name=tensors.name,
            parameter=_parameter_name(tensors.name, expert),
            shape=(rows, columns),
            kind=f"{METHOD} {code}, groups of {settings.group_size}",
            parts=tensors.full_names("weight", "scales", *biases),
            decode=partial(_decode, tensors, settings, expert),
        )


def _biases_part(tensors: ModuleTensors) -> str:
    """The last part of the name of the biases; transformers' own files of this layout ("metal") have another one."""
    return "qbiases" if "qbiases" in tensors.headers else "biases"


def _module_name(module: str) -> str:
    """The name of a module in transformers' checkpoints."""
    if not module.startswith(f"{TEXT_PART}."):
        return module
    name = module.removeprefix(f"{TEXT_PART}.")
    return f"model.{TEXT_PART}.{name.removeprefix('model.')}" if name.startswith("model.") else name


def _parameter_name(module: str, expert: int | None) -> str:
    """The name of a matrix in transformers' checkpoints."""
    module = _module_name(module)
    if expert is None or EXPERTS not in module:
        return f"{module}.weight"
    block, _, part = module.rpartition(EXPERTS)
    name = MIXTRAL_NAMES.get(part, part) if block.endswith(".block_sparse_moe") else part
    return f"{block}.experts.{expert}.{name}.weight"


def _decode(tensors: ModuleTensors, settings: MLXSettings, expert: int | None, dtype: torch.dtype) -> Tensor:
    """The matrix of a module."""

    def read(part: str) -> Tensor:
        tensor = tensors.read(part)
        return (tensor if expert is None else tensor[expert]).contiguous()

    words, scales = read("weight").view(torch.int32), read("scales")
    groups = torch.arange(scales.shape[1] * settings.group_size) // settings.group_size
    if settings.mode == AFFINE:
        codes = unpack_words(words, settings.bits, len(groups))
        biases = read(_biases_part(tensors)).to(dtype)
        return scale_groups(codes, None, scales.to(dtype), groups) + biases[:, groups]
    scales = scales.view(BYTE_SCALES[settings.mode]).to(dtype)
    has_halves = settings.bits == 4
    codes = unpack_float_4(words.view(torch.uint8), dtype) if has_halves else words.view(torch.float8_e4m3fn)
    return scale_groups(codes, None, scales, groups)


def arrange_tensors(checkpoint: Checkpoint) -> Callable[[str, Tensor], Iterator[tuple[str, Tensor]]]:
    """A function from the name and content of a tensor that is not packed to names and contents in transformers.

    mlx-lm stores the kernels of some convolutions with their last two axes exchanged, the norms of
    ``SHIFTED_ARCHITECTURES`` with 1 added, and the experts of a layer as one tensor.
    """
    model_type = str(checkpoint.config.get("model_type", ""))
    has_moved_kernels = any(_is_moved_kernel(name, x.shape) for name, x in checkpoint.safetensors.items())
    is_shifted = has_moved_kernels and model_type.startswith(SHIFTED_ARCHITECTURES)

    def arrange(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        module, _, part = name.rpartition(".")
        if _is_moved_kernel(name, tensor.shape):
            tensor = tensor.transpose(1, 2).contiguous()
        elif is_shifted and name.endswith(SHIFTED_NORMS) and tensor.dim() == 1:
            tensor = tensor.float() - 1
        if EXPERTS in module and part == "weight":
            for expert, weight in enumerate(tensor):
                yield _parameter_name(module, expert), weight
        else:
            yield f"{_module_name(module)}.{part}", tensor

    return arrange


def _is_moved_kernel(name: str, shape: Sequence[int]) -> bool:
    """Whether a tensor is the kernel of a convolution as [channels, size, 1], and not as [channels, 1, size]."""
    return name.endswith(("conv1d.weight", ".conv.weight")) and len(shape) == 3 and shape[1] > 1 == shape[2]
