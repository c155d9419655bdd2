"""The packed formats that are unpacked here, and the packed modules of a checkpoint."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kleash.checkpoints.quantised.awq import describe_modules as describe_awq_modules
from kleash.checkpoints.quantised.awq import find_awq_modules
from kleash.checkpoints.quantised.bitsandbytes import find_bitsandbytes_modules
from kleash.checkpoints.quantised.gptq import find_gptq_modules, find_word_modules
from kleash.checkpoints.quantised.mlx import arrange_tensors, find_mlx_modules
from kleash.checkpoints.quantised.packed_modules import PackedModule
from kleash.checkpoints.quantised.scaled_weights import (
    WeightScheme,
    find_compressed_modules,
    find_scaled_float_modules,
    find_scaled_modules,
)
from kleash.checkpoints.quantised.settings import (
    UnsupportedLayoutError,
    check_rotations,
    read_group_size,
    read_integer,
    read_weight_groups,
)
from kleash.checkpoints.resolution import Checkpoint
from kleash.errors import ModelError

GPTQ_PACKINGS = {"auto_round:auto_gptq": True, "auto_round": False, "auto_round:gptqmodel": False}
"""``packing_format`` of GPTQ → whether zero points are stored less one."""
ALIASES = {
    "auto": "auto_round:auto_gptq",
    "auto_round:gptq": "auto_round:auto_gptq",
    "auto_round:awq": "auto_round:auto_awq",
}
"""Other names of AutoRound for its ``packing_format``."""
SCALED_PACKINGS = {"auto_round:llm_compressor": ("mx_fp", "nv_fp"), "auto_round:fp8_static": ("fp",)}
"""``packing_format`` of compressed-tensors → beginnings of the ``data_type`` of weights that are read."""


def find_auto_round_modules(checkpoint: Checkpoint) -> list[PackedModule]:
    """The packed modules of an AutoRound checkpoint: those of GPTQ, AWQ or compressed-tensors under its own names.

    Source: auto-round, ``inference/backend.py`` and ``export/export_to_autoround``; of version 0.3, ``export.py``.

    Raises:
        UnsupportedLayoutError: if its ``packing_format`` is not read.
        ModelError: if the tensors of a module do not fit together or contradict the settings.
    """
    settings: Mapping[str, Any] = checkpoint.quantisation or {}
    layout, data_type = read_auto_round_layout(settings), str(settings.get("data_type"))
    if layout == "auto_round:auto_awq":
        return describe_awq_modules(checkpoint)
    if layout in GPTQ_PACKINGS:
        return find_word_modules(checkpoint, has_shifted_zeros=GPTQ_PACKINGS[layout])
    if not data_type.startswith(SCALED_PACKINGS.get(layout, ())):
        raise UnsupportedLayoutError(f"its packing_format is {layout!r:.60} of {data_type!r:.40}")
    schemes: list[WeightScheme] = []  # scales of FP8 are of rows or of the matrix
    if not data_type.startswith("fp"):
        schemes = [WeightScheme(bits=read_integer(settings, "bits"), group_size=read_group_size(settings))]
    return find_scaled_modules(checkpoint, schemes)


def read_auto_round_layout(settings: Mapping[str, Any]) -> str:
    """The ``packing_format`` of an AutoRound checkpoint.

    Versions before 0.5 name a ``backend`` instead, and FP8 of version 0.16 neither.
    Their own backends, such as "auto_round:exllamav2", store zero points as they are; those of GPTQ, such as
    "auto_round:gptq:exllamav2", and of AWQ store them as these formats do.
    """
    layout, backend = settings.get("packing_format"), settings.get("backend")
    if layout is None and isinstance(backend, str) and backend != "auto":
        if "awq" in backend:
            layout = "auto_round:auto_awq"
        else:
            layout = "auto_round:auto_gptq" if "gptq" in backend else "auto_round"
    if layout is None and backend is None and str(settings.get("data_type")).startswith("fp"):
        layout = "auto_round:fp8_static"
    layout = str(layout or "auto")
    return ALIASES.get(layout, layout)


FORMATS: Mapping[str, Callable[[Checkpoint], list[PackedModule]]] = {
    "gptq": find_gptq_modules,
    "awq": find_awq_modules,
    "auto-round": find_auto_round_modules,
    "intel/auto-round": find_auto_round_modules,
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
EIGHT_BITS = ("I8", "U8", "F8_E4M3", "F8_E5M2")


@dataclass(frozen=True, kw_only=True)
class PackedCheckpoint:
    """The packed modules of a checkpoint in a format that is unpacked here."""

    checkpoint: Checkpoint
    modules: tuple[PackedModule, ...]
    also_quantised: tuple[str, ...]
    """What the format also quantises when the model is served: "activations", "the key-value cache"."""
    arrange: Callable[[str, Tensor], Iterator[tuple[str, Tensor]]] | None = None
    """Gives transformers' tensors for one that is not packed, by its name; None if it is stored as they are."""

    def describe(self) -> str:
        """A note on how the model is run."""
        activations = (
            f"; the format also quantises {' and '.join(self.also_quantised)} in serving, which is not done here and "
            "not in the numbers"
            if self.also_quantised
            else "; activations are not quantised"
        )
        checkpoint, count = self.checkpoint, len(self.modules)
        return (
            f"{checkpoint} is quantised ({checkpoint.quant_method}), and its {count} packed matrices were "
            f"unpacked{activations}"
        )


