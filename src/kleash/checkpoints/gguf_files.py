"""The files of a GGUF model: naming, the parts of a split model, and their untrusted headers, read within limits.

Source of the header: the description of the format in ggml, versions 2 and 3, little-endian.
"""

import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from kleash.checkpoints.files import StoredTensor
from kleash.errors import ModelError
from kleash.extras import import_extra

SUFFIX = ".gguf"
HUB_FILE = re.compile(r"([\w][\w.-]*/[\w][\w.-]*):([^\\:]+\.gguf)", re.IGNORECASE)
"""Name of a file in a repository of the hub: "owner/name:file.gguf"."""
SPLIT_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)
"""Name of a part of a model that gguf-split has divided."""
MAX_PARTS = 1000
MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT, MAX_ALIGNMENT = 32, 1 << 16
MAX_HEADER_BYTES = 1 << 28
"""Size limit for everything before the weights; a vocabulary of 262 144 tokens with merges takes a twentieth of
it."""
MAX_SETTINGS, MAX_TENSORS, MAX_ARRAY = 1 << 12, 1 << 17, 1 << 22
"""Limits on the number of settings, tensors and elements of an array."""
MAX_KEY_BYTES, MAX_NAME_BYTES = 1 << 16, 64
"""The format's limits on the lengths of a setting's key and a tensor's name."""
MAX_DIMENSIONS = 4
STRING, ARRAY = 8, 9
NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
"""Type of a value in the file → its format of ``struct``."""


@dataclass(frozen=True, kw_only=True)
class GGUFHeader:
    """What a GGUF file says before its weights."""

    path: Path
    settings: Mapping[str, Any]
    """Key → number, string, or list of numbers or strings."""
    tensors: tuple[StoredTensor, ...]


class _DamagedError(Exception):
    """A GGUF file contradicts its format; the message says where."""


def read_gguf_header(path: Path) -> GGUFHeader:
    """Read and validate the header of a GGUF file, before anything of the size that it claims is allocated.

    Checks magic, version, every length and count against the bytes that are there, that keys and names are unique,
    that the types are known, and that the tensors lie one after the other within the file, with no gap but padding.

    Raises:
        ModelError: if a check fails, naming the file.
    """
    try:
        if not path.is_file():
            raise ModelError(f"{path} is not a regular file; fetch or make it again")
        with path.open("rb") as file:
            return _Parser(path, file, path.stat().st_size).header()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
    except _DamagedError as error:
        raise ModelError(f"{path} is not a whole GGUF file ({error}); fetch or make it again") from error


