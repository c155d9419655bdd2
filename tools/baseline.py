"""The package's numbers, stored exactly, so that a change of code can be shown to change none of them.

python tools/baseline.py write FOLDER [--only GROUP ...]      run everything and store it in FOLDER/baseline.json.gz
python tools/baseline.py compare FOLDER [--only GROUP ...]    run it again; exit 1 and a table if anything differs

Write before a step and compare after it, on the same machine: the last bits depend on the processor, on torch's
version and on the number of threads (one here). So the file is not committed; FOLDER is ``.baseline``, which git
ignores, or a folder outside the repository. Everything takes about two minutes on one core.

What is compared: every number and array, bit by bit, and every identifier. What is new is listed and is no
difference. Sentences (texts with a space in them) are counted, and compared only with ``--texts``. Times, versions and
checksums of lines are left out (``IGNORED``).

What is run is in ``baseline_functions.py`` and ``baseline_commands.py``, by public names and the command alone.
"""

import argparse
import base64
import gzip
import hashlib
import json
import os
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import baseline_commands
import baseline_functions
import numpy as np
import torch
from torch import Tensor

GROUPS: Mapping[str, Callable[[], Iterator[tuple[str, Any]]]] = {
    "dense": baseline_functions.run_dense,
    "estimators": baseline_functions.run_estimators,
    "losses": baseline_functions.run_losses,
    "leash": baseline_functions.run_leash,
    "uncertainty": baseline_functions.run_uncertainty,
    "linear": baseline_functions.run_linear,
    "measure": baseline_commands.run_measure,
    "train": baseline_commands.run_train,
    "audit": baseline_commands.run_audit,
}
IGNORED = re.compile(r"(^|/)(seconds|finished|versions|check|samples_check|time|kleash|schema)(/|$)")
"""Paths of values that differ from run to run or from version to version."""
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "TRITON_INTERPRET": "1",
}
LARGEST_STORED = 200
"""Of a larger array a digest, a sum and some entries are stored."""
SAMPLED_ENTRIES = 24


def stored_array(values: np.ndarray | Tensor) -> dict[str, Any]:
    """An array as JSON: bit by bit if it is small; else its digest, its sum and some of its entries."""
    if isinstance(values, Tensor):
        values = values.detach().cpu().contiguous()
        if values.dtype == torch.bfloat16:
            return {**stored_array(values.float()), "dtype": "bfloat16"}
        values = values.numpy()
    if values.dtype == object or values.dtype.kind in "US":
        text = json.dumps(values.tolist(), default=str)
        return {
            "digest": hashlib.sha256(text.encode()).hexdigest(),
            "shape": list(values.shape),
            "dtype": "text",
        }
    values = np.ascontiguousarray(values)
    record: dict[str, Any] = {"dtype": str(values.dtype), "shape": list(values.shape)}
    if values.size > LARGEST_STORED:
        record["digest"] = hashlib.sha256(values.tobytes()).hexdigest()
        record["sum"] = float(np.nansum(values.astype(np.float64))).hex()
        values = values.reshape(-1)[np.linspace(0, values.size - 1, SAMPLED_ENTRIES).astype(int)]
    return {**record, "data": base64.b64encode(values.tobytes()).decode()}


def entries_of(record: Mapping[str, Any]) -> np.ndarray:
    """The entries that a stored array holds, as float64."""
    dtype = "float32" if record["dtype"] == "bfloat16" else record["dtype"]
    return np.frombuffer(
        base64.b64decode(record.get("data", "")), dtype if "data" in record else "u1"
    ).astype(float)


def collect(path: str, value: Any, records: dict[str, Any]) -> None:
    """Store a value and all that it is made of under its path."""
    if IGNORED.search(path):
        return
    if isinstance(value, Tensor | np.ndarray):
        records[path] = stored_array(value)
    elif isinstance(value, bool | int | None):
        records[path] = value
    elif isinstance(value, float | np.floating):
        records[path] = {"float": float(value).hex()}
    elif isinstance(value, str):
        records[path] = {"text": value}
    elif isinstance(value, Mapping):
        for key, part in value.items():
            collect(f"{path}/{key}", part, records)
    elif hasattr(value, "_asdict"):
        collect(path, value._asdict(), records)
    elif is_dataclass(value):
        collect(path, {field.name: getattr(value, field.name) for field in fields(value)}, records)
    elif isinstance(value, Sequence):
        records[f"{path}/length"] = len(value)
        for n, part in enumerate(value):
            collect(f"{path}/{n}", part, records)
    elif isinstance(value, np.integer):
        records[path] = int(value)
    elif not callable(value):
        raise TypeError(f"{path}: no way to store a {type(value).__qualname__}")


