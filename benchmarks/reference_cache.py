"""Time and memory of ``kleash measure`` with a reference cache, compared with the same command without one.

    python benchmarks/reference_cache.py --documents 60

Whole processes are timed on the shipped pair, with imports, loading and report, one after the other in every round.
Both read documents of 250 tokens of the shipped text and must report the same KL. The result is the median of the
ratios within rounds, of wall time and of processor time, and the largest resident memory of a process.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from harness import parser_of, ratio, write_result

TOKENS = 250
KLEASH = (sys.executable, "-m", "kleash")


def write_text(path: Path, documents: int) -> Path:
    """Write a JSONL file of documents of the shipped text."""
    from transformers import AutoTokenizer

    from kleash.shipped import shipped_folder, shipped_text

    tokenizer = AutoTokenizer.from_pretrained(shipped_folder("policy"))
    texts = [json.loads(line)["text"] for line in shipped_text().read_text().splitlines()]
    ids = tokenizer(" ".join(texts), add_special_tokens=False, verbose=False)["input_ids"]
    starts = [number * 997 % (len(ids) - TOKENS) for number in range(documents)]
    cut = [tokenizer.decode(ids[start : start + TOKENS]) for start in starts]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in cut))
    return path


def time_command(command: Sequence[str]) -> tuple[float, float, float]:
    """Wall seconds, processor seconds, and peak resident memory of a process in MB of a million bytes."""
    began = perf_counter()
    process = subprocess.Popen(command)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, command
    return perf_counter() - began, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e6


def kl_of(folder: Path) -> float:
    """KL(policy || reference) per token of a measurement."""
    measured = json.loads((folder / "measurement.json").read_text())
    return measured["per_token"]["kl_policy_reference"]["value"]


def compare(documents: int, rounds: int, work: Path) -> dict[str, Any]:
    """Seconds and memory of both ways in each round, and the median ratios."""
    text = ["--text", str(write_text(work / "text.jsonl", documents)), "--quiet"]
    cache = str(work / "reference")
    subprocess.run([*KLEASH, "cache", *text, "--out", cache], check=True)
    ways = {"cache": ["--reference-cache", cache], "without": []}
    timed: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, more in ways.items():
            shutil.rmtree(work / name, ignore_errors=True)
            timed[name].append(time_command([*KLEASH, "measure", *text, *more, "--out", str(work / name)]))
        kls = [kl_of(work / name) for name in ways]
        assert abs(kls[0] - kls[1]) <= 1e-3 * kls[1], kls
    wall, processor, peaks = (
        {name: [row[column] for row in rows] for name, rows in timed.items()} for column in range(3)
    )
    return {
        "documents": documents,
        "wall_seconds": wall,
        "processor_seconds": processor,
        "median_wall_seconds": {name: median(seconds) for name, seconds in wall.items()},
        "peak_mb": {name: round(max(peak)) for name, peak in peaks.items()},
        "ratio": ratio(wall["cache"], wall["without"]),
        "processor_ratio": ratio(processor["cache"], processor["without"]),
    }


def main() -> None:
    """Run the comparison, print the result and write it to benchmarks/results."""
    parser = parser_of(__doc__)
    parser.add_argument("--documents", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = compare(options.documents, options.rounds, Path(folder))
    print(json.dumps(result, indent=2))
    write_result("reference_cache", result, packages=["transformers"])


if __name__ == "__main__":
    main()
