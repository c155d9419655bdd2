"""Writes the coverage tables of docs/uncertainty.md, between their marks, from benchmarks/results/coverage.json.

python tools/make_uncertainty_page.py            write them
python tools/make_uncertainty_page.py --check    exit 1 if they are not what would be written
"""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

from made_files import between_marks, write_or_check

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "uncertainty.md"
BENCHMARKS = ROOT / "benchmarks"


def figures() -> dict[str, Any]:
    """The figures of the benchmark."""
    path = BENCHMARKS / "results" / "coverage.json"
    return json.loads(path.read_text(encoding="utf-8"))["figures"]


def page(text: str, results: dict[str, Any]) -> str:
    """The page with the tables of these figures between their marks."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        tables = runpy.run_path(str(BENCHMARKS / "coverage.py"))["tables"](results)
    finally:
        sys.path.remove(str(BENCHMARKS))
    for name, table in tables.items():
        begin, end = (
            f"<!-- {name}: written by tools/make_uncertainty_page.py -->\n",
            f"<!-- end of {name} -->\n",
        )
        text = between_marks(text, begin, end, table)
    return text


def main() -> int:
    """Write the page, or check that it is up to date."""
    text = page(PAGE.read_text(encoding="utf-8"), figures())
    return write_or_check({PAGE: text}, check="--check" in sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