def run(groups: Sequence[str]) -> dict[str, Any]:
    """Every record of the groups, by path."""
    records: dict[str, Any] = {}
    begun, current, threads = time.monotonic(), Path.cwd(), torch.get_num_threads()
    torch.set_num_threads(1)
    with (
        tempfile.TemporaryDirectory() as folder,
        warnings.catch_warnings(),
        patch.dict(os.environ, ENVIRONMENT),
    ):
        warnings.simplefilter("ignore")
        os.chdir(folder)
        sys.path.insert(0, folder)
        try:
            baseline_commands.write_sources()
            for group in groups:
                torch.manual_seed(0)
                for path, value in GROUPS[group]():
                    collect(f"{group}/{path}", value, records)
                print(f"{group}: {time.monotonic() - begun:.0f} s", file=sys.stderr)
        finally:
            torch.set_num_threads(threads)
            os.chdir(current)
            sys.path.remove(folder)
    return records


def canonical(records: Mapping[str, Any]) -> dict[str, Any]:
    """The records without those that are ignored."""
    kept_records: dict[str, Any] = {}
    for path, record in records.items():
        if not IGNORED.search(path):
            kept_records[path] = record
    return kept_records


def is_prose(record: Any) -> bool:
    """Whether a record is a sentence, which may be reworded."""
    return isinstance(record, dict) and " " in record.get("text", "")


def difference(before: Any, after: Any) -> str | None:
    """By how much two records differ, in words; None if they are the same."""
    if before == after and type(before) is type(after):
        return None
    if not (isinstance(before, dict) and isinstance(after, dict)):
        return f"{before!r} -> {after!r}"
    if "float" in before and "float" in after:
        old, new = float.fromhex(before["float"]), float.fromhex(after["float"])
        return f"{old!r} -> {new!r} (by {abs(new - old):.3g})"
    if "text" in before or "text" in after:
        return f"{before.get('text', before)!r} -> {after.get('text', after)!r}"
    if (before.get("dtype"), before.get("shape")) != (after.get("dtype"), after.get("shape")):
        return f"{before.get('dtype')} {before.get('shape')} -> {after.get('dtype')} {after.get('shape')}"
    if "data" not in before or "data" not in after:
        return "another content"
    old, new = entries_of(before), entries_of(after)
    with np.errstate(invalid="ignore", divide="ignore"):
        distance = np.where((old == new) | (np.isnan(old) & np.isnan(new)), 0.0, np.abs(new - old))
        relative = distance / np.maximum(np.abs(old), np.abs(new))
    where = int(np.nanargmax(np.where(distance == 0, -1.0, distance))) if distance.size else 0
    kind = "sampled entries" if "digest" in before else "entries"
    largest, most_relative = np.nanmax(distance, initial=0), np.nanmax(relative, initial=0)
    return (
        f"{np.count_nonzero(distance)} of {old.size} {kind} differ, by up to {largest:.3g} "
        f"(relative {most_relative:.3g}), e.g. {float(old[where])!r} -> {float(new[where])!r}"
    )


def compare(
    before: Mapping[str, Any], after: Mapping[str, Any], *, texts: bool = False, most: int = 40
) -> int:
    """Print what differs; 1 if something does."""
    before, after = canonical(before), canonical(after)
    differences: dict[str, str] = {}
    reworded = 0
    for path, record in before.items():
        if path not in after:
            differences[path] = "is missing now"
            continue
        words = difference(record, after[path])
        if words is None:
            continue
        if is_prose(record) and is_prose(after[path]) and not texts:
            reworded += 1
        else:
            differences[path] = words
    added = [path for path in after if path not in before]
    for path, words in list(differences.items())[:most]:
        print(f"{path}: {words}")
    if len(differences) > most:
        print(f"... and {len(differences) - most} more")
    counts: dict[str, list[int]] = {}
    for path in before:
        group = counts.setdefault(
            "/".join(path.split("/")[:2]) if path.startswith("train") else path.split("/")[0], [0, 0]
        )
        group[0] += 1
        group[1] += path in differences
    for group, (number, different) in counts.items():
        print(f"{group}: {number} records, {different} different")
    print(
        f"{len(before)} records, {len(differences)} different, {reworded} sentences reworded, {len(added)} new"
    )
    for path in added[:10]:
        print(f"new: {path}")
    return int(bool(differences))


def read(folder: Path) -> dict[str, Any]:
    """What a folder's file holds."""
    return json.loads(gzip.decompress((folder / "baseline.json.gz").read_bytes()))


def main(arguments: list[str] | None = None) -> int:
    """Write or compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=["write", "compare"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", choices=list(GROUPS), default=list(GROUPS))
    parser.add_argument("--texts", action="store_true", help="compare sentences, too")
    parser.add_argument("--most", type=int, default=40, help="differences that are printed")
    options = parser.parse_args(arguments)
    if options.action == "compare":
        stored = {path: x for path, x in read(options.folder).items() if path.split("/")[0] in options.only}
        return compare(stored, run(options.only), texts=options.texts, most=options.most)
    records = run(options.only)
    options.folder.mkdir(parents=True, exist_ok=True)
    content = gzip.compress(json.dumps(records, indent=0).encode(), mtime=0)
    (options.folder / "baseline.json.gz").write_bytes(content)
    print(f"{len(records)} records, {len(content) / 1e6:.2f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
