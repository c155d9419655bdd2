"""A tiny pair whose tokenizer the sources are read by."""

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from source_files import parquet
from tiny_models import tiny_pair

from kleash.models import Pair, load_pair


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A loaded pair of Llamas."""
    policy, reference = tiny_pair(tmp_path_factory.mktemp("llama"), "llama")
    return load_pair(str(policy), str(reference))


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, Any], str]:
    """Writes a source, rows as its suffix says, and gives its name."""

    def at(name: str, content: Any) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith((".csv", ".tsv")) and isinstance(content, list):
            rows = io.StringIO()
            csv.writer(rows, delimiter="\t" if name.endswith(".tsv") else ",").writerows(content)
            content = rows.getvalue()
        elif name.endswith(".parquet") and isinstance(content, list):
            content = parquet(content)
        elif not isinstance(content, bytes | str):
            content = json.dumps(content)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return at
