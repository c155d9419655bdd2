"""Which packed format a checkpoint has, by its settings, and the modules that are stored in it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from kleash.errors import ModelError
from kleash.models.checkpoints.files import read_json
from kleash.models.quantised.auto_round import (
    GPTQ_PACKINGS,
    SCALED_PACKINGS,
    read_auto_round_layout,
)
from kleash.models.quantised.awq import find_awq_modules
from kleash.models.quantised.bitsandbytes import find_bitsandbytes_modules
from kleash.models.quantised.gptq import GPTQSettings, find_gptq_modules
from kleash.models.quantised.mlx import arrange_tensors, find_mlx_modules
from kleash.models.quantised.packed_modules import (
    PackedModule,
    TensorHeader,
    TensorReader,
    group_by_module,
    read_headers,
)
from kleash.models.quantised.scaled_weights import BLOCK_SCALES, WeightScheme, find_scaled_modules
from kleash.models.quantised.settings import (
    UnsupportedLayoutError,
    check_modelopt_algorithms,
    check_rotations,
    describe_settings_place,
    has_reciprocal_scales,
    read_block,
    read_group_size,
    read_integer,
    read_module_group_sizes,
    read_object,
    read_quantisation_settings,
)

GPTQ_LAYOUTS = {"gptq": True, "gptq_v2": False}
"""``checkpoint_format`` → whether zero points are stored less one."""
AWQ_LAYOUTS = {"gemm": False, "exllama": False, "ipex": False, "gemv": True}
"""``version`` → whether the files have the layout "gemv"; the others are kernels for files in the layout "gemm"."""
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
"""Formats of compressed-tensors that ``scaled_weights`` reads."""
MLX_METHODS = frozenset(("mlx", "metal"))
"""Names of MLX's layout: its own, and transformers' for the same with another name of the biases."""
CACHE_SETTINGS = ("kv_cache_scheme", "kv_cache_quant_algo")
CACHE_SCALES = (".k_scale", ".v_scale", ".kv_scale")
"""Ends of the names of tensors by which stored keys and values are divided."""
EIGHT_BITS = ("I8", "U8", "F8_E4M3", "F8_E5M2")
FP8_BLOCK = (128, 128)
"""Rows and columns of the blocks of fine-grained FP8 whose settings do not say."""


@dataclass(frozen=True, kw_only=True)
class PackedCheckpoint:
    """The packed modules of a checkpoint in a format that is unpacked here."""

    method: str
    """Name of the format: "gptq"."""
    modules: tuple[PackedModule, ...]
    headers: Mapping[str, TensorHeader]
    """Of all its tensors, by name."""
    also_quantised: tuple[str, ...]
    """What the format also quantises when the model is served: "activations", "the key-value cache"."""
    arrange: Callable[[str, Tensor], Iterator[tuple[str, Tensor]]] | None = None
    """Gives transformers' tensors for one that is not packed, by its name; None if it is stored as they are."""

    def describe(self, subject: str) -> str:
        """A note on how the model is run."""
        activations = (
            f"; the format also quantises {' and '.join(self.also_quantised)} in serving, which is not done here and "
            "not in the numbers"
            if self.also_quantised
            else "; activations are not quantised"
        )
        count = len(self.modules)
        return f"{subject} is quantised ({self.method}), and its {count} packed matrices were unpacked{activations}"


@dataclass(frozen=True, kw_only=True)
class _PackedTensors:
    """The tensors and settings of a checkpoint, from which a format finds its modules."""

    subject: str
    headers: Mapping[str, TensorHeader]
    settings: Mapping[str, Any]
    reader: TensorReader
    model_type: str
    """Of config.json."""


def find_packed_modules(folder: Path, subject: str) -> PackedCheckpoint | None:
    """The packed modules of a checkpoint.

    Args:
        folder: of the checkpoint.
        subject: the model, for errors.

    Returns:
        None if the checkpoint is not quantised, or in a format that transformers loads.

    Raises:
        ModelError: if the layout is not supported, or the tensors contradict the settings.
    """
    settings = read_quantisation_settings(folder)
    method = "" if settings is None else str(settings.get("quant_method", "")).lower()
    if settings is None or method not in FORMATS:
        return None
    headers = read_headers(folder)
    model_type = str(read_json(folder / "config.json").get("model_type", ""))
    try:
        check_rotations(settings)
        with TensorReader(headers) as reader:
            tensors = _PackedTensors(
                subject=subject, headers=headers, settings=settings, reader=reader, model_type=model_type
            )
            modules = FORMATS[method](tensors)
            rounded = _rounds_activations(settings)
    except UnsupportedLayoutError as error:
        raise ModelError(
            f"{subject} is quantised ({method}) in a layout that is not read: {error}; quantise or convert it to "
            "another layout, or save it dequantised"
        ) from error
    if not modules and method == "fp8" and not _codes_alone(headers):
        return None  # weights that transformers decodes, or that are not quantised
    if not modules and (method != "compressed-tensors" or _weight_groups(settings)):
        codes = _codes_alone(headers)
        if codes:
            raise ModelError(
                f"{subject} is quantised ({method}), and its matrices of codes have no scales, such as "
                f"{codes[0][:120]} ({headers[codes[0]].dtype}); fetch or quantise the model again"
            )
        raise ModelError(
            f"{subject} is quantised ({method}) according to its settings, and none of its tensors is packed; remove "
            f"{describe_settings_place(folder)} if they are not quantised, or fetch the checkpoint again"
        )
    _check_stored_once(modules, headers, subject)
    return PackedCheckpoint(
        method=method,
        modules=tuple(modules),
        headers=headers,
        also_quantised=(
            *(("activations",) if rounded else ()),
            *(("the key-value cache",) if _rounds_cache(settings, headers) else ()),
        ),
        arrange=arrange_tensors(headers, model_type) if method in MLX_METHODS else None,
    )


