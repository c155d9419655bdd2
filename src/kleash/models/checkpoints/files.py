"""The table at the start of a safetensors file, checked before any library acts on it."""

import json
from math import prod
from pathlib import Path
from typing import Any

from kleash.errors import ModelError
from kleash.models.compat import first_line

LONGEST_HEADER = 100_000_000
"""Bytes; the safetensors library refuses longer ones."""
LONGEST_NAME = 200
MOST_DIMENSIONS = 64
"""Of a tensor: what PyTorch allows."""
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
"""Bits of one element, by the name of its dtype."""


def safetensors_header(path: Path) -> dict[str, Any]:
    """The tensors of a safetensors file: name → dtype, shape and data_offsets.

    Checked are the length of the header, that no name is there twice, that dtypes and shapes are valid, and that the
    tensors fill the file: in order of their offsets each begins where the one before ends, with as many bytes as its
    shape and dtype take.

    Raises:
        ModelError: if one of these does not hold, naming the file.
    """
    entries, size, start = _read(path)
    end = 0
    for name, begin, after in sorted(
        ((name, *_offsets(path, name, entry)) for name, entry in entries.items()), key=lambda row: row[1:]
    ):
        if begin != end:
            raise _damaged(path, f"the bytes of {name[:LONGEST_NAME]!r} begin at {begin} and not at {end}")
        end = after
    if start + end != size:
        raise ModelError(f"{path} should be {start + end} bytes long and is {size}; fetch or make it again")
    return entries


def _read(path: Path) -> tuple[dict[str, Any], int, int]:
    """The entries, the size of the file, and where in it the tensors begin."""
    try:
        if not path.is_file():
            raise ModelError(f"{path} is not a regular file; fetch or make it again")
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            raw = file.read(length) if length <= min(size - 8, LONGEST_HEADER) else b""
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
    try:
        header = json.loads(raw, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise _damaged(path) from error
    if not isinstance(header, dict):
        raise _damaged(path)
    return {name: entry for name, entry in header.items() if name != "__metadata__"}, size, 8 + length


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name is there twice")
    return table


def _offsets(path: Path, name: str, entry: Any) -> tuple[int, int]:
    """Where the bytes of a tensor begin and end, if its entry makes sense."""
    shown = repr(name[:LONGEST_NAME])
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise _damaged(path, f"{shown} has no dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise _damaged(path, f"{shown} has an unknown dtype")
    if not _whole_numbers(shape) or len(shape) > MOST_DIMENSIONS:
        raise _damaged(path, f"the shape of {shown} is no list of sizes")
    if not _whole_numbers(offsets) or len(offsets) != 2:
        raise _damaged(path, f"{shown} has no two offsets from 0 on")
    begin, end = offsets
    if (end - begin) * 8 != prod(shape) * BITS[dtype]:
        raise _damaged(path, f"{shown} has {end - begin} bytes, which are not those of {dtype} {shape}"[:400])
    return begin, end


def _whole_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _damaged(path: Path, reason: str = "") -> ModelError:
    because = f" ({reason})" if reason else ""
    return ModelError(f"{path} is not a safetensors file{because}; fetch or make it again")


LARGEST_SETTINGS = 1 << 26
"""Bytes of a JSON file that is read here; the largest indices of shards are a tenth of it."""


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ModelError: if it is not one.
    """
    try:
        size = path.stat().st_size
        if size > LARGEST_SETTINGS:
            raise ModelError(f"{path} is {size} bytes long, too long for settings; fetch or make it again")
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{path} cannot be read as JSON: {first_line(error)}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} should hold a JSON object and holds a {type(content).__name__}")
    return content


INDEX = "model.safetensors.index.json"

ADAPTER_WEIGHTS = "adapter_model.safetensors"


def weight_files(folder: Path) -> list[Path]:
    """The files from which transformers reads the weights of a model."""
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    if (folder / INDEX).is_file():
        return [folder / str(name) for name in sorted(set(read_json(folder / INDEX)["weight_map"].values()))]
    return sorted(folder.glob("*.safetensors"))
