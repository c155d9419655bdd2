"""Decoding the tensors of GGUF files into parameters, a few rows at a time and in several threads."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import gcd
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kleash.errors import ModelError
from kleash.extras import import_extra
from kleash.models.checkpoints.files import StoredTensor
from kleash.models.gguf.architectures import (
    FUSED_EXPERTS,
    FUSED_PROJECTIONS,
    PROJECTIONS,
    GGUFArchitecture,
)
from kleash.models.gguf.names import ParameterNames

TILE_WEIGHTS = 1 << 20
"""Weights decoded at once by a thread: 4 MB in float32."""
ROW_WEIGHTS = 1 << 13
"""Weights in a row that is passed to gguf, which decodes 16 rows at once; with few it is several times as slow."""
ROPE_FACTORS = "rope_freqs.weight"
"""Divisors of the rotary frequencies."""
LONG_ROPE = ("rope_factors_short.weight", "rope_factors_long.weight")
"""Divisors of the rotary frequencies for short and for long texts."""
SCALES = (".scale", ".input_scale")
"""Ends of the names of factors beside NVFP4."""
FACTORS = frozenset((ROPE_FACTORS, *LONG_ROPE))
"""Tensors that no parameter holds."""


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
        heads = ("num_attention_heads", "num_key_value_heads", "num_key_value_heads")
        sizes = [attributes[name] * attributes["head_dim"] for name in heads]
        rows = tensor.shape[0]
        if sum(sizes) != rows:
            raise ModelError(f"{tensor.path} has {rows} rows in {tensor.name}, and its heads {sum(sizes)}")
        if any(other.name == f"{tensor.name.rpartition('.')[0]}.scale" for other in tensors):
            raise ModelError(f"{tensor.path} has factors of {tensor.name}, which are not read")
        start = 0
        for name, size in zip(PROJECTIONS, sizes, strict=False):
            yield replace(
                tensor,
                name=tensor.name.replace(FUSED_PROJECTIONS, name),
                shape=(size, *tensor.shape[1:]),
                offset=tensor.offset + tensor.num_bytes // rows * start,
                num_bytes=tensor.num_bytes // rows * size,
            )
            start += size


def decode_rows(tensor: StoredTensor, start: int, stop: int) -> np.ndarray:
    """Decode rows ``start`` to ``stop`` of a tensor: [rows, columns] in float32.

    The decoder is ``dequantize`` of the package gguf.

    Raises:
        ModelError: if gguf has no decoder for its type, or the file has become shorter.
    """
    constants = import_extra("gguf.constants", "models")
    quants = import_extra("gguf.quants", "models")
    kind = constants.GGMLQuantizationType[tensor.kind]
    row_bytes = tensor.num_bytes // (tensor.elements // tensor.shape[-1])
    with tensor.path.open("rb") as file:
        data = np.fromfile(
            file, dtype=np.uint8, count=(stop - start) * row_bytes, offset=tensor.offset + start * row_bytes
        )
    if data.size != (stop - start) * row_bytes:
        raise ModelError(f"{tensor.path} ends within {tensor.name}; fetch or make it again")
    blocks = data.reshape(stop - start, row_bytes)
    if tensor.kind == "F64":
        return blocks.view(np.float64).astype(np.float32)
    block_weights, block_bytes = constants.GGML_QUANT_SIZES[kind]
    row_blocks = gcd(data.size // block_bytes, max(1, ROW_WEIGHTS // block_weights))
    try:
        with np.errstate(all="ignore"):
            values = quants.dequantize(data.reshape(-1, row_blocks * block_bytes), kind)
            return values.reshape(stop - start, -1)
    except NotImplementedError as error:
        raise ModelError(
            f"{tensor.path} holds {tensor.name} in the type {tensor.kind}, which the package gguf does not decode; "
            "quantise the model to another type"
        ) from error


def read_parameters(
    tensors: Sequence[StoredTensor],
    architecture: GGUFArchitecture,
    parameter_names: ParameterNames,
    attributes: Mapping[str, Any],
    dtype: torch.dtype,
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Decode all tensors of a model.

    Each tensor is decoded by rows into one of ``dtype``, so that a thread holds a tile of float32 beside it.

    Args:
        tensors: of all files of the model.
        architecture: of the model.
        parameter_names: of its network.
        attributes: of its configuration.
        dtype: of the parameters.

    Returns:
        The parameters by the names of a safetensors checkpoint, and the names of tensors that are no parameter.

    Raises:
        ModelError: if a tensor cannot be decoded.
    """
    parameters: dict[str, Tensor] = {}
    unused: list[str] = []
    stored = {tensor.name: tensor for tensor in tensors}
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        for tensor in split_projections(tensors, parameter_names, attributes):
            names = _list_parameters(tensor, parameter_names)
            if not names:
                is_used = tensor.name in FACTORS or _weight_of_scale(tensor.name) in stored
                unused += [] if is_used else [tensor.name]
                continue
            rows = _row_order(tensor, architecture, attributes)
            scale = stored.get(f"{tensor.name.removesuffix('.weight')}.scale")
            is_factor = scale is not None and parameter_names.find(scale.name) is None
            factors = _row_factors(tensor, scale) if scale is not None and is_factor else None
            function = _value_function(tensor.name, architecture)
            values = _decode(tensor, rows, function, factors, dtype, threads)
            parts = [values] if len(names) == 1 else values.chunk(len(names), dim=1)
            for name, part in zip(names, parts, strict=True):
                parameters |= dict(_by_parameter(tensor, name, part))
    if architecture.arrange is not None:
        architecture.arrange(parameters, attributes)
    return parameters, tuple(unused)


