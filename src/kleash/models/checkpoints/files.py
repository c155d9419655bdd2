"""Reading the files of an untrusted checkpoint: settings in JSON, and tensors in safetensors files."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kleash.errors import ModelError, summarise_error
from kleash.extras import import_extra

POINTER_START = b"version https://git-lfs"
SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
MAX_JSON_BYTES = 1 << 26
"""Size limit for settings files; the largest index of shards known is a tenth of it."""
MAX_NAME_CHARACTERS = 200
BITS = {
    name: bits
    for bits, names in {
        4: "F4",
        6: "F6_E2M3 F6_E3M2",
        8: "BOOL U8 I8 F8_E4M3 F8_E5M2 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ",
        16: "U16 I16 F16 BF16",
        32: "U32 I32 F32",
        64: "U64 I64 F64 C64",
    }.items()
    for name in names.split()
}
"""Bits per element for each dtype name of safetensors."""


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor in a file: where it is, and how it is stored."""

    name: str
    path: Path
    kind: str
    """Name of the type in its format: "BF16", "F8_E4M3"; in GGUF files "F32", "Q4_K"."""
    shape: tuple[int, ...]
    """In the order of torch: rows before columns."""
    num_bytes: int
    offset: int = 0
    """Of the first byte in a GGUF file."""

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)


def check_pointers(paths: Iterable[Path]) -> None:
    """Check that files are not the pointers that Git writes where Git LFS is not installed.

    Raises:
        ModelError: naming the first that is one.
    """
    for path in paths:
        try:
            with path.open("rb") as file:
                start = file.read(len(POINTER_START))
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
        if start == POINTER_START:
            raise ModelError(
                f"{path} is a pointer of Git LFS and not the file itself; run `git lfs pull` in its folder"
            )


def open_safetensors(path: Path) -> Any:
    """Open a safetensors file, whose header the library checks: dtypes, shapes, and offsets without gaps or overlaps.

    Raises:
        ModelError: if it is damaged or cannot be read.
    """
    safetensors = import_extra("safetensors", "models")
    try:
        if path.exists() and not path.is_file():
            raise ModelError(f"{path} is not a regular file; fetch or make it again")
        return safetensors.safe_open(path, framework="pt")
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {summarise_error(error)}") from error
    except safetensors.SafetensorError as error:
        raise ModelError(
            f"{path} is not a whole safetensors file ({summarise_error(error)}); fetch or make it again"
        ) from error


class SafetensorsFiles(Mapping[str, StoredTensor]):
    """The tensors of several safetensors files by name, each read from its mapped file when it is asked for."""

    def __init__(self, paths: Iterable[Path], beside: Iterable[Path] = ()) -> None:
        """Read the headers of the files.

        Args:
            paths: the files.
            beside: further files, whose tensors must be the same where they have the same names.

        Raises:
            ModelError: if a file is damaged, or two files hold different contents under one name.
        """
        self._files: dict[Path, Any] = {}
        self._tensors: dict[str, StoredTensor] = {}
        own_paths = list(paths)
        for path in dict.fromkeys((*own_paths, *beside)):
            file = self._files[path] = open_safetensors(path)
            for name in file.keys():  # noqa: SIM118  no mapping
                first = self._tensors.get(name)
                if first is not None and not _is_equal(self.read(name), file.get_tensor(name)):
                    raise ModelError(
                        f"{first.path} and {path.name} hold the tensor {name[:MAX_NAME_CHARACTERS]} with different "
                        "contents; remove the file that does not belong to it, or fetch the checkpoint again"
                    )
                if first is None and path in own_paths:
                    self._tensors[name] = _stored_tensor(name, path, file.get_slice(name))

    def __getitem__(self, name: str) -> StoredTensor:
        """Where a tensor is."""
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self._tensors)

    def __len__(self) -> int:
        """The number of tensors."""
        return len(self._tensors)

    def read(self, name: str) -> Tensor:
        """A tensor on the CPU, in the dtype that it is stored in."""
        return self._files[self._tensors[name].path].get_tensor(name)


def _stored_tensor(name: str, path: Path, part: Any) -> StoredTensor:
    """A tensor by its slice in an open file."""
    kind, shape = part.get_dtype(), tuple(part.get_shape())
    return StoredTensor(name=name, path=path, kind=kind, shape=shape, num_bytes=prod(shape) * BITS[kind] // 8)


def _is_equal(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors have one dtype, shape and content."""
    return (first.dtype, first.shape) == (second.dtype, second.shape) and torch.equal(
        *(tensor.reshape(-1).view(torch.uint8) for tensor in (first, second))
    )


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Raises:
        ModelError: if the file is too long, is not JSON, or holds another type.
    """
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise ModelError(f"{path} is {size} bytes long, too long for settings; fetch or make it again")
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{path} cannot be read as JSON: {summarise_error(error)}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} should hold a JSON object and holds a {type(content).__name__}")
    return content


def open_model_files(folder: Path) -> SafetensorsFiles:
    """The tensors that transformers would read of a model's folder: of one file, of the files of its index, or of all.

    Where a folder has both a single file and the files of an index, programs differ in which of them they read.

    Raises:
        ModelError: if a file is damaged, or two files hold different contents under one name.
    """
    single, indexed = folder / SINGLE_FILE, list[Path]()
    if (folder / INDEX).is_file():
        indexed = [
            folder / str(name) for name in sorted(set(read_json(folder / INDEX)["weight_map"].values()))
        ]
    if single.is_file():
        return SafetensorsFiles([single], beside=indexed)
    return SafetensorsFiles(indexed or sorted(folder.glob("*.safetensors")))
