"""A matrix that a checkpoint stores packed: its tensors, checked by their headers, and how its rows are unpacked."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kleash.errors import ModelError
from kleash.extras import import_extra
from kleash.models.checkpoints.files import list_weight_files, read_safetensors_header

MAX_SHOWN_CHARACTERS = 120
RowDecoder = Callable[[int, int], Tensor]
"""Unpacks rows ``start`` to ``stop`` of a matrix into [rows, columns]."""


class TensorHeader(NamedTuple):
    """What the header of a safetensors file says of a tensor."""

    path: Path
    dtype: str
    """Name in the format: "I32", "F16"."""
    shape: tuple[int, ...]


def read_headers(folder: Path) -> dict[str, TensorHeader]:
    """The headers of all tensors of a checkpoint by their names.

    Raises:
        ModelError: if a file is damaged.
    """
    return {
        name: TensorHeader(path, entry["dtype"], tuple(entry["shape"]))
        for path in list_weight_files(folder)
        for name, entry in read_safetensors_header(path).items()
    }


class TensorReader:
    """Reads tensors of a checkpoint from its memory-mapped files; a context manager, which closes them."""

    def __init__(self, headers: Mapping[str, TensorHeader]) -> None:
        """``headers``: of all tensors, by name."""
        self._headers = headers
        self._files: dict[Path, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> "TensorReader":
        """Return the reader; files are opened when a tensor is read."""
        return self

    def __exit__(self, *details: object) -> None:
        """Close the files."""
        self._files.clear()
        self._stack.close()

    def read(self, name: str) -> Tensor:
        """A tensor by its name, on the CPU and in the dtype that it is stored in."""
        return self._open(self._headers[name].path).get_tensor(name)

    def read_parts(self, tensors: "ModuleTensors", parts: Sequence[str]) -> Iterator[Tensor]:
        """Tensors of a module by the last parts of their names."""
        return (self.read(tensors.full_name(part)) for part in parts)

    def _open(self, path: Path) -> Any:
        if path not in self._files:
            file = import_extra("safetensors", "models").safe_open(path, framework="pt")
            self._files[path] = self._stack.enter_context(file)
        return self._files[path]


@dataclass(frozen=True, kw_only=True)
class PackedModule:
    """A matrix that a checkpoint stores packed."""

    name: str
    """Of the module or parameter: "model.layers.0.self_attn.q_proj"."""
    parameter: str
    """Of the matrix in an ordinary checkpoint: "model.layers.0.self_attn.q_proj.weight"."""
    shape: tuple[int, ...]
    """Of the unpacked matrix; leading dimensions (experts) count as rows."""
    kind: str
    """The type of its weights for records: "gptq int4, groups of 128"."""
    parts: tuple[str, ...]
    """Names of the tensors that it is stored as."""
    row_multiple: int = 1
    """Rows that are packed together: tiles begin at multiples of it."""
    open: Callable[[TensorReader, torch.dtype], RowDecoder]
    """Reads the tensors, checks their values, and returns the decoder of rows, which computes in the given dtype.
    Raises ``ModelError``."""


@dataclass(frozen=True, kw_only=True)
class ModuleTensors:
    """The tensors of one module, by the last part of their names."""

    subject: str
    """The model, for errors."""
    name: str
    headers: Mapping[str, TensorHeader]

    def full_name(self, part: str) -> str:
        """The name of a tensor in the files."""
        return f"{self.name}.{part}"

    def shape(self, part: str, dtypes: Sequence[str], dimensions: Sequence[int] = (2,)) -> tuple[int, ...]:
        """The shape of a tensor.

        Args:
            part: last part of its name.
            dtypes: those that it may have, as the format calls them.
            dimensions: the numbers of dimensions that it may have.

        Raises:
            ModelError: if it is missing, or has another dtype or number of dimensions.
        """
        header = self.headers.get(part)
        if header is None:
            raise self.error(f"has no tensor {part}")
        if header.dtype not in dtypes or len(header.shape) not in dimensions:
            expected = f"{' or '.join(dtypes)} of {' or '.join(map(str, dimensions))} dimensions"
            raise self.error(f"has {part} as {header.dtype} {list(header.shape)}, and not as {expected}")
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
            f"{self.subject} cannot be unpacked: its module {name} {explanation}; fetch or quantise the model again"
        )


def group_by_module(subject: str, headers: Mapping[str, TensorHeader]) -> dict[str, ModuleTensors]:
    """The tensors of a checkpoint by module, which is all of a name but its last part."""
    modules: dict[str, dict[str, TensorHeader]] = {}
    for name, header in headers.items():
        module, _, part = name.rpartition(".")
        modules.setdefault(module, {})[part] = header
    return {name: ModuleTensors(subject=subject, name=name, headers=parts) for name, parts in modules.items()}