def _check_stored_once(
    modules: Sequence[PackedModule], headers: Mapping[str, TensorHeader], subject: str
) -> None:
    """Refuse a checkpoint that holds a matrix both packed and as it is.

    Raises:
        ModelError: naming the first of them.
    """
    repeated = [
        each.parameter for each in modules if each.parameter in headers and each.parameter not in each.parts
    ]
    if repeated:
        raise ModelError(
            f"{subject} holds {len(repeated)} matrices both packed and not, such as {repeated[0][:120]}; fetch or "
            "quantise the model again"
        )


def _codes_alone(headers: Mapping[str, TensorHeader]) -> list[str]:
    """The names of the matrices of 8-bit numbers; none where tensors are scales."""
    if any("scale" in name.rpartition(".")[2] for name in headers):
        return []
    return [name for name, header in headers.items() if header.dtype in EIGHT_BITS and len(header.shape) > 1]


def _gptq_modules(tensors: _PackedTensors) -> list[PackedModule]:
    """The modules of a GPTQ checkpoint."""
    settings = tensors.settings
    layout = str(settings.get("checkpoint_format") or settings.get("format") or "gptq")
    if layout not in GPTQ_LAYOUTS or settings.get("is_marlin_format") is True:
        raise UnsupportedLayoutError(f"its checkpoint_format is {layout!r:.60}, and not gptq or gptq_v2")
    return find_gptq_modules(
        group_by_module(tensors.subject, tensors.headers),
        GPTQSettings(
            method="gptq",
            bits=read_integer(settings, "bits"),
            group_size=read_group_size(settings),
            has_shifted_zeros=GPTQ_LAYOUTS[layout],
            has_overrides=bool(settings.get("dynamic")),
            group_sizes=read_module_group_sizes(settings, "dynamic"),
            is_symmetric=settings.get("sym") is True,
        ),
    )


def _awq_modules(tensors: _PackedTensors) -> list[PackedModule]:
    """The modules of an AWQ checkpoint."""
    settings = tensors.settings
    layout = str(settings.get("version") or settings.get("checkpoint_format") or "gemm").lower()
    bits = read_integer(settings, "bits", "w_bit")
    if bits != 4:
        raise UnsupportedLayoutError(f"it has {bits} bits, and AWQ's layouts 4")
    if layout not in AWQ_LAYOUTS:
        raise UnsupportedLayoutError(f"its version is {layout!r:.60}, and not gemm or gemv")
    return find_awq_modules(
        group_by_module(tensors.subject, tensors.headers),
        "awq",
        read_group_size(settings),
        is_gemv=AWQ_LAYOUTS[layout],
    )


def _auto_round_modules(tensors: _PackedTensors) -> list[PackedModule]:
    """The modules of an AutoRound checkpoint, which is packed as GPTQ, AWQ or compressed-tensors do."""
    settings = tensors.settings
    layout = read_auto_round_layout(settings)
    modules = group_by_module(tensors.subject, tensors.headers)
    if layout == "auto_round:auto_awq":
        return find_awq_modules(modules, "auto-round", read_group_size(settings), is_gemv=False)
    if layout in SCALED_PACKINGS:
        data_type = str(settings.get("data_type"))
        if not data_type.startswith(SCALED_PACKINGS[layout]):
            raise UnsupportedLayoutError(f"its packing_format is {layout!r:.60} of {data_type!r:.40}")
        schemes: list[WeightScheme] = []  # scales of FP8 are of rows or of the matrix
        if not data_type.startswith("fp"):
            schemes += [
                WeightScheme(bits=read_integer(settings, "bits"), group_size=read_group_size(settings))
            ]
        return find_scaled_modules(modules, "auto-round", schemes, tensors.reader)
    if layout not in GPTQ_PACKINGS:
        raise UnsupportedLayoutError(f"its packing_format is {layout!r:.60}")
    return find_gptq_modules(
        modules,
        GPTQSettings(
            method="auto-round",
            bits=read_integer(settings, "bits"),
            group_size=read_group_size(settings),
            has_shifted_zeros=GPTQ_PACKINGS[layout],
            has_overrides=bool(settings.get("extra_config")) or bool(settings.get("dynamic")),
            group_sizes={
                **read_module_group_sizes(settings, "extra_config"),
                **read_module_group_sizes(settings, "dynamic"),
            },
            is_symmetric=settings.get("sym") is True,
        ),
    )


