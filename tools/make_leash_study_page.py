"""Writes docs/leash_study.md and its picture from benchmarks/results/leash_spread.json.

python tools/make_leash_study_page.py                         write them
python tools/make_leash_study_page.py --check                 exit 1 if they are not what would be written
python tools/make_leash_study_page.py --result R --docs D     from another result, into another folder
"""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import leash_study_words as words
from made_files import write_or_check
from performance_frame import paragraph
from spread_picture import picture

ROOT = Path(__file__).resolve().parents[1]
PAGE, IMAGE = "leash_study.md", "images/leash_study.svg"
TITLE = "Standard deviation of the reached KL, and reward against KL for two scopes"


def make_files(result: Mapping[str, Any] | None) -> dict[str, str]:
    """The page and its picture, by path relative to the folder of the documentation."""
    if result is None:
        body = [
            "# Study: seeds and scope of the KL term",
            "",
            "Not measured yet: `python benchmarks/leash_spread.py`.",
        ]
        return {PAGE: "\n".join(body) + "\n"}
    figures = result["figures"]
    setting, estimators, frontier = figures["setting"], figures["estimators"], figures["frontier"]
    body = ["# Study: seeds and scope of the KL term", "", *paragraph(words.HEAD)]
    body += ["## Results", "", *words.outcome(estimators, frontier, setting)]
    body += [f"![{TITLE}]({IMAGE})", "", "## Set-up", "", *paragraph(words.SETTING, **setting)]
    body += ["## Exact, k1 and k3", "", *words.chance(estimators, setting)]
    body += ["## Scope: token or sequence", "", *words.scopes(frontier, setting)]
    body += ["## Method", "", *paragraph(words.INTERVALS), *origin(figures)]
    spreads = {
        name: estimator["end"]["spread"] for name, estimator in (estimators or {"of": {}})["of"].items()
    }
    with_interval = {name: spread for name, spread in spreads.items() if spread["ci95"] is not None}
    image = picture(TITLE, with_interval, frontier["points"] if frontier else [])
    return {PAGE: "\n".join(body).rstrip() + "\n", IMAGE: image}


def origin(figures: Mapping[str, Any]) -> list[str]:
    """The paragraph on command, dates, commits, machines and versions."""
    return paragraph(
        "`python benchmarks/leash_spread.py` runs what is missing and appends every finished run to "
        "[leash_spread.jsonl](../benchmarks/results/leash_spread.jsonl): {runs} runs between {first} and {last}, "
        "{cpu_seconds:.0f} CPU seconds each on average, at commit {commit}, on {machine}, with {versions}. "
        "Sampler of the responses: {sampler}.",
        **{
            **figures,
            "first": figures["first"][:16].replace("T", " "),
            "last": figures["last"][:16].replace("T", " "),
            **{name: " and ".join(figures[name]) for name in ("commit", "machine", "versions", "sampler")},
        },
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--result", type=Path, default=ROOT / "benchmarks" / "results" / "leash_spread.json")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    result = json.loads(args.result.read_text(encoding="utf-8")) if args.result.exists() else None
    files = {args.docs / path: text for path, text in make_files(result).items()}
    return write_or_check(files, check=args.check)


if __name__ == "__main__":
    sys.exit(main())
