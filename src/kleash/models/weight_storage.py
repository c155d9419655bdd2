"""How a checkpoint stores its weights: bytes, bits a weight, and the type of each module."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from kleash.errors import ModelError
from kleash.models.checkpoints.files import (
    ADAPTER_WEIGHTS,
    list_weight_files,
    read_json,
    read_safetensors_header,
)
from kleash.models.checkpoints.gguf_files import open_gguf
from kleash.models.checkpoints.resolution import Checkpoint
from kleash.models.quantised.packed_formats import find_packed_modules
from kleash.models.text_towers import is_of_other_part
from kleash.store.measurement import StoredWeights

PACKED_NAMES = ("qweight", "weight_packed", "blocks")
"""Names of tensors that hold packed weights, where "weight" does not."""
SCALE_NAMES = ("scales", "weight_scale", "weight_scale_inv", "absmax", "SCB", "_scale", "_shift", "scale")
"""Names of tensors that stand beside quantised weights."""
DENSE_TYPES = ("F64", "F32", "F16", "BF16")
NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def describe_weights(checkpoint: Checkpoint, parameters: int, config: Any) -> StoredWeights:
    """How the weights of a checkpoint's text part, and of an adapter over it, are stored.

    Args:
        checkpoint: the checkpoint.
        parameters: number of weights of its network, without the adapter.
        config: of the checkpoint; None if it is a GGUF file, which has a text part only.

    Raises:
        ModelError: if a header is damaged.
    """
    adapter = _AdapterSize.of(checkpoint)
    if checkpoint.gguf:
        files = open_gguf(checkpoint.gguf)
        modules = {
            tensor.name.rpartition(".")[0]: tensor.kind for tensor in files.tensors if len(tensor.shape) > 1
        }
        return _stored_weights(files.num_bytes, files.elements, modules, adapter)
    entries = {
        name: entry
        for path in list_weight_files(checkpoint.folder)
        for name, entry in read_safetensors_header(path).items()
        if not is_of_other_part(config, name)
    }
    num_bytes = _bytes_of(entries)
    try:
        packed = find_packed_modules(checkpoint.folder, checkpoint.name)
    except ModelError:  # a layout that the format's own kernels read, or the model would not have been loaded
        packed = None
    packed_modules = [
        module for module in (() if packed is None else packed.modules) if entries.keys() & set(module.parts)
    ]
    packed_parts = {part for module in packed_modules for part in module.parts}
    types = {
        name: entry["dtype"]
        for name, entry in entries.items()
        if len(entry["shape"]) > 1 and name not in packed_parts
    }
    modules = {module.name: module.kind for module in packed_modules}
    modules |= dict(_module_types(checkpoint.folder, types, set(entries)))
    is_dense = all(kind in DENSE_TYPES for kind in modules.values())
    # Packed weights and their scales are other numbers than the network's; tensors that are not loaded count here.
    elements = sum(prod(entry["shape"]) for entry in entries.values()) if is_dense else parameters
    return _stored_weights(num_bytes, elements, modules, adapter)


class _AdapterSize(NamedTuple):
    """The size of an adapter's weights, 0 without one."""

    num_bytes: int
    elements: int

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "_AdapterSize":
        """The size of a checkpoint's adapter."""
        if checkpoint.adapter is None:
            return cls(0, 0)
        entries = read_safetensors_header(checkpoint.adapter / ADAPTER_WEIGHTS)
        return cls(_bytes_of(entries), sum(prod(entry["shape"]) for entry in entries.values()))


def _bytes_of(entries: Mapping[str, Mapping[str, Any]]) -> int:
    """The bytes of tensors in safetensors files."""
    return sum(entry["data_offsets"][1] - entry["data_offsets"][0] for entry in entries.values())


def _stored_weights(
    num_bytes: int, elements: int, modules: Mapping[str, str], adapter: _AdapterSize
) -> StoredWeights:
    num_bytes, elements = num_bytes + adapter.num_bytes, elements + adapter.elements
    return StoredWeights(
        bytes=num_bytes,
        bits_per_weight=8 * num_bytes / elements if elements else 0.0,
        modules=_by_layers(modules),
    )


def _module_types(folder: Path, types: Mapping[str, str], names: set[str]) -> Iterator[tuple[str, str]]:
    """Each module with a matrix, and the type of its weights: "BF16", "gptq (I32)"."""
    settings = read_json(folder / "config.json").get("quantization_config")
    method = str(settings.get("quant_method", "quantised")) if isinstance(settings, dict) else "quantised"
    for name, dtype in types.items():
        module, _, part = name.rpartition(".")
        if part not in ("weight", *PACKED_NAMES) and not part.endswith(("_blocks", "_proj")):
            continue
        is_quantised = dtype not in DENSE_TYPES or any(f"{module}.{scale}" in names for scale in SCALE_NAMES)
        yield (
            module if part == "weight" else f"{module}.{part}",
            f"{method} ({dtype})" if is_quantised else dtype,
        )


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