class _Parser:
    """Reads the parts of a header in their order."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self._path, self._file, self._size = path, file, size
        self._position = 0

    def header(self) -> GGUFHeader:
        """Read the whole header."""
        num_settings, num_tensors = self._counts()
        settings: dict[str, Any] = {}
        for _ in range(num_settings):
            key = self._string("a key", MAX_KEY_BYTES)
            if key in settings:
                raise _DamagedError(f"the key {key[:80]!r} is there twice")
            settings[key] = self._value(key)
        alignment = settings.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise _DamagedError(
                f"its alignment is {str(alignment)[:40]}, which is no power of two from 8 to 65536"
            )
        entries = list(self._entries(num_tensors, alignment))
        start = -(-self._position // alignment) * alignment
        return GGUFHeader(
            path=self._path, settings=settings, tensors=self._tensors(entries, start, alignment)
        )

    def _counts(self) -> tuple[int, int]:
        """Check magic and version; return the numbers of settings and tensors."""
        if self._read(4, "its magic") != MAGIC:
            raise _DamagedError("it does not begin with GGUF")
        (version,) = self._unpack("I", "its version")
        if version not in VERSIONS:
            raise ModelError(
                f"{self._path} is of GGUF version {version}, and versions 2 and 3 in little-endian order are read; "
                "make it again with a current llama.cpp, or convert it with gguf-convert-endian of the package gguf"
            )
        num_tensors, num_settings = self._unpack("QQ", "its counts")
        if num_settings > MAX_SETTINGS or num_tensors > MAX_TENSORS:
            raise _DamagedError(f"it claims {num_settings} settings and {num_tensors} tensors")
        return num_settings, num_tensors

    def _entries(self, count: int, alignment: int) -> Iterator[tuple[str, str, tuple[int, ...], int, int]]:
        """Name, kind, shape, offset and number of bytes of each tensor."""
        constants = import_extra("gguf.constants", "models")
        names: set[str] = set()
        for _ in range(count):
            name = self._string("a tensor's name", MAX_NAME_BYTES)
            if name in names:
                raise _DamagedError(f"the tensor {name!r} is there twice")
            names.add(name)
            (dimensions,) = self._unpack("I", name)
            if not 1 <= dimensions <= MAX_DIMENSIONS:
                raise _DamagedError(f"{name!r} has {dimensions} dimensions")
            shape = tuple(reversed(self._unpack(f"{dimensions}Q", name)))
            number, offset = self._unpack("IQ", name)
            if number not in set(constants.GGMLQuantizationType):
                raise ModelError(
                    f"{self._path} holds {name!r} in the ggml type {number}, which the package gguf does not know; "
                    "install a newer gguf, or quantise the model to another type"
                )
            kind = constants.GGMLQuantizationType(number)
            block, block_bytes = constants.GGML_QUANT_SIZES[kind]
            if not all(shape) or prod(shape) >= 1 << 62 or shape[-1] % block:
                raise _DamagedError(
                    f"{name!r} has the shape {list(shape)}, which is none of {kind.name}"[:300]
                )
            if offset % alignment:
                raise _DamagedError(f"{name!r} begins at {offset}, which is no multiple of {alignment}")
            yield name, kind.name, shape, offset, prod(shape) // block * block_bytes

    def _tensors(
        self, entries: list[tuple[str, str, tuple[int, ...], int, int]], start: int, alignment: int
    ) -> tuple[StoredTensor, ...]:
        """Check that the tensors follow one another from ``start`` to the end of the file."""
        end = 0
        for name, _, _, offset, num_bytes in sorted(entries, key=lambda entry: entry[3]):
            if offset != -(-end // alignment) * alignment:
                raise _DamagedError(
                    f"{name!r} begins at {offset} of its weights and the one before ends at {end}"
                )
            end = offset + num_bytes
        if start + end > self._size:
            raise _DamagedError(f"it should have {start + end} bytes and has {self._size}")
        if self._size - start - end >= alignment:
            raise _DamagedError(f"its tensors end at byte {start + end}, and it has {self._size}")
        return tuple(
            StoredTensor(
                name=name,
                path=self._path,
                kind=kind,
                shape=shape,
                offset=start + offset,
                num_bytes=num_bytes,
            )
            for name, kind, shape, offset, num_bytes in entries
        )

    def _value(self, key: str) -> Any:
        """The value of a setting."""
        (kind,) = self._unpack("I", key)
        if kind in NUMBERS:
            return self._unpack(NUMBERS[kind], key)[0]
        if kind == STRING:
            return self._string(key, MAX_HEADER_BYTES)
        if kind != ARRAY:
            raise _DamagedError(f"the setting {key[:80]!r} has the unknown type {kind}")
        kind, count = self._unpack("IQ", key)
        if count > MAX_ARRAY:
            raise _DamagedError(f"the setting {key[:80]!r} claims {count} elements")
        if kind in NUMBERS:
            return list(self._unpack(f"{count}{NUMBERS[kind]}", key))
        if kind != STRING:
            raise _DamagedError(f"the setting {key[:80]!r} is an array of the type {kind}")
        if 8 * count > self._size - self._position:
            raise _DamagedError(f"the setting {key[:80]!r} claims {count} strings")
        return [self._string(key, MAX_HEADER_BYTES) for _ in range(count)]

    def _string(self, what: str, max_bytes: int) -> str:
        (length,) = self._unpack("Q", what)
        if length > max_bytes:
            raise _DamagedError(f"{what[:80]!r} claims {length} bytes")
        # Pieces of characters occur in vocabularies; as surrogates they stay different from one another.
        return self._read(length, what).decode("utf-8", "surrogateescape")

    def _unpack(self, layout: str, what: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{layout}", self._read(struct.calcsize(f"<{layout}"), what))

    def _read(self, count: int, what: str) -> bytes:
        """The next ``count`` bytes; checked before they are allocated."""
        end = self._position + count
        if end > min(self._size, MAX_HEADER_BYTES):
            raise _DamagedError(f"it ends within {what[:80]!r}, or its header is longer than 256 MiB")
        self._position = end
        return self._file.read(count)


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
