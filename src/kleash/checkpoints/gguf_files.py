"""The files of a GGUF model: naming, the parts of a split model, and their untrusted headers, read within limits.

Source of the header: the description of the format in ggml, versions 2 and 3, little-endian.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from kleash.checkpoints.files import StoredTensor
from kleash.errors import ModelError
from kleash.extras import import_extra
from kleash.store.checksums import reading

SUFFIX = ".gguf"
HUB_FILE = re.compile(r"([\w][\w.-]*/[\w][\w.-]*):([^\\:]+\.gguf)", re.IGNORECASE)
"""Name of a file in a repository of the hub: "owner/name:file.gguf"."""
SPLIT_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)
"""Name of a part of a model that gguf-split has divided."""
BEGINNINGS = ((b"GGUF", [2]), (b"GGUF", [3]))
"""Magic and version."""
DEFAULT_ALIGNMENT = 32
MAX_HEADER_BYTES = 1 << 28
"""Size limit for everything before the weights; a vocabulary of 262 144 tokens with merges takes a twentieth of
it."""
STRING, ARRAY = 8, 9
NUMBERS = {
    0: "u1",
    1: "i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
"""Type of a value in the file → numpy's."""


class _DamagedError(Exception):
    """A GGUF file contradicts its format; the message says where."""


def read_gguf_header(path: Path) -> "GGUFFiles":
    """Read and validate the header of a GGUF file, before anything of the size that it claims is allocated.

    Checks magic, version, every length against the bytes that are there, that the types are known, and that the tensors
    lie one after the other within the file, with no gap but padding.

    Raises:
        ModelError: if a check fails, naming the file.
    """
    try:
        with reading(path, "give a file that can be read", ModelError), path.open("rb") as file:
            return _Parser(path, file, path.stat().st_size).header()
    except (_DamagedError, ArithmeticError, TypeError) as error:  # an alignment of 0, or that is no number
        raise ModelError(f"{path} is not a whole GGUF file ({error}); fetch or make it again") from error


