"""Writes the tables of docs/reliability.md, between their marks, from benchmarks/results.

python tools/make_reliability_page.py            write them
python tools/make_reliability_page.py --check    exit 1 if they are not what would be written
"""

import json
import sys
from pathlib import Path
from typing import Any

from made_files import between_marks, write_or_check

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reliability.md"
RESULTS = ROOT / "benchmarks" / "results"
KINDS = {
    "run": "measurement",
    "cache": "reference cache",
    "training": "PPO run with a checkpoint",
}


def read(name: str) -> dict[str, Any] | None:
    """The figures of a benchmark; None if it has not run."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))["figures"] if path.exists() else None


def damages(figures: dict[str, Any] | None) -> str:
    """The table of outcomes by kind of folder."""
    if figures is None:
        return "Not measured yet: `python benchmarks/damage.py`.\n"
    header = (
        "| folder | damages | same result | refused | other result, with a warning | other result, without one "
        "| traceback |"
    )
    rows = [header]
    rows.append("|---|---|---|---|---|---|---|")
    for kind, words in KINDS.items():
        if kind not in figures["kinds"]:
            continue
        outcomes = figures["kinds"][kind]["outcomes"]
        numbers = [
            outcomes.get(name, 0) for name in ("identical", "refused", "warned", "silent", "traceback")
        ]
        rows.append("| " + " | ".join([words, str(sum(numbers)), *map(str, numbers)]) + " |")
    return "\n".join(rows) + "\n"


def kills(figures: dict[str, Any] | None) -> str:
    """The table of outcomes by command."""
    if figures is None:
        return "Not measured yet: `python benchmarks/kills.py`.\n"
    header = (
        "| command | kills | runs | same result | other result "
        "| report between kills: page / error message / traceback |"
    )
    rows = [header]
    rows.append("|---|---|---|---|---|---|")
    for kind, counts in figures["kinds"].items():
        reports = " / ".join(
            str(counts.get(f"report: {how}", 0)) for how in ("page", "sentence", "traceback")
        )
        numbers = [counts.get(name, 0) for name in ("kills", "runs", "same", "different")]
        rows.append("| " + " | ".join([f"`kleash {kind}`", *map(str, numbers), reports]) + " |")
    return "\n".join(rows) + "\n"


def hashing(figures: dict[str, Any] | None) -> str:
    """The table of hashing speeds."""
    if figures is None:
        return "Not measured yet: `python benchmarks/hashing.py`.\n"
    speed = figures["mebibytes_per_second"]
    return (
        f"| operation, {figures['mebibytes']} MiB in the page cache, {figures['threads']} cores | MiB/s |\n|---|---|\n"
        f"| reading only | {speed['reading']} |\n"
        f"| checksum when a file is read (SHA-256, one thread) | {speed['checksum']} |\n"
        f"| BLAKE2b, one thread, for comparison | {speed['BLAKE2b']} |\n"
        f"| fingerprint, first time (SHA-256, all cores) | {speed['first']} |\n"
        f"| fingerprint, from the second time on | {figures['again_ms']} ms in total |\n"
    )


def page(text: str) -> str:
    """The page with the tables between their marks."""
    for name, table in (("damage", damages), ("kills", kills), ("hashing", hashing)):
        begin, end = (
            f"<!-- {name}: written by tools/make_reliability_page.py -->\n",
            f"<!-- end of {name} -->\n",
        )
        text = between_marks(text, begin, end, table(read(name)))
    return text


def main() -> int:
    """Write the page, or check that it is up to date."""
    return write_or_check({PAGE: page(PAGE.read_text(encoding="utf-8"))}, check="--check" in sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
