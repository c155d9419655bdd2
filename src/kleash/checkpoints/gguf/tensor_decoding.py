"""The parameters of a network that the tensors of a GGUF file stand for: their names and their decoded values.

Names follow from the table by which llama.cpp's converter names the parameters of a checkpoint. What the converter
renames before it looks there is an exception of the architecture.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kleash.checkpoints.files import StoredTensor
from kleash.checkpoints.gguf.architectures import (
    FUSED_EXPERTS,
    FUSED_PROJECTIONS,
    LONG_ROPE,
    PROJECTIONS,
    ROPE_FACTORS,
    GGUFArchitecture,
)
from kleash.errors import ModelError
from kleash.extras import import_extra

MAX_THREADS = 4
"""Tensors that are decoded at once, each of which is in memory in float32."""
SCALE = re.compile(r"\.(input_)?scale$")
"""End of the names of factors beside NVFP4: of the weights, or of activations, which are not rounded here."""
FACTORS = frozenset((ROPE_FACTORS, *LONG_ROPE))
"""Tensors that no parameter holds."""
LAYERS = "model.layers"
BLOCK_TENSOR = re.compile(r"blk\.(\d{1,6})\.([a-z0-9_.]+?)(?:\.(weight|bias|scale))?")
BLOCK_NUMBER = re.compile(r"blk\.(\d{1,6})\.")


@dataclass(frozen=True, kw_only=True)
class ParameterNames:
    """The names in a checkpoint of the parameters that a file's tensors stand for."""

    exceptions: Mapping[str, str]
    """Of the architecture: part of a block → module of a layer, part with its suffix → parameter, and tensor outside of
    blocks → parameter; "{expert}" stands for the number of an expert."""
    converted: Mapping[str, str]
    """Tensor → parameter by the table of the package gguf."""

    @classmethod
    def of(cls, name: str, exceptions: Mapping[str, str], network: Any) -> "ParameterNames":
        """The names for a network of the architecture ``name``, on any device."""
        gguf = import_extra("gguf", "models")
        (arch,) = (arch for arch, its_name in gguf.MODEL_ARCH_NAMES.items() if its_name == name)
        depth = len({match[1] for key in network.state_dict() if (match := re.search(r"\.(\d+)\.", key))})
        table = gguf.get_tensor_name_map(arch, depth)
        tensors = {
            parameter: table.get_name(parameter, try_suffixes=(".weight", ".bias"))
            for parameter in network.state_dict()
        }
        return cls(
            exceptions=exceptions,
            converted={tensor: parameter for parameter, tensor in tensors.items() if tensor is not None},
        )

    def find(self, name: str) -> str | None:
        """The parameter that a tensor such as "blk.3.attn_q.weight" stands for; None if there is none."""
        match = BLOCK_TENSOR.fullmatch(name)
        if match is None:
            return self.exceptions.get(name, self.converted.get(name))
        number, part, suffix = match.groups()
        if f"{part}.{suffix}" in self.exceptions:
            return f"{LAYERS}.{number}.{self.exceptions[f'{part}.{suffix}']}"
        if part in self.exceptions and suffix != "scale":
            return f"{LAYERS}.{number}.{self.exceptions[part]}" + (f".{suffix}" if suffix else "")
        return self.converted.get(name)


def split_projections(
    tensors: Sequence[StoredTensor], names: ParameterNames, attributes: Mapping[str, Any]
) -> Iterator[StoredTensor]:
    """Iterate over the tensors of a file, with a tensor of queries, keys and values as three.

    Args:
        tensors: of all files of a model.
        names: of its parameters.
        attributes: of its configuration.

    Raises:
        ModelError: if a tensor has not the rows of these heads.
    """
    for tensor in tensors:
        first_part = tensor.name.replace(f".{FUSED_PROJECTIONS}.", f".{PROJECTIONS[0]}.")
        if first_part == tensor.name or names.find(tensor.name) is not None or names.find(first_part) is None:
            yield tensor
            continue
        heads = ("num_attention_heads", "num_key_value_heads")
        queries, keys = (attributes[name] * attributes["head_dim"] for name in heads)
        rows = tensor.shape[0]
        if rows - 2 * keys not in (queries, 2 * queries):  # twice, where they have gates
            raise ModelError(
                f"{tensor.path} has {rows} rows in {tensor.name}, and its heads {queries + 2 * keys}"
            )
        if any(other.name == f"{tensor.name.rpartition('.')[0]}.scale" for other in tensors):
            raise ModelError(f"{tensor.path} has factors of {tensor.name}, which are not read")
        start = 0
        for name, size in zip(PROJECTIONS, (rows - 2 * keys, keys, keys), strict=False):
            yield replace(
                tensor,
                name=tensor.name.replace(FUSED_PROJECTIONS, name),
                shape=(size, *tensor.shape[1:]),
                offset=tensor.offset + tensor.num_bytes // rows * start,
                num_bytes=tensor.num_bytes // rows * size,
            )
            start += size


