"""A matrix that a checkpoint stores packed: its tensors, checked by their headers, and how it is unpacked."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kleash.checkpoints.files import StoredTensor
from kleash.checkpoints.resolution import Checkpoint
from kleash.errors import ModelError

MAX_SHOWN_CHARACTERS = 120


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
        return str(self.checkpoint.quant_method).removeprefix("intel/")

    def full_name(self, part: str) -> str:
        """The name of a tensor in the files."""
        return f"{self.name}.{part}"

    def read(self, part: str) -> Tensor:
        """A tensor on the CPU, in the dtype that it is stored in."""
        return self.checkpoint.safetensors.read(self.full_name(part))

    def read_parts(self, *parts: str) -> Iterator[Tensor]:
        """Several tensors."""
        return map(self.read, parts)

    def read_groups(self, part: str, columns: int, groups: int) -> Tensor:
        """The group of each column, [columns], in a tensor of group numbers.

        Raises:
            ModelError: if it is not one for each column, or a group does not exist.
        """
        (length,) = self.shape(part, ("I32", "I64"), (1,))
        self.require(length == columns, f"has a {part} of {length} inputs, and weights of {columns}")
        indices = self.read(part).long()
        low, high = int(indices.min()), int(indices.max())
        fits = low >= 0 and high < groups
        self.require(fits, f"has a {part} from {low} to {high}, and groups from 0 to {groups - 1}")
        return indices

    def shape(self, part: str, kinds: Sequence[str], dimensions: Sequence[int] = (2,)) -> tuple[int, ...]:
        """The shape of a tensor.

        Args:
            part: last part of its name.
            kinds: the types that it may have, as safetensors calls them.
            dimensions: the numbers of dimensions that it may have.

        Raises:
            ModelError: if it is missing, or has another type or number of dimensions.
        """
        header = self.headers.get(part)
        if header is None:
            raise self.error(f"has no tensor {part}")
        if header.kind not in kinds or len(header.shape) not in dimensions:
            expected = f"{' or '.join(kinds)} of {' or '.join(map(str, dimensions))} dimensions"
            raise self.error(f"has {part} as {header.kind} {list(header.shape)}, and not as {expected}")
        return header.shape

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


def group_by_module(checkpoint: Checkpoint) -> dict[str, ModuleTensors]:
    """The tensors of a checkpoint by module, which is all of a name but its last part."""
    modules: dict[str, dict[str, StoredTensor]] = {}
    for name, header in checkpoint.safetensors.items():
        module, _, part = name.rpartition(".")
        modules.setdefault(module, {})[part] = header
    return {
        name: ModuleTensors(checkpoint=checkpoint, name=name, headers=parts)
        for name, parts in modules.items()
    }


def modules_with(checkpoint: Checkpoint, *parts: str) -> Iterator[ModuleTensors]:
    """Iterate over the modules of a checkpoint that have a tensor with one of these last parts of its name."""
    for tensors in group_by_module(checkpoint).values():
        if not tensors.headers.keys().isdisjoint(parts):
            yield tensors
