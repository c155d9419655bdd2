"""Quantised checkpoints that kleash does not unpack: which run packed, how they run, and why one cannot be loaded."""

import re
from collections.abc import Collection, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from kleash.errors import ModelError
from kleash.extras import import_extra
from kleash.models.quantised.packed_modules import TensorHeader, read_headers
from kleash.models.quantised.settings import SCALE_MEANING, read_quantisation_settings
from kleash.models.text_towers import is_of_other_part

MAX_METHOD_CHARACTERS = 40
INTEGER_TYPES = frozenset(f"{kind}{bits}" for kind in "IU" for bits in (8, 16, 32, 64))
SMALL_FLOAT_TYPES = frozenset(
    (*("F4", "F6_E2M3", "F6_E3M2"), *("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"))
)
QUANTISATION_PARTS = frozenset(
    (
        *("scales", "zeros", "qweight", "qzeros", "SCB", "absmax", "weight_scale", "weight_scale_inv"),
        *("weight_scale_2", "weight_global_scale", "weight_zero_point", "weight_packed", "pre_quant_scale"),
        *("smooth_scale", "act_scales", "global_scale"),
    )
)
"""Last parts of the names of tensors that weights or activations are multiplied by, or that hold codes."""
MXFP4_BLOCK_BYTES = 16
MATRIX_NAMES = (".weight", "_proj")
"""Ends of the names of tensors that are matrices of a network."""
REQUIREMENTS = {
    "aqlm": "the package aqlm",
    "auto-round": "the package auto-round",
    "awq": "the package gptqmodel",
    "bitsandbytes": "the packages bitsandbytes and accelerate",
    "compressed-tensors": "the package compressed-tensors",
    "eetq": "the package kernels and an NVIDIA GPU",
    "fbgemm_fp8": "the package fbgemm-gpu and an NVIDIA GPU",
    "fouroversix": "the package fouroversix and an NVIDIA GPU",
    "fp_quant": "the packages fp_quant and qutlass and an NVIDIA GPU",
    "gptq": "the packages gptqmodel and optimum",
    "higgs": "the package flute-kernel and an NVIDIA GPU",
    "hqq": "the package hqq",
    "metal": "the package kernels and an Apple GPU",
    "mxfp4": "the package accelerate",
    "nvfp4": "the package kernels and an NVIDIA GPU",
    "quanto": "the package optimum-quanto",
    "quark": "the package amd-quark",
    "spqr": "the package spqr_quant and an NVIDIA GPU",
    "torchao": "the package torchao",
    "vptq": "the package vptq and an NVIDIA GPU",
}
"""``quant_method`` → what transformers needs to load such a checkpoint."""
OTHER_PACKAGES = {
    "awq_marlin": "vLLM on an NVIDIA GPU",
    "exl2": "ExLlamaV2 on an NVIDIA GPU",
    "exl3": "ExLlamaV3 on an NVIDIA GPU",
    "gptq_marlin": "vLLM on an NVIDIA GPU",
    "marlin": "vLLM on an NVIDIA GPU",
    "modelopt_fp4": "vLLM, SGLang or TensorRT-LLM on an NVIDIA GPU",
    "modelopt_mixed": "vLLM, SGLang or TensorRT-LLM on an NVIDIA GPU",
    "petit_nvfp4": "vLLM on an AMD GPU",
    "ptpc_fp8": "vLLM on an AMD GPU",
    "qqq": "GPTQModel on an NVIDIA GPU",
    "squeezellm": "vLLM on an NVIDIA GPU",
}
"""``quant_method`` that transformers does not know → what reads such a checkpoint."""

KERNEL_PACKAGES = {
    "gptq": "gptqmodel",
    "awq": "gptqmodel",
    "auto-round": "auto_round",
    "intel/auto-round": "auto_round",
    "compressed-tensors": "compressed_tensors",
    "fbgemm_fp8": "fbgemm_gpu",
    "fp8": "kernels",
    "bitsandbytes": "bitsandbytes",
    "torchao": "torchao",
}
"""``quant_method`` → the package with which transformers runs packed weights on an accelerator."""
FP8_CAPABILITY = (8, 9)
"""Compute capability of the first NVIDIA GPUs with units for FP8; on older ones transformers decodes it."""


