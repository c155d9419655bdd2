"""Runs the benchmarks of the linear functions, the most important first, as many as fit into a time limit.

    python benchmarks/linear_all.py --minutes 30
    python benchmarks/linear_all.py --minutes 10 --only "linear_peers.py --shape h4096" linear_step.py
    python benchmarks/linear_all.py --minutes 90 --vocabularies

docs/performance.md reports the results. ``MINUTES`` are the minutes that each benchmark takes on two
idle cores with 160 GFLOP/s in total. A benchmark that would not end in time is skipped, and the next one that fits is
run.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from time import monotonic

FOLDER = Path(__file__).resolve().parent
MINUTES = {
    "linear_peers.py": 10.0,
    "linear_training.py": 4.5,
    "linear_peaks.py --part main": 3.0,
    "linear_accuracy.py": 1.5,
    "linear_step.py": 2.5,
    "linear_peers.py --shape h4096": 3.5,
    "linear_peaks.py --part tokens": 1.5,
    "linear_peaks.py --part vocabulary": 1.5,
    "linear_peers.py --dtype bfloat16 --rounds 3": 4.0,
    "linear_peers.py --shape n1k": 2.0,
    "linear_peers.py --shape v152k": 6.0,
    "linear_peers.py --shape n8k": 3.5,
    "linear_peers.py --shape v262k": 8.0,
    "linear_peers.py --shape n4k": 5.0,
    "linear_peers.py --shape n4k_v128k": 13.0,
    "linear_peers.py --shape n4k_v152k": 15.0,
    "linear_peers.py --shape n4k_v262k": 26.0,
    "linear_peers.py --shape v128k": 5.0,
    "linear_speed.py": 2.0,
    "linear_memory.py": 2.5,
}
VOCABULARIES = ("n1k", "v128k", "v152k", "v262k", "n4k", "n4k_v128k", "n4k_v152k", "n4k_v262k")
"""The shapes of the bar on the fastest peer: 32 768 to 262 144 words, 1024 and 4096 tokens."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="time limit for all benchmarks")
    parser.add_argument("--only", nargs="*", choices=MINUTES, default=list(MINUTES), help="which")
    parser.add_argument(
        "--vocabularies", action="store_true", help="only the four vocabularies at 1024 and at 4096 tokens"
    )
    args = parser.parse_args()
    if args.vocabularies:
        args.only = [f"linear_peers.py --shape {shape}" for shape in VOCABULARIES]
    began, failed = monotonic(), []
    for command in args.only:
        minutes_left = args.minutes - (monotonic() - began) / 60
        if MINUTES[command] > minutes_left:
            print(
                f"-- left out: {command} ({MINUTES[command]:.1f} min, and {minutes_left:.1f} are left)",
                flush=True,
            )
            continue
        print(f"-- {command}", flush=True)
        start, (script, *options) = monotonic(), command.split()
        if subprocess.run([sys.executable, str(FOLDER / script), *options]).returncode:
            failed.append(command)
        print(f"-- took {(monotonic() - start) / 60:.1f} min", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
