"""A matrix that is stored packed: its tensors and settings, checked, and the unpacking of integers and floats."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Int, Shaped, UInt8
from torch import Tensor

from kleash.checkpoints.files import StoredTensor
from kleash.checkpoints.resolution import Checkpoint
from kleash.errors import ModelError
from kleash.registry import grouped

MAX_SHOWN_CHARACTERS = 120
MAX_GROUP_SIZE = 1 << 24
ROTATION_SETTINGS = re.compile(r"rotation|hadamard|quarot|spinquant|transform_config")
"""Names of settings of formats that also change activations while the model runs."""
MODELOPT_ALGORITHMS = frozenset(
    ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "NVFP4_AWQ", "W4A16_NVFP4", "W4A8_NVFP4_FP8")
)
"""``quant_algo`` of ModelOpt that is read."""


@dataclass(frozen=True, kw_only=True)
class PackedModule:
    """A matrix that a checkpoint stores packed."""

    name: str
    """Of the module or parameter: "model.layers.0.self_attn.q_proj"."""
    parameter: str
    """Of the matrix in an ordinary checkpoint: "model.layers.0.self_attn.q_proj.weight"."""
    shape: tuple[int, int]
    """Of the unpacked matrix."""
    kind: str
    """The type of its weights for records: "gptq int4, groups of 128"."""
    parts: tuple[str, ...]
    """Names of the tensors that it is stored as."""
    decode: Callable[[torch.dtype], Tensor]
    """Reads the tensors, checks their values, and unpacks the matrix, computed and returned in the given dtype. Raises
    ``ModelError``."""


@dataclass(frozen=True, kw_only=True)
class ModuleTensors:
    """The tensors of one module, by the last part of their names."""

    checkpoint: Checkpoint
    name: str
    headers: Mapping[str, StoredTensor]

    @property
    def method(self) -> str:
        """Name of the format in records."""
        return str(self.checkpoint.quant_method)

    def full_name(self, part: str) -> str:
        """The name of a tensor in the files."""
        return f"{self.name}.{part}"

    def full_names(self, *parts: str) -> tuple[str, ...]:
        """The names in the files of those of these tensors that the module has."""
        return tuple(self.full_name(part) for part in parts if part in self.headers)

    def read(self, part: str) -> Tensor:
        """A tensor on the CPU, in the dtype that it is stored in."""
        return self.checkpoint.safetensors.read(self.full_name(part))

    def read_groups(self, part: str, columns: int, groups: int) -> Tensor:
        """The group of each column, [columns], in a tensor of group numbers.

        Raises:
            ModelError: if it is not one for each column, or a group does not exist.
        """
        self.check_shape(part, ("I32", "I64"), (columns,))
        indices = self.read(part).long()
        low, high = int(indices.min()), int(indices.max())
        fits = low >= 0 and high < groups
        self.require(fits, f"has a {part} from {low} to {high}, and groups from 0 to {groups - 1}")
        return indices

    def shape(self, part: str, kinds: Sequence[str], dimensions: Collection[int] = (2,)) -> tuple[int, ...]:
        """The shape of a tensor, which is not empty.

        Args:
            part: last part of its name.
            kinds: the types that it may have, as safetensors calls them.
            dimensions: the numbers of dimensions that it may have.

        Raises:
            ModelError: if it is missing or empty, or has another type or number of dimensions.
        """
        header = self.headers.get(part)
        if header is None:
            raise self.error(f"has no tensor {part}")
        if header.kind not in kinds or len(header.shape) not in dimensions or 0 in header.shape:
            expected = f"non-empty {' or '.join(kinds)} of {' or '.join(map(str, dimensions))} dimensions"
            raise self.error(f"has {part} as {header.kind} {list(header.shape)}, and not as {expected}")
        return header.shape

    def check_shape(self, part: str, kinds: Sequence[str], *shapes: tuple[int, ...]) -> None:
        """Check that a tensor has one of the types ``kinds`` and of the ``shapes``.

        Raises:
            ModelError: if it is missing, or has another type or shape.
        """
        shape = self.shape(part, kinds, {len(each) for each in shapes})
        expected = " or ".join(str(list(each)) for each in shapes)
        self.require(shape in shapes, f"has {part} of shape {list(shape)}, and not {expected}")

    def require(self, condition: bool, explanation: str) -> None:
        """Check a condition on the tensors.

        Args:
            condition: whether they are valid.
            explanation: completes "the packed module NAME …" if not.

        Raises:
            ModelError: if the condition is false.
        """
        if not condition:
            raise self.error(explanation)

    def error(self, explanation: str) -> ModelError:
        """The error about this module; ``explanation`` completes "the packed module NAME …"."""
        name = self.name[:MAX_SHOWN_CHARACTERS]
        return ModelError(
            f"{self.checkpoint} cannot be unpacked: its module {name} {explanation}; fetch or quantise the model again"
        )


def group_by_module(checkpoint: Checkpoint) -> dict[str, dict[str, StoredTensor]]:
    """The tensors of a checkpoint by module, which is all of a name but its last part, and by that part."""
    names = ((name.rpartition("."), header) for name, header in checkpoint.safetensors.items())
    modules = grouped((module, (part, header)) for (module, _, part), header in names)
    return {module: dict(parts) for module, parts in modules.items()}


def modules_with(checkpoint: Checkpoint, *parts: str) -> Iterator[ModuleTensors]:
    """Iterate over the modules of a checkpoint that have a tensor with one of these last parts of its name."""
    for name, headers in group_by_module(checkpoint).items():
        if not headers.keys().isdisjoint(parts):
            yield ModuleTensors(checkpoint=checkpoint, name=name, headers=headers)


class UnsupportedLayoutError(Exception):
    """A layout that no decoder reads; the message says which."""


def check_rotations(settings: Mapping[str, Any]) -> None:
    """Refuse settings by which activations are rotated while the model runs, since the weights alone are another model.

    Raises:
        UnsupportedLayoutError: naming the setting.
    """
    for name, value in settings.items():
        is_given = any(value.values()) if isinstance(value, dict) else bool(value)
        if ROTATION_SETTINGS.search(name) and is_given:
            raise UnsupportedLayoutError(f"its {name} rotates activations while the model runs")


def read_integer(settings: Mapping[str, Any], *names: str) -> int:
    """The first of these settings that is there.

    Raises:
        UnsupportedLayoutError: if there is none, or it is not an integer.
    """
    value = next((settings[name] for name in names if name in settings), None)
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) > MAX_GROUP_SIZE:
        raise UnsupportedLayoutError(f"its {names[0]} is {value!r:.60}")
    return value


def read_group_size(settings: Mapping[str, Any]) -> int:
    """The number of inputs in a group; -1 for all.

    Raises:
        UnsupportedLayoutError: if it is another number.
    """
    size = read_integer(settings, "group_size", "q_group_size")
    if size == 0 or size < -1:
        raise UnsupportedLayoutError(f"its group_size is {size}")
    return size


def read_block(settings: Mapping[str, Any], name: str) -> tuple[int, int] | None:
    """Rows and columns of a block; None if there is no such setting.

    Raises:
        UnsupportedLayoutError: if it is not two positive integers.
    """
    value = settings.get(name)
    if value is None:
        return None
    sizes = value.split("x") if isinstance(value, str) else value
    if isinstance(sizes, list) and len(sizes) == 2 and all(str(size).isdigit() for size in sizes):
        rows, columns = (int(size) for size in sizes)
        if 0 < rows <= MAX_GROUP_SIZE and 0 < columns <= MAX_GROUP_SIZE:
            return rows, columns
    raise UnsupportedLayoutError(f"its {name} is {value!r:.60}")


def read_object(settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A setting that is an object; empty if it is not there.

    Raises:
        UnsupportedLayoutError: if it is another value.
    """
    value = settings.get(name)
    if value is not None and not isinstance(value, dict):
        raise UnsupportedLayoutError(f"its {name} is a {type(value).__name__}")
    return value or {}


