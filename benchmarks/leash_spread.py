"""The KL that PPO reaches with each estimator, and reward against KL for both scopes, over seeds.

    python benchmarks/leash_spread.py                       all missing runs; every finished run is stored
    python benchmarks/leash_spread.py --minutes 20          starts no run that would not end in time
    python benchmarks/leash_spread.py --only estimators     or frontier
    python benchmarks/leash_spread.py --minutes 0           computes the figures again from the stored runs

Runs are lines of results/leash_spread.jsonl, figures are in results/leash_spread.json, and docs/leash_study.md has
them. All runs are kleash's PPO from shipped:reference on the shortest of the shipped prompts, with the reward of the
demonstration and one update per step. Runs differ only in the KL term, beta and the seed; runs of one seed use the same
random numbers.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
from harness import RESULTS, provenance, write_result
from spread_figures import figures_of
from spread_runs import Run, Setting, execute, plan_runs, prompts_of

from kleash.models.keyed_draws import SAMPLER

NAME = "leash_spread"
PACKAGES = ("transformers", "accelerate", "peft", "numpy")


def whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The stored runs; an incomplete last line is removed from the file."""
    if not path.exists():
        return
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole, encoding="utf-8")
    yield from map(json.loads, whole.splitlines())


def append(path: Path, line: dict[str, Any]) -> None:
    """Append a run and flush it to disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
        file.flush()
        os.fsync(file.fileno())


def runs_of_setting(lines: list[dict[str, Any]], setting: Setting) -> list[dict[str, Any]]:
    """The runs with this setting."""
    stored_setting = json.loads(json.dumps(asdict(setting)))
    return [line for line in lines if line["setting"] == stored_setting]


def study(
    setting: Setting, folder: Path, runs: list[Run], minutes: float = float("inf")
) -> list[dict[str, Any]]:
    """Execute the missing runs within the time limit; all runs that are then stored."""
    path, began = folder / f"{NAME}.jsonl", time.monotonic()
    done = runs_of_setting(list(whole_lines(path)), setting)
    known = {tuple(line[name] for name in ("kl", "place", "scope", "beta", "seed")) for line in done}
    missing = [run for run in runs if run.key not in known]
    trained, held_out = prompts_of(setting) if missing and minutes > 0 else ([], [])
    origin = provenance(PACKAGES)  # the imported code is of this commit; another may be made during the runs
    durations: list[float] = []
    for number, run in enumerate(missing):
        seconds_left = 60 * minutes - (time.monotonic() - began)
        if seconds_left <= 0 or (durations and 1.2 * median(durations[-5:]) > seconds_left):
            print(f"{len(missing) - number} runs are left for another time")
            break
        line = execute(run, setting, trained, held_out)
        line |= {name: origin[name] for name in ("commit", "machine", "versions")} | {"sampler": SAMPLER}
        append(path, line)
        done.append(line)
        durations.append(line["seconds"])
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
    runs = plan_runs(setting, args.seeds, args.frontier_seeds, args.only)
    try:
        study(setting, args.results, runs, args.minutes)
    except KeyboardInterrupt:
        print("interrupted; the runs that had finished are kept")
    done = runs_of_setting(list(whole_lines(args.results / f"{NAME}.jsonl")), setting)
    if done:
        print(f"written to {write_result(NAME, figures_of(done), args.results, PACKAGES)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
