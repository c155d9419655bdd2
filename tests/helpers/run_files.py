"""What is in a run folder, but for the time that the run took."""

import json
from pathlib import Path
from typing import Any


def untimed(folder: Path, *others: str) -> dict[str, Any]:
    """All that ``measurement.json`` says except when, how long, and the ``others``."""
    measured = json.loads((folder / "measurement.json").read_text())
    return {name: value for name, value in measured.items() if name not in ("seconds", "finished", *others)}


def parts(folder: Path, kind: str = "tokens", count: int | None = None) -> dict[str, bytes]:
    """The contents of the parts of a kind, or of the first of them, by name."""
    return {path.name: path.read_bytes() for path in sorted((folder / kind).glob("part-*"))[:count]}


def require_same_parts(folder: Path, expected: Path, count: int | None = None) -> None:
    """Check that two runs wrote the same bytes for each shard, or for the first of them."""
    for kind in ("tokens", "sequences"):
        assert parts(folder, kind, count) == parts(expected, kind, count)


def require_same_files(folder: Path, expected: Path) -> None:
    """Check that two runs have the same shards, alternatives and numbers."""
    require_same_parts(folder, expected)
    assert (folder / "alternatives.parquet").read_bytes() == (expected / "alternatives.parquet").read_bytes()
    assert untimed(folder) == untimed(expected)