class _Parser:
    """Reads the parts of a header in their order."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self._path, self._file, self._size = path, file, size
        self._position = 0

    def header(self) -> "GGUFFiles":
        """Read the whole header."""
        if (self._read(4, "its magic"), self._numbers("<u4", 1, "its version")) not in BEGINNINGS:
            raise _DamagedError("it does not begin with GGUF and version 2 or 3, in little-endian order")
        num_tensors, num_settings = self._numbers("<u8", 2, "its counts")
        settings: dict[str, Any] = {}
        for _ in range(num_settings):
            key = self._string("a key")
            (kind,) = self._numbers("<u4", 1, key)
            settings[key] = self._value(kind, key)
        tensors = self._placed(
            [self._tensor() for _ in range(num_tensors)],
            settings.get("general.alignment", DEFAULT_ALIGNMENT),
        )
        return GGUFFiles(settings=settings, tensors=tensors)

    def _value(self, kind: int, key: str) -> Any:
        """The value of a setting: a number, a text, or a list of them."""
        is_list, count = kind == ARRAY, 1
        if is_list:
            (kind,) = self._numbers("<u4", 1, key)
            (count,) = self._numbers("<u8", 1, key)
        if kind in NUMBERS:
            values = self._numbers(NUMBERS[kind], count, key)
        elif kind == STRING:
            values = [self._string(key) for _ in range(count)]
        else:
            raise _DamagedError(f"the setting {key[:80]!r} has the unknown type {kind}")
        return values if is_list else values[0]

    def _tensor(self) -> StoredTensor:
        """A tensor, with its offset from the first byte of the weights."""
        constants = import_extra("gguf.constants", "models")
        name = self._string("a tensor's name")
        (dimensions,) = self._numbers("<u4", 1, name)
        shape = tuple(reversed(self._numbers("<u8", dimensions, name)))
        (number,), (offset,) = self._numbers("<u4", 1, name), self._numbers("<u8", 1, name)
        if number not in set(constants.GGMLQuantizationType):
            raise ModelError(
                f"{self._path} holds {name!r} in the ggml type {number}, which the package gguf does not know; "
                "install a newer gguf, or quantise the model to another type"
            )
        kind = constants.GGMLQuantizationType(number)
        block, block_bytes = constants.GGML_QUANT_SIZES[kind]
        if not shape or not all(shape) or shape[-1] % block:
            raise _DamagedError(f"{name!r} has the shape {list(shape)}, which is none of {kind.name}"[:300])
        return StoredTensor(
            name=name,
            path=self._path,
            kind=kind.name,
            shape=shape,
            offset=offset,
            num_bytes=prod(shape) // block * block_bytes,
        )

    def _placed(self, tensors: list[StoredTensor], alignment: int) -> tuple[StoredTensor, ...]:
        """The tensors with their offsets from the beginning of the file.

        They must follow one another without gaps, each on a multiple of ``alignment``, up to the end of the file.
        """
        start, end = -(-self._position // alignment) * alignment, 0
        for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
            if tensor.offset != -(-end // alignment) * alignment:
                raise _DamagedError(
                    f"{tensor.name!r} begins at {tensor.offset} of its weights and the one before ends at {end}"
                )
            end = tensor.offset + tensor.num_bytes
        if not 0 <= self._size - start - end < alignment:
            raise _DamagedError(f"it should have {start + end} bytes and has {self._size}")
        return tuple(replace(tensor, offset=start + tensor.offset) for tensor in tensors)

    def _string(self, what: str) -> str:
        (length,) = self._numbers("<u8", 1, what)
        # Pieces of characters occur in vocabularies; as surrogates they stay different from one another.
        return self._read(length, what).decode("utf-8", "surrogateescape")

    def _numbers(self, dtype: str, count: int, what: str) -> list[Any]:
        return np.frombuffer(self._read(count * np.dtype(dtype).itemsize, what), dtype).tolist()

    def _read(self, count: int, what: str) -> bytes:
        """The next ``count`` bytes; checked before they are allocated."""
        end = self._position + count
        if end > min(self._size, MAX_HEADER_BYTES):
            raise _DamagedError(f"it ends within {what[:80]!r}, or its header is longer than 256 MiB")
        self._position = end
        return self._file.read(count)


@dataclass(frozen=True, kw_only=True)
class GGUFFiles:
    """What one GGUF file, or all files of a model, say before the weights."""

    settings: Mapping[str, Any]
    """Key → number, string, or list of numbers or strings; of the first file."""
    tensors: tuple[StoredTensor, ...]
    """Of all files."""


def list_part_names(name: str) -> list[str]:
    """The file names of all parts of the model that the file ``name`` belongs to; ``name`` alone if it is not split."""
    match = SPLIT_NAME.fullmatch(name)
    if match is None:
        return [name]
    count = int(match[3])
    return [f"{match[1]}-{part:05d}-of-{count:05d}{name[-len(SUFFIX) :]}" for part in range(1, count + 1)]


def open_gguf(paths: tuple[Path, ...]) -> GGUFFiles:
    """Read and validate the headers of the files of a model.

    Raises:
        ModelError: if a header is damaged, or a part belongs elsewhere.
    """
    return _open_gguf(tuple((path, path.stat().st_size, path.stat().st_mtime_ns) for path in paths))


@lru_cache(maxsize=4)
def _open_gguf(files: tuple[tuple[Path, int, int], ...]) -> GGUFFiles:
    """``open_gguf`` of files with their sizes and times, by which headers are read once."""
    headers = [read_gguf_header(path) for path, _, _ in files]
    first, first_path = headers[0], files[0][0]
    for number, header in enumerate(headers):
        claimed = header.settings.get("split.count", 0) or 1
        place = header.settings.get("split.no", 0) if len(headers) > 1 else 0
        if (claimed, place) != (len(headers), number):
            raise ModelError(
                f"{files[number][0]} says that it is file {header.settings.get('split.no', 0) + 1} of {claimed}, and "
                f"its name says {number + 1} of {len(headers)}; restore the names that gguf-split wrote, "
                "NAME-00001-of-0000N.gguf"
            )
    tensors = tuple(tensor for header in headers for tensor in header.tensors)
    names = Counter(tensor.name for tensor in tensors)
    repeated = next((name for name, count in names.items() if count > 1), None)
    expected = first.settings.get("split.tensors.count", len(tensors))
    if repeated is not None or expected != len(tensors):
        reason = f"{repeated!r} is in two of them" if repeated else f"{expected} are expected"
        raise ModelError(
            f"the {len(headers)} files of {first_path} have {len(tensors)} tensors, but {reason}; fetch all of them "
            "again"
        )
    return GGUFFiles(settings=first.settings, tensors=tensors)
