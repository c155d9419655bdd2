"""Writes the table of adapters in docs/models.md from the rules by which they are loaded.

python tools/make_adapter_table.py            write it
python tools/make_adapter_table.py --check    exit 1 if it is not what would be written
"""

import re
import sys
from pathlib import Path

from made_files import write_or_check

from kleash.models.adapters.rules import RULES, TESTED_KINDS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
BLOCK = re.compile(r"(<!-- adapters: [^\n]*-->\n).*?(<!-- end of adapters -->)", re.DOTALL)
TREATMENTS = {
    "separate": "measured; a second copy of the base is loaded for the other side",
    "refused": "refused",
}


def table() -> str:
    """The rules as rows, in the order in which they are applied."""
    kinds = ", ".join(f"`{kind}`" for kind in sorted(TESTED_KINDS))
    rows = [
        ("adapter_config.json has", "treatment", "because the adapter"),
        ("---", "---", "---"),
        *((rule.settings, TREATMENTS[rule.treatment], rule.reason) for rule in RULES),
        (
            f"none of these, and a `peft_type` of {kinds}",
            "measured; the base is shared if the checks succeed, otherwise a second copy is loaded",
            "leaves its base as it is",
        ),
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def page() -> str:
    """The page with the current table."""
    text = PAGE.read_text(encoding="utf-8")
    return BLOCK.sub(lambda block: f"{block[1]}\n{table()}\n{block[2]}", text)


if __name__ == "__main__":
    sys.exit(write_or_check({PAGE: page()}, check="--check" in sys.argv[1:]))
