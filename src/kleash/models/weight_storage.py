"""How a checkpoint stores its weights: bytes, bits a weight, and the type of each module."""

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from kleash.models.adapters.shared_base import BaseNetwork
from kleash.models.checkpoints.resolution import Checkpoint
from kleash.store.measurement import StoredWeights

PACKED_NAMES = ("qweight", "weight_packed", "blocks")
"""Names of tensors that hold packed weights, where "weight" does not."""
SCALE_NAMES = ("scales", "weight_scale", "weight_scale_inv", "absmax", "SCB", "_scale", "_shift", "scale")
"""Names of tensors that stand beside quantised weights."""
DENSE_TYPES = ("F64", "F32", "F16", "BF16")
NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def describe_weights(checkpoint: Checkpoint, base: BaseNetwork) -> StoredWeights:
    """How the weights of a network and of the adapter over it are stored.

    Args:
        checkpoint: with the adapter, if any.
        base: the network, as it was loaded.
    """
    adapter = checkpoint.adapter_tensors.values()
    if checkpoint.gguf:
        matrices = [tensor for tensor in base.tensors if len(tensor.shape) > 1]
        modules = {tensor.name.rpartition(".")[0]: tensor.kind for tensor in matrices}
        elements = sum(tensor.elements for tensor in base.tensors)
    else:
        modules = _types_of_modules(checkpoint, base)
        is_dense = all(kind in DENSE_TYPES for kind in modules.values())
        # Packed weights and their scales are other numbers than the network's; tensors that are not loaded count here.
        elements = sum(tensor.elements for tensor in base.tensors) if is_dense else base.parameters
    elements += sum(tensor.elements for tensor in adapter)
    num_bytes = sum(tensor.num_bytes for tensor in (*base.tensors, *adapter))
    return StoredWeights(
        bytes=num_bytes,
        bits_per_weight=8 * num_bytes / elements if elements else 0.0,
        modules=_by_layers(modules),
    )


def _types_of_modules(checkpoint: Checkpoint, base: BaseNetwork) -> dict[str, str]:
    """The type of the weights of each module with a matrix: "BF16", "gptq int4, groups of 128", "mxfp4 (U8)"."""
    names = {tensor.name for tensor in base.tensors}
    packed = [module for module in base.packed if not names.isdisjoint(module.parts)]
    packed_parts = {part for module in packed for part in module.parts}
    method = checkpoint.quant_method or "quantised"

    kinds = {module.name: module.kind for module in packed}
    for tensor in base.tensors:
        module, _, part = tensor.name.rpartition(".")
        is_weight = part in ("weight", *PACKED_NAMES) or part.endswith(("_blocks", "_proj"))
        if len(tensor.shape) > 1 and tensor.name not in packed_parts and is_weight:
            is_quantised = tensor.kind not in DENSE_TYPES or any(
                f"{module}.{scale}" in names for scale in SCALE_NAMES
            )
            name = module if part == "weight" else tensor.name
            kinds[name] = f"{method} ({tensor.kind})" if is_quantised else tensor.kind
    return kinds


def _by_layers(modules: Mapping[str, str]) -> dict[str, str]:
    """Modules by type, those that differ in the number of a layer together: "blk.0-27.attn_q" → "Q4_K"."""
    layers: dict[tuple[str, str], set[int]] = {}
    for module, kind in modules.items():
        numbers = NUMBER.findall(module)
        pattern = NUMBER.sub("*", module)
        layers.setdefault((pattern, kind), set()).update(int(number) for number in numbers[:1])
    return {
        pattern.replace("*", _ranges(sorted(numbers)), 1): kind for (pattern, kind), numbers in layers.items()
    }


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as ranges: "0-3,7"."""
    runs: Iterable[list[int]] = (
        [number for _, number in run]
        for _, run in groupby(enumerate(numbers), key=lambda place: place[1] - place[0])
    )
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