def has_kernels(folder: Path, device: torch.device) -> bool:
    """Whether transformers can run a checkpoint packed on a device: on accelerators, with the format's package."""
    if device.type == "cpu":
        return False
    settings = read_quantisation_settings(folder)
    method = "" if settings is None else str(settings.get("quant_method", "")).lower()
    if settings is not None and method == "fp8":
        has_units = device.type != "cuda" or torch.cuda.get_device_capability(device) >= FP8_CAPABILITY
        if not settings.get("weight_block_size") or not has_units or settings.get(SCALE_MEANING):
            return False
    return method in KERNEL_PACKAGES and find_spec(KERNEL_PACKAGES[method]) is not None


def describe_quantisation(folder: Path, network: Any, subject: str) -> tuple[str, ...]:
    """A note on how a quantised checkpoint runs, on decoded or on packed weights; none if it is not quantised."""
    method = _read_method(folder)
    if method is None:
        small = {header.dtype for header in read_headers(folder).values()} & SMALL_FLOAT_TYPES
        kinds = " and ".join(sorted(small))
        return (
            (f"{subject} has weights in {kinds} without scales, which were read as they are",)
            if small
            else ()
        )
    if method == "bitnet":
        how = ", and its layers round activations to 8 bits, as the model was trained"
    elif is_packed(network):
        how = ", and it runs on packed weights"
    elif any(header.dtype in INTEGER_TYPES | SMALL_FLOAT_TYPES for header in read_headers(folder).values()):
        how = ", and its weights were decoded when it was loaded"
    else:
        how = " by its settings, and its files hold ordinary weights, which were read as they are"
    return (f"{subject} is quantised ({method}){how}",)


def is_packed(network: Any) -> bool:
    """Whether a network computes with packed weights: integers, numbers of 8 bits, or tensors of other classes."""
    return any(
        not weight.is_floating_point()
        or weight.element_size() == 1
        or (type(weight) is not torch.nn.Parameter and not hasattr(weight, "device_mesh"))
        for weight in network.parameters()
    ) or any(
        name.endswith(".weight") and not buffer.is_floating_point()
        for name, buffer in network.named_buffers()
    )


def check_stored_types(folder: Path, config: Any, subject: str, decoded: Collection[str] | None) -> None:
    """Refuse a checkpoint with a matrix of codes that nothing decodes: transformers would take them for weights.

    Args:
        folder: of the checkpoint.
        config: its transformers configuration.
        subject: the model, for errors.
        decoded: names of the tensors that are unpacked; None if no format is.

    Raises:
        ModelError: naming the first of them.
    """
    method = _read_method(folder)
    if method == "mxfp4":
        _check_mxfp4_parts(read_headers(folder), subject)
    if (
        decoded is None
        and method in import_extra("transformers.quantizers.auto", "models").AUTO_QUANTIZER_MAPPING
    ):
        return
    headers = read_headers(folder)
    # Numbers of 8 bits and no scales are weights that were rounded to them.
    has_scales = any("scale" in name.rpartition(".")[2] for name in headers)
    types = INTEGER_TYPES | (SMALL_FLOAT_TYPES if has_scales or method is not None else frozenset[str]())
    codes = [
        name
        for name, header in headers.items()
        if header.dtype in types
        and len(header.shape) > 1
        and name.endswith(MATRIX_NAMES)
        and name not in (decoded or ())
        and not is_of_other_part(config, name)
    ]
    if codes:
        kind = headers[codes[0]].dtype
        if decoded is not None:
            advice = "; its other matrices were stored with scales; fetch or quantise the model again"
        else:
            advice = explain_refusal(folder) or "; its config.json names no quantisation; save it dequantised"
        raise ModelError(
            f"{subject} has matrices stored as codes that are not decoded here, {len(codes)} in all, such as "
            f"{codes[0][:120]} ({kind}){advice}"
        )


