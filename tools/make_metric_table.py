"""Writes the table of metrics into docs/train.md, between its two marks.

python tools/make_metric_table.py            write it
python tools/make_metric_table.py --check    exit 1 if it is not what would be written
"""

import sys
from pathlib import Path

from made_files import between_marks, write_or_check

from kleash.store.metrics import METRICS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "train.md"
BEGIN, END = "<!-- metrics: written by tools/make_metric_table.py -->\n", "<!-- end of metrics -->\n"


def table() -> str:
    """A row for each metric."""
    rows = [
        f"| `{name}` | {metric.unit if metric.unit != 'none' else ''} | {metric.meaning} | {_spelt(metric.verl)} | "
        f"{_spelt(metric.trl)} |"
        for name, metric in METRICS.items()
    ]
    head = ["| name | unit | meaning | verl | TRL |", "|---|---|---|---|---|"]
    return "\n".join([*head, *rows]) + "\n"


def _spelt(name: str | None) -> str:
    return "" if name is None else f"`{name}`"


def page(text: str) -> str:
    """The page with the table between its marks."""
    return between_marks(text, BEGIN, END, table())


def main() -> int:
    """Write the page, or check that it is up to date."""
    files = {PAGE: page(PAGE.read_text(encoding="utf-8"))}
    return write_or_check(files, check="--check" in sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
