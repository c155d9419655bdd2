"""Fails on names that are used and defined nowhere.

python tools/check_undefined_names.py [PATH ...]     src, tests, benchmarks, tools and examples; exit 1 if there is one

The linter and the type checker cannot check this with the settings in ``pyproject.toml``: they take the words in the
shape of ``Float[Tensor, "*tokens vocab"]`` for names. This check runs ruff's rule F821 and drops the reports whose
position is in such a shape. Names in other string annotations are checked.
"""

import argparse
import ast
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("src", "tests", "benchmarks", "tools", "examples")


class Span(NamedTuple):
    """A stretch of source code: first and last line, counted from 1, and columns in characters, counted from 0."""

    first: int
    start: int
    last: int
    end: int

    def contains(self, line: int, column: int) -> bool:
        """Whether a position is in the stretch."""
        return (self.first, self.start) <= (line, column) < (self.last, self.end)


def shape_spans(text: str) -> Iterator[Span]:
    """The shapes of a file's annotations: strings in the brackets of a type that is imported from jaxtyping."""
    tree, lines = ast.parse(text), text.splitlines()
    types = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "jaxtyping"
        for alias in node.names
    }

    def column(line: int, offset: int) -> int:
        return len(lines[line - 1].encode()[:offset].decode())

    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id in types:
            elements = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            for shape in elements[1:]:
                if isinstance(shape, ast.Constant) and isinstance(shape.value, str):
                    first, last = shape.lineno, shape.end_lineno or shape.lineno
                    end = shape.end_col_offset or shape.col_offset
                    yield Span(first, column(first, shape.col_offset), last, column(last, end))


def reports_of_ruff(paths: Iterable[str], root: Path) -> list[dict[str, Any]]:
    """What ruff reports as undefined, shapes included.

    Raises:
        RuntimeError: if ruff does not run, or cannot parse a file.
    """
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--select", "F821"]
    command += ["--ignore-noqa", "--extend-exclude", "*.ipynb", "--target-version", "py310"]
    completed = subprocess.run(
        [*command, "--output-format", "json", *paths], capture_output=True, text=True, cwd=root
    )
    if completed.returncode not in (0, 1):
        raise RuntimeError(f"ruff ended with exit code {completed.returncode}: {completed.stderr.strip()}")
    reports = json.loads(completed.stdout)
    for report in reports:
        if report["code"] != "F821":
            raise RuntimeError(f"{report['filename']}: {report['message']}")
    return reports


def undefined_names(paths: Iterable[str], root: Path = ROOT) -> list[str]:
    """A line for each use of a name that is defined nowhere: path, line and message."""
    spans: dict[str, list[Span]] = {}
    lines = []
    for report in reports_of_ruff(paths, root):
        path, place = report["filename"], report["location"]
        if path not in spans:
            spans[path] = list(shape_spans(Path(path).read_text(encoding="utf-8")))
        if not any(span.contains(place["row"], place["column"] - 1) for span in spans[path]):
            lines.append(f"{Path(path).relative_to(root)}:{place['row']}: {report['message']}")
    return sorted(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the undefined names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="*", default=FOLDERS)
    parser.add_argument("--root", type=Path, default=ROOT)
    options = parser.parse_args(arguments)
    lines = undefined_names(options.paths, options.root.resolve())
    print("\n".join([*lines, f"{len(lines)} undefined names"]))
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