def _check_mxfp4_parts(headers: Mapping[str, TensorHeader], subject: str) -> None:
    """Refuse a checkpoint in MXFP4 of which codes and scales do not fit together: a scale for 16 bytes of codes.

    Raises:
        ModelError: naming the first tensor.
    """
    stems = {name.rpartition("_")[0] for name in headers if name.endswith(("_blocks", "_scales"))}
    for stem in sorted(stems):
        codes, scales = (headers.get(f"{stem}_{part}") for part in ("blocks", "scales"))
        if codes is None or scales is None or {codes.dtype, scales.dtype} != {"U8"}:
            fits = False
        else:
            fits = list(codes.shape) == [*scales.shape, MXFP4_BLOCK_BYTES]
        if not fits:
            stored_codes, stored_scales = (
                "not there" if header is None else f"{header.dtype} {list(header.shape)}"
                for header in (codes, scales)
            )
            raise ModelError(
                f"{subject} is quantised (mxfp4), and its {stem[:120]}_blocks ({stored_codes}) do not fit the _scales "
                f"({stored_scales}): a scale (U8) belongs to {MXFP4_BLOCK_BYTES} bytes of codes; fetch the checkpoint "
                "again"
            )


def check_unused_parts(
    names: Collection[str], folder: Path, subject: str, packed_modules: Collection[str] = ()
) -> None:
    """Refuse a quantised checkpoint with tensors that were not used, without which it is another model.

    They are scales or codes, and whatever a packed module has beside its format's tensors and a bias, such as factors
    of its inputs.

    Args:
        names: of the tensors that were not used.
        folder: of the checkpoint.
        subject: the model, for errors.
        packed_modules: names of the modules that were unpacked.

    Raises:
        ModelError: naming the first of them.
    """
    modules = set(packed_modules)

    def is_needed(name: str) -> bool:
        module, _, part = name.rpartition(".")
        parts = module.split(".")
        within = any(".".join(parts[:count]) in modules for count in range(1, len(parts) + 1))
        return part in QUANTISATION_PARTS or (within and part != "bias")

    needed = [name for name in names if is_needed(name)]
    if needed and _read_method(folder) is not None:
        raise ModelError(
            f"{subject} has {len(needed)} tensors of a quantisation that were not used, such as {needed[0][:120]}, and "
            "its numbers would be wrong without them; save it dequantised where it can be loaded"
        )


def explain_refusal(folder: Path) -> str:
    """What to add to the error about a checkpoint that transformers cannot load; "" if it is not quantised."""
    method = _read_method(folder)
    if method is None:
        return ""
    needs = REQUIREMENTS.get(method)
    if needs is None:
        reader = OTHER_PACKAGES.get(method, "its own software")
        return f"; it is quantised ({method}) in a layout that is read by {reader} and not here; save it dequantised"
    if _are_installed(needs):
        return f"; it is quantised ({method}), and transformers cannot decode its files; fetch the checkpoint again"
    hardware = f"{torch.cuda.device_count()} GPUs" if torch.cuda.is_available() else "this CPU"
    return (
        f"; it is quantised ({method}), for which transformers needs {needs} beside {hardware}; save it dequantised "
        "where it can be loaded"
    )


def _are_installed(needs: str) -> bool:
    """Whether the packages of an entry of ``REQUIREMENTS`` are there, which asks for no GPU."""
    packages = re.findall(
        r"[a-z][\w-]*", needs.partition("package")[2].removeprefix("s").replace(" and ", " ")
    )
    return "GPU" not in needs and all(find_spec(name.replace("-", "_")) is not None for name in packages)


def _read_method(folder: Path) -> str | None:
    """The name of the format of a quantised checkpoint; None if it is not quantised."""
    settings = read_quantisation_settings(folder)
    if settings is None:
        return None
    return str(settings.get("quant_method", "unknown")).lower()[:MAX_METHOD_CHARACTERS]
