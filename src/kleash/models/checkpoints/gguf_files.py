"""The files of a GGUF model: naming, the parts of a split model, and what their headers say together."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from kleash.errors import ModelError
from kleash.models.checkpoints.files import StoredTensor
from kleash.models.checkpoints.gguf_header import GGUFHeader, read_gguf_header

SUFFIX = ".gguf"
HUB_FILE = re.compile(r"([\w][\w.-]*/[\w][\w.-]*):([^\\:]+\.gguf)", re.IGNORECASE)
"""Name of a file in a repository of the hub: "owner/name:file.gguf"."""
SPLIT_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)
"""Name of a part of a model that gguf-split has divided."""
MAX_PARTS = 1000


@dataclass(frozen=True, kw_only=True)
class GGUFFiles:
    """The headers of all files of a model."""

    settings: Mapping[str, Any]
    """Of the first file."""
    tensors: tuple[StoredTensor, ...]
    """Of all files."""

    @property
    def elements(self) -> int:
        """Number of weights in all tensors."""
        return sum(tensor.elements for tensor in self.tensors)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def kinds(self) -> dict[str, int]:
        """Number of tensors of each type, the types with most weights first."""
        weights = Counter[str]()
        for tensor in self.tensors:
            weights[tensor.kind] += tensor.elements
        count = Counter(tensor.kind for tensor in self.tensors)
        return {kind: count[kind] for kind, _ in weights.most_common()}

    def find(self, name: str) -> StoredTensor | None:
        """The tensor called ``name``; None if there is none."""
        return next((tensor for tensor in self.tensors if tensor.name == name), None)


def list_part_names(name: str) -> list[str]:
    """The file names of all parts of the model that the file ``name`` belongs to; ``name`` alone if it is not split.

    Raises:
        ModelError: if the numbers in the name contradict each other.
    """
    match = SPLIT_NAME.fullmatch(name)
    if match is None:
        return [name]
    number, count = int(match[2]), int(match[3])
    if not 1 <= number <= count <= MAX_PARTS:
        raise ModelError(
            f"{name} is part {number} of {count} by its name; rename the files as gguf-split wrote them"
        )
    return [f"{match[1]}-{part:05d}-of-{count:05d}{name[-len(SUFFIX) :]}" for part in range(1, count + 1)]


def open_gguf(paths: tuple[Path, ...]) -> GGUFFiles:
    """Read and validate the headers of the files of a model.

    Raises:
        ModelError: if a header is damaged, a part belongs elsewhere, or the model has no tensors.
    """
    return _open_gguf(tuple((path, path.stat().st_size, path.stat().st_mtime_ns) for path in paths))


@lru_cache(maxsize=4)
def _open_gguf(files: tuple[tuple[Path, int, int], ...]) -> GGUFFiles:
    """``open_gguf`` of files with their sizes and times, by which headers are read once."""
    headers = [read_gguf_header(path) for path, _, _ in files]
    first = headers[0]
    for number, header in enumerate(headers):
        _check_part(header, number, len(headers))
    tensors = tuple(tensor for header in headers for tensor in header.tensors)
    names = Counter(tensor.name for tensor in tensors)
    repeated = next((name for name, count in names.items() if count > 1), None)
    expected = first.settings.get("split.tensors.count", len(tensors))
    if repeated is not None or expected != len(tensors):
        reason = f"{repeated!r} is in two of them" if repeated else f"{expected} are expected"
        raise ModelError(
            f"the {len(headers)} files of {first.path} have {len(tensors)} tensors, but {reason}; fetch all of them "
            "again"
        )
    if not tensors:
        raise ModelError(
            f"{first.path} has no tensors: it holds a vocabulary alone; give the file with the weights"
        )
    return GGUFFiles(settings=first.settings, tensors=tensors)


def _check_part(header: GGUFHeader, number: int, count: int) -> None:
    """Check that a file is the part that its name says."""
    claimed = header.settings.get("split.count", 0) or 1
    place = header.settings.get("split.no", 0)
    if claimed != count:
        raise ModelError(
            f"{header.path} says that its model has {claimed} files, and its name says {count}; name the files as "
            "gguf-split wrote them, NAME-00001-of-0000N.gguf"
        )
    if count > 1 and place != number:
        raise ModelError(
            f"{header.path} says that it is file {place + 1} of {count}; restore the files' names"
        )
