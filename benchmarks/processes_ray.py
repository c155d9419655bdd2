"""Rate of ``--engine ray`` with two workers, compared with two independent runs of half the prompts side by side.

    python benchmarks/processes_ray.py --prompts 2000            # about 100 s of scoring on two cores
    python benchmarks/processes_ray.py --prompts 60 --rounds 1   # a trial

As ``processes.py`` does for torchrun: the shipped pair, tokens per second of ``measurement.json``, the ways in turn.
The overhead of a shard is the time in which a worker was not scoring or encoding, by the seconds in ``workers.jsonl``,
divided by the number of shards. It includes the tail, in which one worker has no shard left, and making the
measurement, which one process does alone as well.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from harness import write_result
from processes import finish, start, write_prompts

from kleash.store.worker_log import read_worker_lines

WORKERS = 2
ON_RAY = ("--engine", "ray", "--workers", str(WORKERS))


def one_round(folder: Path, prompts: int, options: tuple[str, ...], *, ray_first: bool) -> dict[str, Any]:
    """Both ways, one after the other."""
    whole = write_prompts(folder / "whole.txt", 0, prompts)
    halves = [
        write_prompts(folder / f"half-{number}.txt", number * (prompts // 2), prompts // 2)
        for number in (0, 1)
    ]
    outs = [folder / f"apart-{number}" for number in (0, 1)]
    figures: dict[str, Any] = {}
    for name in ("ray", "independent") if ray_first else ("independent", "ray"):
        if name == "ray":
            figures[name] = finish({folder / "ray": start(whole, folder / "ray", (), (*options, *ON_RAY))})
        else:
            runs = {out: start(half, out, (), options) for out, half in zip(outs, halves, strict=True)}
            figures[name] = finish(runs)
        figures[name]["load_after"] = round(os.getloadavg()[0], 1)
    lines = read_worker_lines(folder / "ray").values()
    scoring = sum(line.seconds for line in lines)
    idle = WORKERS * figures["ray"]["scoring_seconds"] - scoring
    figures["ray"] |= {
        "shards": len(lines),
        "worker_seconds": scoring,
        "overhead_of_a_shard": idle / len(lines),
    }
    figures["recorded"] = [round(line.seconds / line.tokens, 7) for line in lines]
    return figures


def main() -> None:
    """Run the rounds and write ``results/processes_ray.json`` after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=1200)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rounds: list[dict[str, Any]] = []
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            words = ("--batch-tokens", str(options.batch_tokens))
            rounds.append(one_round(Path(folder), options.prompts, words, ray_first=number % 2 == 0))
        print(json.dumps(rounds[-1]), flush=True)

        def ratio_of(name: str) -> float:
            return round(median(row["ray"][name] / row["independent"][name] for row in rounds), 3)

        figures = {
            "prompts": options.prompts,
            "batch_tokens": options.batch_tokens,
            "ratio": ratio_of("rate"),
            "ratio_with_start": ratio_of("rate_with_start"),
            "rounds": rounds,
        }
        write_result("processes_ray", figures, packages=("torch", "transformers", "ray"))


if __name__ == "__main__":
    main()
