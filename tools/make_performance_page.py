"""Writes docs/performance.md and its pictures from the results in benchmarks/results.

python tools/make_performance_page.py                        write them
python tools/make_performance_page.py --check                exit 1 if they are not what would be written
python tools/make_performance_page.py --results R --docs D   from other results, into another folder

A missing result is listed as not measured yet, with the command that measures it.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import performance_bars
import performance_roofline
import performance_words as words
from made_files import write_or_check
from performance_bars import COMPILED, EAGER, wording
from performance_frame import COMMANDS, Results, markdown_table
from svg_charts import bars, lines

ROOT = Path(__file__).resolve().parents[1]
HEAD = """# Performance of the exact KL

Time, memory and accuracy of the exact KL and its gradient from hidden states ([linear.md](linear.md)), compared with
other packages, naive implementations, and the bare matmuls that all of them need. Every number is from
`benchmarks/results/`; [the last section](#how-it-was-measured) has the dates, machines and commands. `python
benchmarks/linear_all.py` runs all benchmarks and then writes this page (`python tools/make_performance_page.py`).

- All implementations do the same task: KL(p‖q), its mean over the tokens, and the gradients for the hidden states and
  the head of p; q is frozen. Packages run with their defaults. Before anything is timed, the value and the gradient of
  each are compared with kleash's.
- *The four matmuls*: two compute the logits of both models, two the gradients. They run alone, in chunks of 512
  tokens, into preallocated memory, by `torch.mm`. On an AMD processor with AVX-512, kleash computes all four with its
  C library (eager: three of them with oneDNN), and can therefore take less time than these four. In results of commits
  before eb71624, oneDNN computed three of them in the compiled mode, too.
- *The same arithmetic on registers alone*: as many fused multiply-adds as the four matmuls, at the processor's rate,
  without memory access (`benchmarks/peak.c`). It is a lower limit for float32 code on that machine.
- *Compiled* is the default of `linear_kl_loss` for a call of this size if a C compiler is available: a small C library,
  built once per machine, does the elementwise work. *Eager* is `LinearOptions(compile="never")`.
- Ratios are medians over interleaved rounds. In each round every implementation runs once, after a first call of each.

## Targets and results
"""
PARALLEL = """## Several processes

A test counts the numbers that the ranks of a vocabulary-parallel head exchange: [parallel.md](parallel.md).
"""
CURVES = {
    EAGER: "kleash",
    "trl": "TRL",
    "naive exact": "naive, bfloat16 logits",
    "naive upcast": "naive, float32 logits",
}


def load(folder: Path) -> dict[str, dict[str, Any]]:
    """The results, by file name without suffix."""
    paths = [path for path in sorted(folder.glob("linear_*.json")) if is_used(path.stem)]
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in paths}


def is_used(name: str) -> bool:
    """Whether the page uses this result."""
    return name in COMMANDS or name.startswith("linear_gpu")


def make_files(results: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """The page and its pictures, by path relative to the folder of the documentation."""
    figures = {name: result["figures"] for name, result in results.items()}
    parts = (
        words.time,
        words.shapes,
        words.narrow,
        words.values,
        words.engine,
        words.memory,
        words.accuracy,
        words.step,
    )
    body = [*performance_bars.table(figures), *(line for part in parts for line in part(figures))]
    text = "\n".join(
        [HEAD, *body, PARALLEL, *words.gpu(figures), *performance_roofline.section(), *origins(results)]
    )
    return {"performance.md": text.rstrip() + "\n", **pictures(figures)}


def origins(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The table of command, date, commit, machine and versions of each result."""
    rows: list[list[str]] = []
    for name, result in results.items():
        machine = result["machine"]
        where = machine["gpu"] or f"{machine['processor']}, {machine['threads']} threads"
        versions = ", ".join(f"{package} {number}" for package, number in result["versions"].items())
        link = f"[{name}](../benchmarks/results/{name}.json)"
        command = f"`{result['command']}`"
        rows.append([link, command, result["date"][:10], result["commit"], where, versions])
    heads = ["result", "command", "date", "commit", "machine", "versions"]
    return ["## How it was measured", "", *markdown_table(heads, rows)]


def pictures(figures: Results) -> dict[str, str]:
    """The charts, by path, as far as their results exist."""
    images: dict[str, str] = {}
    if "linear_peers_main" in figures:
        main = figures["linear_peers_main"]
        rows = sorted(
            (
                (wording(main)[name].replace("`", ""), row["of_matmuls"], name in (EAGER, COMPILED))
                for name, row in main["results"].items()
                if name != "matmuls"
            ),
            key=lambda row: row[1],
        )
        title = "Forward and backward pass, as a multiple of the four matmuls (shorter is faster)"
        images["images/performance_time.svg"] = bars(title, rows, (1.0, "the matmuls alone"))
    for what in ("tokens", "vocabulary"):
        if f"linear_peaks_{what}" in figures:
            part = figures[f"linear_peaks_{what}"]
            series = {
                str(CURVES.get(name, name)).partition(",")[0]: curve(
                    part["rows"], name, what, "extra_megabytes"
                )
                for name in part["words"]
            }
            title = "Peak memory beyond inputs and gradients, MB"
            images[f"images/performance_memory_{what}.svg"] = lines(title, what, series)
    if "linear_accuracy" in figures:
        part = figures["linear_accuracy"]
        key = "median_error_of_a_token"
        series = {CURVES[n]: curve(part["rows"], n, "nats", key) for n in CURVES if n in part["words"]}
        title = "Relative error of one token's KL, from bfloat16 inputs"
        images["images/performance_accuracy.svg"] = lines(title, "KL, nats", series)
    return images


def curve(rows: list[dict[str, Any]], name: str, across: str, up: str) -> list[tuple[float, float]]:
    """The points of one method; heights are at least 1e-9, since the axis is logarithmic."""
    return [(row[across], max(row[up], 1e-9)) for row in rows if row["name"] == name]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    files = {args.docs / path: text for path, text in make_files(load(args.results)).items()}
    return write_or_check(files, check=args.check)


if __name__ == "__main__":
    sys.exit(main())