def read_weight_groups(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The groups of modules in the settings of compressed-tensors.

    Raises:
        UnsupportedLayoutError: if one is no object.
    """
    groups = read_object(settings, "config_groups")
    return [read_object(groups, name) for name in groups]


def check_modelopt_algorithms(settings: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of ModelOpt with an algorithm that is not read.

    Raises:
        UnsupportedLayoutError: naming the algorithm.
    """
    algorithms = [settings.get("quant_algo", "FP8")]
    if algorithms == ["MIXED_PRECISION"]:  # of ModelOpt: each of its layers has its own
        layers = read_object(settings, "quantized_layers")
        algorithms = [read_object(layers, name).get("quant_algo") for name in layers] or algorithms
    unknown = sorted(set(map(str, algorithms)) - MODELOPT_ALGORITHMS)
    if unknown:
        raise UnsupportedLayoutError(f"its quant_algo is {unknown[0]!r:.60}")


WORD_BITS = 32
FLOAT_4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Absolute values of the 4-bit floating-point numbers E2M1, by their three lower bits."""


def words_of(count: int, bits: int) -> int:
    """The number of words that hold ``count`` integers of ``bits`` bits without gaps."""
    return -(-count * bits // WORD_BITS)


def unpack_words(words: Int[Tensor, "rows words"], bits: int, count: int) -> UInt8[Tensor, "rows count"]:
    """Unpack unsigned integers that are stored without gaps, the lowest bits of a word first.

    Integer ``i`` of a row has the bits ``i·bits`` to ``(i + 1)·bits - 1`` of the row, and may begin in one word and
    end in the next.

    Args:
        words: int32; a row holds at least ``count · bits`` bits.
        bits: 1 to 8.
        count: integers in a row.

    Returns:
        The integers from 0 to 2^bits - 1.
    """
    stored = words.contiguous().view(torch.uint8)
    if 8 % bits == 0:
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
        return ((stored[:, :, None] >> shifts) & ((1 << bits) - 1)).flatten(1)[:, :count]
    unpacked = np.unpackbits(stored.numpy(), axis=1, count=count * bits, bitorder="little")
    return torch.from_numpy(unpacked.reshape(-1, count, bits) @ (1 << np.arange(bits)).astype(np.uint8))


def scale_groups(
    codes: Tensor, zeros: Tensor | None, scales: Tensor, groups: Int[Tensor, " columns"]
) -> Tensor:
    """The numbers that codes stand for: (codes - zeros) scales, with the zero point and scale of each column's group.

    Args:
        codes: [rows, columns], integers of 8 bits or floating-point numbers.
        zeros: [rows, groups], integers of 8 bits or floating-point numbers; None for 0.
        scales: [rows, groups] in the dtype of the result.
        groups: the group of each column.
    """
    rows, columns = codes.shape
    count = scales.shape[1]
    if columns % count == 0 and torch.equal(groups, torch.arange(columns) // (columns // count)):
        codes, scales = codes.reshape(rows, count, -1), scales[:, :, None]  # no copies of the scales
        zeros = None if zeros is None else zeros[:, :, None]
    else:
        scales, zeros = scales[:, groups], None if zeros is None else zeros[:, groups]
    values = codes.to(scales.dtype, copy=True)  # a byte is exact in it, and so is a difference of two
    if zeros is not None:
        values -= zeros
    values *= scales
    return values.reshape(rows, columns)


def unpack_float_4(codes: UInt8[Tensor, "rows bytes"], dtype: torch.dtype) -> Tensor:
    """Unpack 4-bit floating-point numbers E2M1 from bytes, the lower half of a byte first: [rows, 2 · bytes]."""
    table = torch.tensor((*FLOAT_4_VALUES, *(-value for value in FLOAT_4_VALUES)), dtype=dtype)
    return look_up_halves(codes, table)


def look_up_halves(codes: UInt8[Tensor, "*bytes"], table: Shaped[Tensor, "16"]) -> Tensor:
    """The entries of a table for both halves of each byte, the lower first; the last dimension is twice as long."""
    numbers = torch.arange(256)
    pairs = torch.stack((table[numbers & 15], table[numbers >> 4]), dim=-1)
    taken = pairs.numpy().take(codes.numpy(), axis=0)  # faster than an index of torch, which is of 64 bits
    return torch.from_numpy(taken).flatten(-2)