def find_packed_modules(checkpoint: Checkpoint) -> PackedCheckpoint | None:
    """The packed modules of a checkpoint; None if it is not quantised, or in a format that transformers loads.

    Raises:
        ModelError: if the layout is not supported, or the tensors contradict the settings.
    """
    settings, method = checkpoint.quantisation, checkpoint.quant_method
    if settings is None or method is None or method not in FORMATS:
        return None
    subject = f"{checkpoint} is quantised ({method})"
    try:
        check_rotations(settings)
        modules = FORMATS[method](checkpoint)
        also_quantised = _list_also_quantised(checkpoint, settings)
    except UnsupportedLayoutError as error:
        raise ModelError(
            f"{subject} in a layout that is not read: {error}; quantise or convert it to another layout, or save it "
            "dequantised"
        ) from error
    codes = [] if modules else _codes_alone(checkpoint)
    if not modules and method == "fp8" and not codes:
        return None  # weights that transformers decodes, or that are not quantised
    if codes:
        raise ModelError(
            f"{subject}, and its matrices of codes have no scales, such as {codes[0][:120]} "
            f"({checkpoint.tensors[codes[0]].kind}); fetch or quantise the model again"
        )
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


def _codes_alone(checkpoint: Checkpoint) -> list[str]:
    """The names of the matrices of 8-bit numbers; none where tensors are scales."""
    if any("scale" in name.rpartition(".")[2] for name in checkpoint.tensors):
        return []
    return [
        name
        for name, tensor in checkpoint.tensors.items()
        if tensor.kind in EIGHT_BITS and len(tensor.shape) > 1
    ]


def _list_also_quantised(checkpoint: Checkpoint, settings: Mapping[str, Any]) -> tuple[str, ...]:
    """What a format also quantises when the model is served."""
    act_bits = settings.get("act_bits")
    rounds_activations = (
        FORMATS[str(checkpoint.quant_method)] is find_scaled_float_modules
        or settings.get("quantize_activations") is True  # MLX
        or settings.get("load_in_8bit") is True  # bitsandbytes
        or (isinstance(act_bits, int) and 0 < act_bits <= 8)  # AutoRound
    ) or any(
        group.get("input_activations") or group.get("output_activations")
        for group in read_weight_groups(settings)
    )
    rounds_cache = any(settings.get(name) for name in CACHE_SETTINGS) or any(
        name.endswith(CACHE_SCALES) for name in checkpoint.tensors
    )
    names = {"activations": rounds_activations, "the key-value cache": rounds_cache}
    return tuple(name for name, is_quantised in names.items() if is_quantised)
