"""Quantised checkpoints that transformers loads: a note on how they run, and a sentence on why one cannot be loaded."""

from pathlib import Path
from typing import Any

import torch

from kleash.models.quantised.settings import read_quantisation_settings

MAX_METHOD_CHARACTERS = 40
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


def describe_quantisation(folder: Path, network: Any, subject: str) -> tuple[str, ...]:
    """A note on how a quantised checkpoint runs, on decoded or on packed weights; none if it is not quantised."""
    method = _read_method(folder)
    if method is None:
        return ()
    how = "it runs on packed weights" if is_packed(network) else "its weights were decoded when it was loaded"
    return (f"{subject} is quantised ({method}), and {how}",)


def is_packed(network: Any) -> bool:
    """Whether a network computes with packed weights: integers, numbers of 8 bits, or tensors of other classes."""
    return any(
        not weight.is_floating_point()
        or weight.element_size() == 1
        or (type(weight) is not torch.nn.Parameter and not hasattr(weight, "device_mesh"))
        for weight in network.parameters()
    )


def explain_refusal(folder: Path) -> str:
    """What to add to the error about a checkpoint that transformers cannot load; "" if it is not quantised."""
    method = _read_method(folder)
    if method is None:
        return ""
    needs = REQUIREMENTS.get(method)
    if needs is None:
        return f"; it is quantised ({method}), a format that neither kleash nor transformers reads; save it dequantised"
    hardware = f"{torch.cuda.device_count()} GPUs" if torch.cuda.is_available() else "this CPU"
    return (
        f"; it is quantised ({method}), for which transformers needs {needs} beside {hardware}; save it dequantised "
        "where it can be loaded"
    )


def _read_method(folder: Path) -> str | None:
    """The name of the format of a quantised checkpoint; None if it is not quantised."""
    settings = read_quantisation_settings(folder)
    if settings is None:
        return None
    return str(settings.get("quant_method", "unknown")).lower()[:MAX_METHOD_CHARACTERS]
