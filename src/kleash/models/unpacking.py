"""Building an ordinary transformers network from a checkpoint whose weights are stored packed."""

from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from kleash.checkpoints.quantised.packed_formats import PackedCheckpoint
from kleash.checkpoints.quantised.packed_modules import PackedModule
from kleash.checkpoints.resolution import GENERATION_CONFIG
from kleash.extras import import_extra
from kleash.models.filling import fill_network

ACTIVATION_TENSORS = frozenset(
    (
        *("input_scale", "output_scale", "input_zero_point", "output_zero_point", "input_global_scale"),
        *("activation_scale",),
        *("q_scale", "k_scale", "v_scale", "q_zero_point", "k_zero_point", "v_zero_point"),
    )
)
"""Last parts of names of tensors by which activations and stored keys and values are quantised in serving."""


def load_unpacked_network(
    packed: PackedCheckpoint,
    load: Callable[..., tuple[Any, Any]],
    skeleton: Any,
    *,
    dtype: torch.dtype | str,
    device_map: str | None,
) -> tuple[Any, Any]:
    """Load a checkpoint with packed weights as an ordinary network, with each matrix unpacked into ``dtype``.

    Products are those of the unpacked matrices with unrounded activations. Beside the result, memory holds one
    matrix in float32; the packed tensors are mapped from their files.

    Args:
        packed: its packed modules.
        load: ``from_pretrained`` of the network's class.
        skeleton: the network on the meta device.
        dtype: of the parameters; "auto" for that of config.json, or else bfloat16.
        device_map: how transformers spreads the model over devices; None for the CPU.

    Returns:
        The network, and transformers' report of how the tensors fit.

    Raises:
        ModelError: if the values of a packed tensor are invalid.
    """
    config = _without_quantisation(skeleton.config, tied=not _has_packed_head(packed, skeleton))
    resolved = _resolve_dtype(dtype, config)
    parameters = dict(_read_parameters(packed, skeleton, resolved))
    network, report = fill_network(load, config, parameters, resolved, device_map)
    unexpected = set(report["unexpected_keys"])
    report["unexpected_keys"] = unexpected - _zero_biases(packed, unexpected)
    folder = packed.checkpoint.folder
    network.config.name_or_path = str(folder)
    if (folder / GENERATION_CONFIG).is_file() and network.can_generate():
        transformers = import_extra("transformers", "models")
        network.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return network, report


def _read_parameters(
    packed: PackedCheckpoint, skeleton: Any, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the ordinary checkpoint by name."""
    stored = packed.checkpoint.safetensors
    modules = {module.parameter: module for module in packed.modules}
    used_by_modules = {part for module in packed.modules for part in module.parts}
    transposed = tuple(f".{name}" for name in _list_transposed_weights(skeleton))
    for name in [*(name for name in stored if name not in used_by_modules), *modules]:
        if name.rpartition(".")[2] in ACTIVATION_TENSORS:
            continue
        if name in modules:
            weight = unpack(modules[name], dtype)
            yield name, weight.T.contiguous() if f".{name}".endswith(transposed) else weight
        elif packed.arrange is not None:
            yield from packed.arrange(name, stored.read(name))
        else:
            yield name, stored.read(name)


def _list_transposed_weights(skeleton: Any) -> list[str]:
    """The names of weights that a network has as [inputs, outputs]: those of GPT-2's ``Conv1D``.

    Formats store them as [outputs, inputs]. The name of the base model is left out, since files may lack it.
    """
    prefix = f"{skeleton.base_model_prefix}."
    return [
        f"{name.removeprefix(prefix)}.weight"
        for name, module in skeleton.named_modules()
        if type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"
    ]


def _zero_biases(packed: PackedCheckpoint, names: Iterable[str]) -> set[str]:
    """The names of biases of packed modules that are all zeros, which AutoGPTQ writes for modules that have none."""
    stored, weights = packed.checkpoint.safetensors, {module.parameter for module in packed.modules}
    return {
        name
        for name in names
        if name in stored
        and name.endswith(".bias")
        and f"{name.removesuffix('bias')}weight" in weights
        and not stored.read(name).any()
    }


def unpack(module: PackedModule, dtype: torch.dtype) -> Tensor:
    """The matrix of a packed module.

    Args:
        module: the module.
        dtype: of the result; the arithmetic is in at least float32.

    Raises:
        ModelError: if a value of its tensors is invalid.
    """
    return module.decode(torch.promote_types(dtype, torch.float32)).to(dtype)


def _resolve_dtype(dtype: torch.dtype | str, config: Any) -> torch.dtype:
    """The dtype of the parameters."""
    if isinstance(dtype, torch.dtype):
        return dtype
    stored = getattr(config.get_text_config(decoder=True), "dtype", None) or getattr(config, "dtype", None)
    return stored if isinstance(stored, torch.dtype) else torch.bfloat16


def _has_packed_head(packed: PackedCheckpoint, skeleton: Any) -> bool:
    """Whether the output embedding is packed, and so is another matrix than the input embedding."""
    head = skeleton.get_output_embeddings()
    names = [name for name, module in skeleton.named_modules() if head is not None and module is head]
    ends = tuple(f".{name}.weight" for name in names)  # a name in a file may have the prefix of the text part
    return any(f".{module.parameter}".endswith(ends) for module in packed.modules)


def _without_quantisation(config: Any, *, tied: bool) -> Any:
    """A copy of a configuration without ``quantization_config``, and with a head of its own unless ``tied``."""
    config = deepcopy(config)
    for part in (config, config.get_text_config(decoder=True)):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
        if not tied:
            part.tie_word_embeddings = False  # transformers 4 would tie a head that has a matrix of its own
    return config
