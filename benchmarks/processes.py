"""Rate of two processes on one folder, compared with two independent runs of half the prompts side by side.

    python benchmarks/processes.py --prompts 1200            # about 100 s of scoring on two cores
    python benchmarks/processes.py --prompts 40 --rounds 1   # a trial
    python benchmarks/processes.py --way ray                 # two workers of Ray instead of two ranks of torchrun

Both measure the shipped pair on the same prompts. The rate is tokens per second of ``measurement.json`` (without
imports and loading), that of the independent runs the sum of theirs; beside it, tokens per second and processor time
of the whole commands. In every round one follows the other, in every second round in reverse, so that other load on
the machine meets both. The result is the median of the ratios within rounds.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from statistics import median
from time import perf_counter
from typing import Any

from harness import parser_of, write_result

NEW_TOKENS = 256
WAYS = {
    "torchrun": (("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"), ()),
    "ray": ((), ("--engine", "ray", "--workers", "2")),
}
"""What precedes ``-m kleash``, and further options."""
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def write_prompts(path: Path, first: int, count: int) -> Path:
    """A file of ``count`` prompts, of which no two files have one in common."""
    path.write_text(
        "".join(f"It was evening number {first + number} of the year, and\n" for number in range(count))
    )
    return path


def start(
    prompts: Path, out: Path, launcher: tuple[str, ...] = (), more: tuple[str, ...] = ()
) -> "subprocess.Popen[bytes]":
    """Start ``kleash measure`` on the shipped pair, with more options, in a session of its own.

    torchrun gives each rank a session, and Linux shares a busy processor between sessions.
    """
    options = ["--prompts", str(prompts), "--out", str(out), "--max-new-tokens", str(NEW_TOKENS), "--quiet"]
    command = [sys.executable, *launcher, "-m", "kleash", "measure", *options, *more]
    return subprocess.Popen(command, env=ENVIRONMENT, start_new_session=True)


def finish(processes: dict[Path, "subprocess.Popen[bytes]"]) -> dict[str, float]:
    """Wait for commands that run side by side; tokens, seconds of scoring, and tokens per second."""
    begin = perf_counter()
    for process in processes.values():
        if process.wait():
            raise SystemExit(f"{process.args} exited with {process.returncode}")
    whole_seconds = perf_counter() - begin
    measured = [json.loads((out / "measurement.json").read_text()) for out in processes]
    tokens = [run["counts"]["tokens"] for run in measured]
    return {
        "tokens": sum(tokens),
        "scoring_seconds": max(run["seconds"] for run in measured),
        "rate": sum(count / run["seconds"] for count, run in zip(tokens, measured, strict=True)),
        "rate_with_start": sum(tokens) / whole_seconds,
    }


def one_round(folder: Path, prompts: int, way: str, *, shared_first: bool) -> dict[str, dict[str, float]]:
    """Both ways, one after the other, with the load average of the machine during each."""
    whole = write_prompts(folder / "whole.txt", 0, prompts)
    halves = [
        write_prompts(folder / f"half-{number}.txt", number * (prompts // 2), prompts // 2)
        for number in (0, 1)
    ]
    outs = [folder / f"apart-{number}" for number in (0, 1)]

    def measure_together() -> dict[str, float]:
        return finish({folder / "shared": start(whole, folder / "shared", *WAYS[way])})

    def measure_apart() -> dict[str, float]:
        return finish({out: start(half, out) for out, half in zip(outs, halves, strict=True)})

    ways = {way: measure_together, "independent": measure_apart}
    figures: dict[str, dict[str, float]] = {}
    for name in ways if shared_first else reversed(ways):
        cpu_seconds = cpu_seconds_of_children()
        figures[name] = ways[name]()
        figures[name]["cpu_seconds"] = cpu_seconds_of_children() - cpu_seconds
        figures[name]["load_after"] = os.getloadavg()[0]
    return figures


def cpu_seconds_of_children() -> float:
    """Processor time of all commands that have ended, with their ranks."""
    usage = getrusage(RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Run the rounds and write ``results/processes.json``, or ``processes_ray.json``, after each."""
    parser = parser_of(__doc__, prompts=1200, rounds=3)
    parser.add_argument("--way", choices=tuple(WAYS), default="torchrun")
    options = parser.parse_args()
    rounds: list[dict[str, dict[str, float]]] = []
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            rounds.append(one_round(Path(folder), options.prompts, options.way, shared_first=number % 2 == 0))
        name = "processes" if options.way == "torchrun" else "processes_ray"
        figures = summary(options.prompts, options.way, rounds)
        write_result(name, figures, packages=("torch", "transformers"))
        print(json.dumps(figures, indent=2), flush=True)


def summary(prompts: int, way: str, rounds: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """The ratios of the shared run to independent runs, medians over the rounds."""

    def ratio_of(name: str) -> float:
        return round(median(row[way][name] / row["independent"][name] for row in rounds), 3)

    return {
        "prompts": prompts,
        "new_tokens": NEW_TOKENS,
        "ratio": ratio_of("rate"),
        "ratio_with_start": ratio_of("rate_with_start"),
        "ratio_of_cpu_seconds": ratio_of("cpu_seconds"),
        "rounds": rounds,
    }


if __name__ == "__main__":
    main()