def _compressed_modules(tensors: _PackedTensors) -> list[PackedModule]:
    """The modules of a compressed-tensors checkpoint."""
    settings = tensors.settings
    groups = _weight_groups(settings)
    sparsity = read_object(settings, "sparsity_config").get("format", "dense")
    formats = [
        settings.get("format", "dense"),
        *(group.get("format") or "dense" for group in groups),
        sparsity,
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
    modules = group_by_module(tensors.subject, tensors.headers)
    return find_scaled_modules(modules, "compressed-tensors", schemes, tensors.reader)


def _scaled_float_modules(tensors: _PackedTensors) -> list[PackedModule]:
    """The modules of an FP8 or NVFP4 checkpoint of AutoFP8, FBGEMM, ModelOpt, or with the blocks of DeepSeek-V3.

    transformers decodes fine-grained FP8 in which all experts of a layer are one tensor.
    """
    method = str(tensors.settings.get("quant_method")).lower()
    if method == "modelopt":
        check_modelopt_algorithms(tensors.settings)
    has_joint_experts = any(
        name.endswith("_scale_inv") and not name.endswith(f".{BLOCK_SCALES}") for name in tensors.headers
    )
    if has_joint_experts:
        return []
    modules = group_by_module(tensors.subject, tensors.headers)
    has_blocks = any(BLOCK_SCALES in module.headers for module in modules.values())
    block = read_block(tensors.settings, "weight_block_size") or FP8_BLOCK
    schemes = [WeightScheme(bits=8, block=block, divides=has_reciprocal_scales(tensors.settings))]
    schemes = schemes if has_blocks else []
    return find_scaled_modules(modules, method, schemes, tensors.reader)


def _weight_groups(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The groups of modules in the settings of compressed-tensors."""
    groups = read_object(settings, "config_groups")
    return [read_object(groups, name) for name in groups]


def _bitsandbytes_modules(tensors: _PackedTensors) -> list[PackedModule]:
    """The modules of a bitsandbytes checkpoint."""
    modules = group_by_module(tensors.subject, tensors.headers)
    return find_bitsandbytes_modules(modules, tensors.headers, tensors.reader)


def _mlx_modules(tensors: _PackedTensors) -> list[PackedModule]:
    """The modules of an MLX checkpoint."""
    modules = group_by_module(tensors.subject, tensors.headers)
    return find_mlx_modules(modules, tensors.settings, tensors.model_type)


def _rounds_activations(settings: Mapping[str, Any]) -> bool:
    """Whether a format quantises activations when the model is served."""
    method = str(settings.get("quant_method")).lower()
    if method == "mlx":
        return settings.get("quantize_activations") is True
    if method == "bitsandbytes":
        return settings.get("load_in_8bit") is True
    if FORMATS[method] is _auto_round_modules:
        act_bits = settings.get("act_bits")
        return isinstance(act_bits, int) and 0 < act_bits <= 8
    return method in ("fp8", "fbgemm_fp8", "modelopt") or any(
        group.get("input_activations") or group.get("output_activations")
        for group in _weight_groups(settings)
    )


def _rounds_cache(settings: Mapping[str, Any], headers: Mapping[str, TensorHeader]) -> bool:
    """Whether a format quantises stored keys and values when the model is served."""
    return any(settings.get(name) for name in CACHE_SETTINGS) or any(
        name.endswith(CACHE_SCALES) for name in headers
    )


FORMATS: Mapping[str, Callable[[_PackedTensors], list[PackedModule]]] = {
    "gptq": _gptq_modules,
    "awq": _awq_modules,
    "auto-round": _auto_round_modules,
    "intel/auto-round": _auto_round_modules,
    "compressed-tensors": _compressed_modules,
    "fp8": _scaled_float_modules,
    "fbgemm_fp8": _scaled_float_modules,
    "modelopt": _scaled_float_modules,
    "bitsandbytes": _bitsandbytes_modules,
    "mlx": _mlx_modules,
    "metal": _mlx_modules,
}
"""``quant_method`` of config.json → the packed modules of such a checkpoint."""
