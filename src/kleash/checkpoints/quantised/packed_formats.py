"""The packed formats that are unpacked here, and the packed modules of a checkpoint."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kleash.checkpoints.quantised.bitsandbytes import find_bitsandbytes_modules
from kleash.checkpoints.quantised.grouped_integers import (
    find_auto_round_modules,
    find_awq_modules,
    find_gptq_modules,
)
from kleash.checkpoints.quantised.mlx import arrange_tensors, find_mlx_modules
from kleash.checkpoints.quantised.packed_modules import (
    PackedModule,
    UnsupportedLayoutError,
    check_rotations,
    read_weight_groups,
)
from kleash.checkpoints.quantised.scaled_weights import find_compressed_modules, find_scaled_float_modules
from kleash.checkpoints.resolution import Checkpoint
from kleash.errors import ModelError

FORMATS: Mapping[str, Callable[[Checkpoint], list[PackedModule]]] = {
    "gptq": find_gptq_modules,
    "awq": find_awq_modules,
    **dict.fromkeys(("auto-round", "intel/auto-round"), find_auto_round_modules),
    "compressed-tensors": find_compressed_modules,
    "fp8": find_scaled_float_modules,
    "fbgemm_fp8": find_scaled_float_modules,
    "modelopt": find_scaled_float_modules,
    "bitsandbytes": find_bitsandbytes_modules,
    "mlx": find_mlx_modules,
    "metal": find_mlx_modules,
}
"""``quant_method`` of config.json → the packed modules of such a checkpoint."""
MLX_METHODS = frozenset(("mlx", "metal"))
"""Names of MLX's layout: its own, and transformers' for the same with another name of the biases."""
CACHE_SETTINGS = ("kv_cache_scheme", "kv_cache_quant_algo")
CACHE_SCALES = (".k_scale", ".v_scale", ".kv_scale")
"""Ends of the names of tensors by which stored keys and values are divided."""


@dataclass(frozen=True, kw_only=True)
class PackedCheckpoint:
    """The packed modules of a checkpoint in a format that is unpacked here."""

    checkpoint: Checkpoint
    modules: tuple[PackedModule, ...]
    also_quantised: tuple[str, ...]
    """What the format also quantises when the model is served: "activations", "the key-value cache"."""
    arrange: Callable[[str, Tensor], Iterator[tuple[str, Tensor]]] | None = None
    """Gives transformers' tensors for one that is not packed, by its name; None if it is stored as they are."""


def find_packed_modules(checkpoint: Checkpoint) -> PackedCheckpoint | None:
    """The packed modules of a checkpoint; None if it is not quantised, or in a format that transformers loads.

    Raises:
        ModelError: if the layout is not supported, or the tensors contradict the settings.
    """
    settings, method = checkpoint.quantisation, checkpoint.quant_method
    if method is None or method not in FORMATS:
        return None
    subject = f"{checkpoint} is quantised ({method})"
    try:
        also_quantised = _list_also_quantised(checkpoint, settings)
        check_rotations(settings)
        modules = FORMATS[method](checkpoint)
    except UnsupportedLayoutError as error:
        raise ModelError(
            f"{subject} in a layout that is not read: {error}; quantise or convert it to another layout, or save it "
            "dequantised"
        ) from error
    if not modules and method == "fp8":
        return None  # weights that transformers decodes, or that are not quantised
    if not modules and (method != "compressed-tensors" or read_weight_groups(settings)):
        raise ModelError(
            f"{subject} according to its settings, and none of its tensors is packed; remove the settings of the "
            "quantisation if it is not quantised, or fetch the checkpoint again"
        )
    stored = checkpoint.tensors
    repeated = [
        each.parameter for each in modules if each.parameter in stored and each.parameter not in each.parts
    ]
    if repeated:
        raise ModelError(
            f"{checkpoint} holds {len(repeated)} matrices both packed and not, such as {repeated[0][:120]}; fetch or "
            "quantise the model again"
        )
    return PackedCheckpoint(
        checkpoint=checkpoint,
        modules=tuple(modules),
        also_quantised=also_quantised,
        arrange=arrange_tensors(checkpoint) if method in MLX_METHODS else None,
    )


def _list_also_quantised(checkpoint: Checkpoint, settings: Mapping[str, Any]) -> tuple[str, ...]:
    """What a format also quantises when the model is served."""
    rounds_activations = (
        FORMATS[str(checkpoint.quant_method)] is find_scaled_float_modules
        or settings.get("quantize_activations") is True  # MLX
        or settings.get("load_in_8bit") is True  # bitsandbytes
    ) or any(
        group.get("input_activations") or group.get("output_activations")
        for group in read_weight_groups(settings)
    )
    rounds_cache = any(settings.get(name) for name in CACHE_SETTINGS) or any(
        name.endswith(CACHE_SCALES) for name in checkpoint.tensors
    )
    names = {"activations": rounds_activations, "the key-value cache": rounds_cache}
    return tuple(name for name, is_quantised in names.items() if is_quantised)
