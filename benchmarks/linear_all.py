"""The benchmarks of the linear functions in the order of their importance, as many as the time is enough for.

    python benchmarks/linear_all.py --minutes 30
    python benchmarks/linear_all.py --minutes 10 --only "linear_peers.py --shape h4096" linear_step.py
    python benchmarks/linear_all.py --minutes 90 --vocabularies

Then docs/performance.md is made from what is there. The minutes are what each takes on two idle cores with
160 GFLOP/s between them; one that would not end in time is left out, and the next that would is run.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from time import monotonic

HERE = Path(__file__).resolve().parent
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
    "linear_skipping.py": 5.0,
    "linear_speed.py": 2.0,
    "linear_memory.py": 2.5,
}
VOCABULARIES = ("n1k", "v128k", "v152k", "v262k", "n4k", "n4k_v128k", "n4k_v152k", "n4k_v262k")
"""The shapes of the bar on the fastest peer: 32 768 to 262 144 words, 1024 and 4096 tokens."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="time for all of them together")
    parser.add_argument("--only", nargs="*", choices=MINUTES, default=list(MINUTES), help="which")
    parser.add_argument(
        "--vocabularies", action="store_true", help="only the four vocabularies at 1024 and at 4096 tokens"
    )
    args = parser.parse_args()
    if args.vocabularies:
        args.only = [f"linear_peers.py --shape {shape}" for shape in VOCABULARIES]
    began, failed = monotonic(), []
    for command in args.only:
        left = args.minutes - (monotonic() - began) / 60
        if MINUTES[command] > left:
            print(f"-- left out: {command} ({MINUTES[command]:.1f} min, and {left:.1f} are left)", flush=True)
            continue
        print(f"-- {command}", flush=True)
        start, (script, *options) = monotonic(), command.split()
        if subprocess.run([sys.executable, str(HERE / script), *options]).returncode:
            failed.append(command)
        print(f"-- took {(monotonic() - start) / 60:.1f} min", flush=True)
    page = HERE.parent / "tools" / "make_performance_page.py"
    subprocess.run([sys.executable, str(page)], check=True)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