def decode(tensor: StoredTensor) -> Tensor:
    """The values of a tensor in float32, decoded by ``dequantize`` of the package gguf.

    Raises:
        NotImplementedError: if gguf has no decoder for its type.
        ValueError: if the file has become shorter.
    """
    constants, quants = import_extra("gguf.constants", "models"), import_extra("gguf.quants", "models")
    with tensor.path.open("rb") as file:
        data = np.fromfile(file, dtype=np.uint8, count=tensor.num_bytes, offset=tensor.offset)
    if tensor.kind == "F64":
        return torch.from_numpy(data.view(np.float64).astype(np.float32)).reshape(tensor.shape)
    rows = data.reshape(tensor.elements // tensor.shape[-1], -1)
    with np.errstate(all="ignore"):
        values = quants.dequantize(rows, constants.GGMLQuantizationType[tensor.kind])
    return torch.from_numpy(np.ascontiguousarray(values)).reshape(tensor.shape)


def read_parameters(
    tensors: Sequence[StoredTensor],
    architecture: GGUFArchitecture,
    parameter_names: ParameterNames,
    attributes: Mapping[str, Any],
    dtype: torch.dtype,
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Decode all tensors of a model.

    Args:
        tensors: of all files of the model.
        architecture: of the model.
        parameter_names: of its network.
        attributes: of its configuration.
        dtype: of the parameters.

    Returns:
        The parameters by the names of a safetensors checkpoint, and the names of tensors that are no parameter.

    Raises:
        ModelError: if the tensors do not fit together.
        NotImplementedError, ValueError, RuntimeError: if a tensor cannot be decoded, or has other rows than its heads.
    """
    stored = {tensor.name: tensor for tensor in tensors}
    parts = {
        tensor: _list_parameters(tensor, parameter_names)
        for tensor in split_projections(tensors, parameter_names, attributes)
    }

    def convert(tensor: StoredTensor) -> dict[str, Tensor]:
        values = _value_function(tensor.name, architecture)(decode(tensor))
        scale = stored.get(f"{tensor.name.removesuffix('.weight')}.scale")
        if scale is not None and parameter_names.find(scale.name) is None:
            values = values * _factors(tensor, scale)
        values = _by_halves(tensor, values, architecture, attributes).to(dtype)
        chunks = [values] if len(parts[tensor]) == 1 else values.chunk(len(parts[tensor]), dim=1)
        return dict(
            each
            for name, chunk in zip(parts[tensor], chunks, strict=True)
            for each in _by_parameter(tensor, name, chunk)
        )

    parameters: dict[str, Tensor] = {}
    with ThreadPoolExecutor(min(MAX_THREADS, torch.get_num_threads())) as threads:
        for converted in threads.map(convert, (tensor for tensor, names in parts.items() if names)):
            parameters |= converted
    for arrange in architecture.arrange:
        arrange(parameters, attributes)
    unused = [tensor.name for tensor, names in parts.items() if not names and tensor.name not in FACTORS]
    return parameters, tuple(
        name for name in unused if not (SCALE.search(name) and SCALE.sub(".weight", name) in stored)
    )


def _list_parameters(tensor: StoredTensor, parameter_names: ParameterNames) -> list[str]:
    """The parameters that a tensor stands for; two for gate and up projections of experts in one tensor."""
    name = parameter_names.find(tensor.name)
    if name is None and f".{FUSED_EXPERTS}." in tensor.name and len(tensor.shape) == 3:
        halves = (tensor.name.replace(FUSED_EXPERTS, part) for part in ("ffn_gate_exps", "ffn_up_exps"))
        names = [parameter_names.find(half) for half in halves]
        return [name for name in names if name is not None] if all(names) else []
    return [] if name is None else [name]


def _factors(tensor: StoredTensor, scale: StoredTensor) -> Tensor:
    """The factor of a tensor of NVFP4, or one for each expert, in a shape that multiplies its values.

    Raises:
        ModelError: if there is another number of them.
    """
    if scale.elements not in (1, tensor.shape[0] if len(tensor.shape) == 3 else 1):
        raise ModelError(
            f"{scale.path} has {scale.elements} factors in {scale.name} for {list(tensor.shape)} weights"
        )
    return decode(scale).reshape(-1, *[1] * (len(tensor.shape) - 1))


def _by_parameter(tensor: StoredTensor, parameter: str, values: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The parameters that a decoded tensor holds, each with its name: one for each expert, or a single one."""
    if "{expert}" in parameter:
        for expert, weight in enumerate(values):
            yield parameter.replace("{expert}", str(expert)), weight
    elif tensor.name.endswith(
        "ffn_gate_inp_shexp.weight"
    ):  # a vector in the file, a matrix of one row in the network
        yield parameter, values.reshape(1, -1)
    else:
        yield parameter, values


def _value_function(name: str, architecture: GGUFArchitecture) -> Callable[[Tensor], Tensor]:
    """The function of a tensor's decoded values that gives the parameter's."""
    part = name.removeprefix("blk.").partition(".")[2].partition(".")[0]
    if part in architecture.functions:
        return architecture.functions[part]
    has_offset = name.endswith("norm.weight") and part not in architecture.norms_without_offset
    offset = architecture.norm_offset if has_offset else 0.0
    return lambda values: values - offset if offset else values


def _by_halves(
    tensor: StoredTensor, values: Tensor, architecture: GGUFArchitecture, attributes: Mapping[str, Any]
) -> Tensor:
    """The rows of a query or key projection in the order of the parameter, by halves of a head; others as they are.

    A file has rows i and i + half of a head next to each other where the architecture has an interleaved embedding.
    """
    part = tensor.name.split(".")[-2]
    if not architecture.interleaved_rope or part not in ("attn_q", "attn_k"):
        return values
    heads = attributes["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
    return values.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def read_factors(tensors: Sequence[StoredTensor]) -> dict[str, tuple[float, ...]]:
    """The divisors of the rotary frequencies that a model has, by the names of their tensors."""
    return {
        tensor.name: tuple(decode(tensor).flatten().tolist()) for tensor in tensors if tensor.name in FACTORS
    }
