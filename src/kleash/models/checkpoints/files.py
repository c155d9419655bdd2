"""Reading the files of an untrusted checkpoint: JSON settings and safetensors headers, within limits."""

import json
from collections.abc import Iterable
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any

from kleash.errors import ModelError, summarise_error

POINTER_START = b"version https://git-lfs"
SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
MAX_JSON_BYTES = 1 << 26
"""Size limit for settings files; the largest index of shards known is a tenth of it."""
MAX_HEADER_BYTES = 100_000_000
"""The safetensors library refuses longer headers."""
MAX_NAME_CHARACTERS = 200
MAX_READ_BYTES = 1 << 24
MAX_DIMENSIONS = 64
"""PyTorch's limit on the dimensions of a tensor."""
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
"""Bits per element for each dtype name of the format."""


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


def read_safetensors_header(path: Path) -> dict[str, Any]:
    """Read and validate the header of a safetensors file, before any library acts on it.

    Checks the header's length, that names are unique, that dtypes and shapes are valid, and that the tensors fill the
    file without gaps or overlaps: in order of offsets, each begins where the previous one ends and has exactly the
    bytes of its shape and dtype.

    Returns:
        Tensor name → dtype, shape and data_offsets.

    Raises:
        ModelError: if a check fails, naming the file.
    """
    entries, size, start = _parse_header(path)
    end = 0
    for name, begin, stop in sorted(
        ((name, *_offsets(path, name, entry)) for name, entry in entries.items()), key=lambda row: row[1:]
    ):
        if begin != end:
            raise _damaged_error(
                path, f"the bytes of {name[:MAX_NAME_CHARACTERS]!r} begin at {begin} and not at {end}"
            )
        end = stop
    if start + end != size:
        raise ModelError(f"{path} should be {start + end} bytes long and is {size}; fetch or make it again")
    return entries


def _parse_header(path: Path) -> tuple[dict[str, Any], int, int]:
    """Entries of the header, size of the file, and offset of the first tensor."""
    try:
        if not path.is_file():
            raise ModelError(f"{path} is not a regular file; fetch or make it again")
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            raw = file.read(length) if length <= min(size - 8, MAX_HEADER_BYTES) else b""
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
    try:
        header = json.loads(raw, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise _damaged_error(path) from error
    if not isinstance(header, dict):
        raise _damaged_error(path)
    return {name: entry for name, entry in header.items() if name != "__metadata__"}, size, 8 + length


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of a JSON's pairs; raises ``ValueError`` if a key is repeated."""
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name is there twice")
    return table


def _offsets(path: Path, name: str, entry: Any) -> tuple[int, int]:
    """First and last byte offset of a tensor, after validating its entry."""
    shown = repr(name[:MAX_NAME_CHARACTERS])
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise _damaged_error(path, f"{shown} has no dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise _damaged_error(path, f"{shown} has an unknown dtype")
    if not _is_list_of_sizes(shape) or len(shape) > MAX_DIMENSIONS:
        raise _damaged_error(path, f"the shape of {shown} is no list of sizes")
    if not _is_list_of_sizes(offsets) or len(offsets) != 2:
        raise _damaged_error(path, f"{shown} has no two offsets from 0 on")
    begin, end = offsets
    if (end - begin) * 8 != prod(shape) * BITS[dtype]:
        raise _damaged_error(
            path, f"{shown} has {end - begin} bytes, which are not those of {dtype} {shape}"[:400]
        )
    return begin, end


def _is_list_of_sizes(values: Any) -> bool:
    """Whether a value is a list of integers from 0 below 2^63."""
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _damaged_error(path: Path, reason: str = "") -> ModelError:
    """The error about a damaged safetensors file."""
    explanation = f" ({reason})" if reason else ""
    return ModelError(f"{path} is not a safetensors file{explanation}; fetch or make it again")


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


def list_weight_files(folder: Path) -> list[Path]:
    """The files from which transformers would read the weights of a model."""
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    return _list_shards(folder) or sorted(folder.glob("*.safetensors"))


def _list_shards(folder: Path) -> list[Path]:
    """The files that the index of a checkpoint names; none without an index."""
    if not (folder / INDEX).is_file():
        return []
    return [folder / str(name) for name in sorted(set(read_json(folder / INDEX)["weight_map"].values()))]


def check_repeated_tensors(subject: str, folder: Path) -> None:
    """Refuse a checkpoint of which two files hold a tensor of one name with different contents.

    Where a folder has both a single file and the shards of an index, programs differ in which of them they read.

    Args:
        subject: the model, for errors.
        folder: of the checkpoint.

    Raises:
        ModelError: naming the tensor and the files.
    """
    paths_by_name: dict[str, Path] = {}
    for path in dict.fromkeys([*list_weight_files(folder), *_list_shards(folder)]):
        for name in read_safetensors_header(path):
            first = paths_by_name.setdefault(name, path)
            if first != path and not _are_equal(name, first, path):
                raise ModelError(
                    f"{subject} has the tensor {name[:MAX_NAME_CHARACTERS]} in {first.name} and in {path.name}, with "
                    "different contents; remove the file that does not belong to it, or fetch the checkpoint again"
                )


def _are_equal(name: str, *paths: Path) -> bool:
    """Whether two files hold the same type, shape and bytes of a tensor."""
    contents: list[tuple[Any, ...]] = []
    for path in paths:
        entries, _, start = _parse_header(path)
        begin, end = entries[name]["data_offsets"]
        digest = sha256()
        with path.open("rb") as file:
            file.seek(start + begin)
            for offset in range(begin, end, MAX_READ_BYTES):
                digest.update(file.read(min(MAX_READ_BYTES, end - offset)))
        contents.append((entries[name]["dtype"], entries[name]["shape"], digest.digest()))
    return contents[0] == contents[1]
