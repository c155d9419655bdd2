"""Peak memory of each way to the exact KL and its gradient, and how it grows with tokens and vocabulary.

    python benchmarks/linear_peaks.py
    python benchmarks/linear_peaks.py --part tokens
    python benchmarks/linear_peaks.py --part main --only kleash liger

Every figure is of a process of its own: resident memory at most during a call, beyond what the process held before
it and beyond the gradients that the call leaves behind. A first call of the same size has warmed it up (a peer
that compiles has compiled), and what it left free was given back to the system. "main" runs all ways at 2048
tokens, hidden size 1024 and a vocabulary of 32 768; "tokens" and "vocabulary" change one size at a time, with
small hidden states to be quick.
"""

import argparse
import ctypes
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from harness import RESULTS, peak_of, write_result
from linear_methods import METHODS, PACKAGES, gradients, make_inputs

MAIN = (2048, 1024, 32_768)
CURVES = ("kleash", "trl", "naive exact")
SWEEPS = {
    "tokens": [(tokens, 64, 32_768) for tokens in (1024, 2048, 4096, 8192)],
    "vocabulary": [(1024, 64, words) for words in (32_768, 65_536, 128_256, 151_936)],
}
TINY = {
    "tokens": [(tokens, 8, 512) for tokens in (64, 128)],
    "vocabulary": [(64, 8, words) for words in (512, 1024)],
}


def one(name: str, size: tuple[int, int, int]) -> dict[str, float]:
    """This process's peak, in MB of a million bytes."""
    x, method = make_inputs(*size), METHODS[name]
    gradients(x, method.of(x))
    ctypes.CDLL(None).malloc_trim(0)
    kept: list[Any] = []
    peak = peak_of(lambda: kept.append(gradients(x, method.of(x))))
    left = sum(grad.numel() * grad.element_size() for grad in kept[0]) / 1e6
    return {"extra_megabytes": round(peak - left, 1), "gradient_megabytes": round(left, 1)}


def apart(name: str, size: tuple[int, int, int], threads: int) -> dict[str, Any]:
    """The same from a process of its own."""
    command = [sys.executable, __file__, "--one", name, "--threads", str(threads)]
    command += ["--size", *(str(number) for number in size)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    tokens, hidden, vocabulary = size
    row = {"name": name, "tokens": tokens, "hidden": hidden, "vocabulary": vocabulary}
    row |= json.loads(done.stdout.splitlines()[-1])
    print("{name:16} {tokens:6} x {hidden} x {vocabulary:6} {extra_megabytes:8.0f} MB".format(**row))
    return row


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=["all", "main", *SWEEPS], default="all")
    parser.add_argument("--only", nargs="*", choices=METHODS, help="ways to measure; all if left out")
    parser.add_argument("--tiny", action="store_true", help="sizes that mean nothing, in seconds")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    parser.add_argument("--one", choices=METHODS, help="measure this process with this way, and nothing else")
    parser.add_argument("--size", type=int, nargs=3, default=MAIN, help="for --one")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    if args.one:
        print(json.dumps(one(args.one, tuple(args.size))))
        return
    sweeps, size = (TINY, (64, 8, 512)) if args.tiny else (SWEEPS, MAIN)
    plans = {"main": [(name, size) for name in args.only or METHODS]}
    for sweep, sizes in sweeps.items():
        plans[sweep] = [(name, size) for name in args.only or CURVES for size in sizes]
    for part, plan in plans.items():
        if args.part in ("all", part):
            rows = [apart(name, size, args.threads) for name, size in plan]
            words = {name: METHODS[name].words for name, _ in plan}
            figures = {"words": words, "budget_megabytes": 128 * 2**20 / 1e6, "rows": rows}
            print(f"written to {write_result(f'linear_peaks_{part}', figures, args.out, PACKAGES)}")


if __name__ == "__main__":
    main()
