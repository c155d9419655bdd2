"""Quantised checkpoints that kleash does not unpack: which run packed, how they run, and why one cannot be loaded."""

from collections.abc import Collection
from importlib.util import find_spec
from typing import Any

import torch

from kleash.checkpoints.quantised.packed_formats import PackedCheckpoint
from kleash.checkpoints.quantised.scaled_weights import SCALE_MEANING
from kleash.checkpoints.resolution import Checkpoint
from kleash.errors import ModelError
from kleash.extras import import_extra

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
MATRIX_NAMES = (".weight", "_proj")
"""Ends of the names of tensors that are matrices of a network."""
KERNEL_PACKAGES = {
    "gptq": "gptqmodel",
    "awq": "gptqmodel",
    "compressed-tensors": "compressed_tensors",
    "fbgemm_fp8": "fbgemm_gpu",
    "fp8": "kernels",
    "bitsandbytes": "bitsandbytes",
}
"""``quant_method`` → the package with which transformers runs packed weights on an accelerator."""
FP8_CAPABILITY = (8, 9)
"""Compute capability of the first NVIDIA GPUs with units for FP8; on older ones transformers decodes it."""


def has_kernels(checkpoint: Checkpoint, device: torch.device) -> bool:
    """Whether transformers can run a checkpoint packed on a device: on accelerators, with the format's package."""
    if device.type == "cpu":
        return False
    settings, method = checkpoint.quantisation, checkpoint.quant_method
    if method == "fp8":
        has_units = device.type != "cuda" or torch.cuda.get_device_capability(device) >= FP8_CAPABILITY
        if not settings.get("weight_block_size") or not has_units or settings.get(SCALE_MEANING):
            return False
    return method in KERNEL_PACKAGES and find_spec(KERNEL_PACKAGES[method]) is not None


def describe_quantisation(
    checkpoint: Checkpoint, packed: PackedCheckpoint | None, network: Any
) -> tuple[str, ...]:
    """A note on how a quantised checkpoint runs, on decoded or on packed weights; none if it is not quantised.

    Args:
        checkpoint: the checkpoint.
        packed: its modules that were unpacked; None if its format is not.
        network: as it was loaded.
    """
    method, types = checkpoint.quant_method, {tensor.kind for tensor in checkpoint.tensors.values()}
    if method is None:
        small = " and ".join(sorted(types & SMALL_FLOAT_TYPES))
        note = f"{checkpoint} has weights in {small} without scales, which were read as they are"
        return (note,) if small else ()
    if packed is not None:
        served = (
            f"the format also quantises {' and '.join(packed.also_quantised)} in serving, which is not done here and "
            "not in the numbers"
            if packed.also_quantised
            else "activations are not quantised"
        )
        how = f", and its {len(packed.modules)} packed matrices were unpacked; {served}"
    elif method == "bitnet":
        how = ", and its layers round activations to 8 bits, as the model was trained"
    elif is_packed(network):
        how = ", and it runs on packed weights"
    elif types & (INTEGER_TYPES | SMALL_FLOAT_TYPES):
        how = ", and its weights were decoded when it was loaded"
    else:
        how = " by its settings, and its files hold ordinary weights, which were read as they are"
    return (f"{checkpoint} is quantised ({method}){how}",)


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


def check_stored_types(checkpoint: Checkpoint, packed: PackedCheckpoint | None) -> None:
    """Refuse a checkpoint with a matrix of codes that nothing decodes: transformers would take them for weights.

    Args:
        checkpoint: the checkpoint.
        packed: its modules that are unpacked; None if its format is not.

    Raises:
        ModelError: naming the first of them.
    """
    method, headers = checkpoint.quant_method, checkpoint.tensors
    has_scales = any("scale" in name.rpartition(".")[2] for name in headers)
    known = import_extra("transformers.quantizers.auto", "models").AUTO_QUANTIZER_MAPPING
    if packed is None and method in known and (has_scales or method != "fp8"):
        return
    # Without a method, numbers of 8 bits and no scales are weights that were rounded to them.
    decoded = set() if packed is None else {part for module in packed.modules for part in module.parts}
    types = INTEGER_TYPES | (SMALL_FLOAT_TYPES if has_scales or method is not None else frozenset[str]())
    codes = [
        name
        for name, header in headers.items()
        if header.kind in types
        and len(header.shape) > 1
        and name.endswith(MATRIX_NAMES)
        and name not in decoded
    ]
    if codes:
        advice = (
            quantisation_advice(checkpoint) or "; its config.json names no quantisation; save it dequantised"
        )
        if packed is not None:
            advice = "; its other matrices were stored with scales; fetch or quantise the model again"
        raise ModelError(
            f"{checkpoint} has matrices stored as codes that are not decoded here, {len(codes)} in all, such as "
            f"{codes[0][:120]} ({headers[codes[0]].kind}){advice}"
        )


def check_unused_parts(
    names: Collection[str], checkpoint: Checkpoint, packed_modules: Collection[str] = ()
) -> None:
    """Refuse a quantised checkpoint with tensors that were not used, without which it is another model.

    They are scales or codes, and whatever a packed module has beside its format's tensors and a bias, such as factors
    of its inputs.

    Args:
        names: of the tensors that were not used.
        checkpoint: the checkpoint.
        packed_modules: names of the modules that were unpacked.

    Raises:
        ModelError: naming the first of them.
    """
    beginnings = tuple(f"{module}." for module in packed_modules)
    needed = [
        name
        for name in names
        if name.rpartition(".")[2] in QUANTISATION_PARTS
        or (name.startswith(beginnings) and not name.endswith(".bias"))
    ]
    if needed and checkpoint.quant_method is not None:
        raise ModelError(
            f"{checkpoint} has {len(needed)} tensors of a quantisation that were not used, such as {needed[0][:120]}, "
            "and its numbers would be wrong without them; save it dequantised where it can be loaded"
        )


def quantisation_advice(checkpoint: Checkpoint) -> str:
    """What to add to the error about a checkpoint that transformers cannot load; "" if it is not quantised."""
    method = checkpoint.quant_method
    if method is None:
        return ""
    return (
        f"; it is quantised ({method}), which transformers reads at most with the format's own package and hardware; "
        "install that, or save it dequantised where it can be loaded"
    )
