"""How far PPO strays from the reference by which estimate of the KL, and what scope "token" costs: over seeds.

    python benchmarks/leash_spread.py                       all that is missing; every finished run is kept
    python benchmarks/leash_spread.py --minutes 20          stops before a run that would not end in time
    python benchmarks/leash_spread.py --only estimators     or frontier
    python benchmarks/leash_spread.py --minutes 0           only the figures anew, from the runs that are there

Runs are lines of results/leash_spread.jsonl, figures are in results/leash_spread.json, and docs/leash_study.md is made
from those by tools/make_leash_study_page.py. All runs: kleash's PPO from shipped:reference on the shortest of the
shipped prompts, with the reward of kleash's demonstration, and one update for each step's responses. A run differs
from another in its KL, its beta and its seed, and in nothing else; runs of one seed draw with the same noise.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
from harness import RESULTS, circumstances, write_result
from spread_figures import figures_of
from spread_runs import Run, Setting, carry_out, planned, prompts_of

NAME = "leash_spread"
PACKAGES = ("transformers", "accelerate", "peft", "numpy")


def whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The runs that are there; a line that was half written when a run was killed is cut off."""
    if not path.exists():
        return
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole, encoding="utf-8")
    yield from map(json.loads, whole.splitlines())


def append(path: Path, line: dict[str, Any]) -> None:
    """Add a run; when this returns it is on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
        file.flush()
        os.fsync(file.fileno())


def of_setting(lines: list[dict[str, Any]], setting: Setting) -> list[dict[str, Any]]:
    """The runs that were made like this; the others would be another study's."""
    same = json.loads(json.dumps(asdict(setting)))
    return [line for line in lines if line["setting"] == same]


def study(
    setting: Setting, folder: Path, runs: list[Run], minutes: float = float("inf")
) -> list[dict[str, Any]]:
    """Carry out what is missing, as far as the time goes; returns all the runs that are there then."""
    path, began = folder / f"{NAME}.jsonl", time.monotonic()
    done = of_setting(list(whole_lines(path)), setting)
    known = {tuple(line[name] for name in ("kl", "place", "scope", "beta", "seed")) for line in done}
    missing = [run for run in runs if run.key not in known]
    trained, held_out = prompts_of(setting) if missing and minutes > 0 else ([], [])
    here = circumstances(PACKAGES)  # of the code that was imported, whatever is committed meanwhile
    took: list[float] = []
    for number, run in enumerate(missing):
        left = 60 * minutes - (time.monotonic() - began)
        if left <= 0 or (took and 1.2 * median(took[-5:]) > left):
            print(f"{len(missing) - number} runs are left for another time")
            break
        line = carry_out(run, setting, trained, held_out)
        line |= {name: here[name] for name in ("commit", "machine", "versions")}
        append(path, line)
        done.append(line)
        took.append(line["seconds"])
        last = line["held_out"]
        print(
            f"{number + 1}/{len(missing)} {' '.join(map(str, run.key))}: reward {last['reward']:.2f}, "
            f"KL {last['kl']:.2f}, {line['cpu_seconds']} s of processor, {line['seconds']} s",
            flush=True,
        )
    return done


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--only", choices=["estimators", "frontier"])
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--frontier-seeds", type=int, default=20)
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    setting = Setting()
    runs = planned(setting, args.seeds, args.frontier_seeds, args.only)
    try:
        study(setting, args.results, runs, args.minutes)
    except KeyboardInterrupt:
        print("interrupted; the runs that had finished are kept")
    done = of_setting(list(whole_lines(args.results / f"{NAME}.jsonl")), setting)
    if done:
        print(f"written to {write_result(NAME, figures_of(done), args.results, PACKAGES)}")
    if args.results == RESULTS:
        tool = RESULTS.parents[1] / "tools" / "make_leash_study_page.py"
        subprocess.run([sys.executable, str(tool)], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