def _list_parameters(tensor: StoredTensor, parameter_names: ParameterNames) -> list[str]:
    """The parameters that a tensor stands for; two for gate and up projections of experts in one tensor."""
    name = parameter_names.find(tensor.name)
    if name is None and f".{FUSED_EXPERTS}." in tensor.name and len(tensor.shape) == 3:
        halves = (tensor.name.replace(FUSED_EXPERTS, part) for part in ("ffn_gate_exps", "ffn_up_exps"))
        names = [parameter_names.find(half) for half in halves]
        return [name for name in names if name is not None] if all(names) else []
    return [] if name is None else [name]


def _weight_of_scale(name: str) -> str:
    """The tensor that a tensor of factors belongs to: of the weights, or of activations, which are not rounded here."""
    suffix = next((suffix for suffix in SCALES if name.endswith(suffix)), "")
    return f"{name.removesuffix(suffix)}.weight" if suffix else ""


def _row_factors(tensor: StoredTensor, scale: StoredTensor) -> Tensor:
    """The factor of each row of a tensor of NVFP4, which has one, or one for each expert: [rows, 1].

    Raises:
        ModelError: if there is another number of them.
    """
    num_rows = tensor.elements // tensor.shape[-1]
    if scale.elements not in (1, tensor.shape[0] if len(tensor.shape) == 3 else 1):
        raise ModelError(
            f"{scale.path} has {scale.elements} factors in {scale.name} for {list(tensor.shape)} weights"
        )
    factors = torch.from_numpy(decode_rows(scale, 0, 1).copy()).reshape(-1, 1)
    return factors.repeat_interleave(num_rows // len(factors), dim=0)


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


def _value_function(name: str, architecture: GGUFArchitecture) -> Callable[[Tensor], Tensor] | None:
    """The function of a tensor's decoded values that gives the parameter's; None if they are the same."""
    part = name.removeprefix("blk.").partition(".")[2].partition(".")[0]
    if part in architecture.functions:
        return architecture.functions[part]
    has_offset = name.endswith("norm.weight") and part not in architecture.norms_without_offset
    if has_offset and architecture.norm_offset:
        return lambda values: values - architecture.norm_offset
    return None


def _row_order(
    tensor: StoredTensor, architecture: GGUFArchitecture, attributes: Mapping[str, Any]
) -> Tensor | None:
    """The row of the parameter for each row of the file; None if they agree."""
    part = tensor.name.split(".")[-2]
    if not architecture.interleaved_rope or part not in ("attn_q", "attn_k"):
        return None
    heads = attributes["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
    rows = tensor.shape[0]
    if rows % (2 * heads):
        raise ModelError(
            f"{tensor.path} has {rows} rows in {tensor.name}, which are not those of {heads} heads"
        )
    # The file has pairs (i, i + half) of a head next to each other, the parameter has halves.
    return torch.arange(rows).reshape(heads, 2, -1).transpose(1, 2).reshape(-1)


def _decode(
    tensor: StoredTensor,
    rows: Tensor | None,
    function: Callable[[Tensor], Tensor] | None,
    factors: Tensor | None,
    dtype: torch.dtype,
    threads: ThreadPoolExecutor,
) -> Tensor:
    """Decode a tensor into ``dtype``; arguments by ``_row_order``, ``_value_function`` and ``_row_factors``."""
    columns = tensor.shape[-1]
    num_rows = tensor.elements // columns
    values = torch.empty(num_rows, columns, dtype=dtype)
    step = max(1, TILE_WEIGHTS // columns)

    def fill(start: int) -> None:
        stop = min(start + step, num_rows)
        tile = torch.from_numpy(np.ascontiguousarray(decode_rows(tensor, start, stop)))
        if function is not None:
            tile = function(tile)
        if factors is not None:
            tile = tile * factors[start:stop]
        values[slice(start, stop) if rows is None or num_rows == 1 else rows[start:stop]] = tile.to(dtype)

    list(threads.map(fill, range(0, num_rows, step)))  # raises the first error
    if rows is not None and num_rows == 1:  # a bias
        return torch.empty_like(values[0]).index_copy_(0, rows, values[0])
    return values.reshape(tensor.shape)


def rope_factors(tensors: Sequence[StoredTensor], name: str = ROPE_FACTORS) -> Tensor | None:
    """The divisors of the rotary frequencies, [head_dim / 2] in float32; None if the model has none."""
    for tensor in tensors:
        if tensor.name == name:
            return torch.from_numpy(decode_rows(tensor, 0, 1).copy()).reshape(-1)
    return None
