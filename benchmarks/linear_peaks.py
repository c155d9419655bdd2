"""Peak memory of each method for the exact KL and its gradient, and how it grows with tokens and vocabulary.

    python benchmarks/linear_peaks.py
    python benchmarks/linear_peaks.py --part tokens
    python benchmarks/linear_peaks.py --part main --only kleash liger

Each figure is measured in a separate process: the peak of resident memory during a call, less the resident memory
before it and less the gradients that the call returns. A call of the same size precedes it as a warm-up (after it, a
method that compiles has compiled), and free memory is returned to the system in between. "main" runs all methods at
2048 tokens, hidden size 1024 and a vocabulary of 32 768; "tokens" and "vocabulary" vary one size at a time, with small
hidden states.
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


def measure_peak(name: str, size: tuple[int, int, int]) -> dict[str, float]:
    """The peak memory of one method in this process, and the size of its gradients, in MB of a million bytes."""
    x, method = make_inputs(*size), METHODS[name]
    gradients(x, method.compute_loss(x))
    ctypes.CDLL(None).malloc_trim(0)
    results: list[Any] = []
    peak = peak_of(lambda: results.append(gradients(x, method.compute_loss(x))))
    gradient_megabytes = sum(grad.numel() * grad.element_size() for grad in results[0]) / 1e6
    return {
        "extra_megabytes": round(peak - gradient_megabytes, 1),
        "gradient_megabytes": round(gradient_megabytes, 1),
    }


def measure_in_subprocess(name: str, size: tuple[int, int, int], threads: int) -> dict[str, Any]:
    """The same, measured in a separate process."""
    command = [sys.executable, __file__, "--one", name, "--threads", str(threads)]
    command += ["--size", *(str(number) for number in size)]
    completed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    tokens, hidden, vocabulary = size
    row = {"name": name, "tokens": tokens, "hidden": hidden, "vocabulary": vocabulary}
    row |= json.loads(completed.stdout.splitlines()[-1])
    print("{name:16} {tokens:6} x {hidden} x {vocabulary:6} {extra_megabytes:8.0f} MB".format(**row))
    return row


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=["all", "main", *SWEEPS], default="all")
    parser.add_argument("--only", nargs="*", choices=METHODS, help="methods to measure; default: all")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, for a test of the script")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    parser.add_argument("--one", choices=METHODS, help="measure this method in this process only")
    parser.add_argument("--size", type=int, nargs=3, default=MAIN, help="for --one")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    if args.one:
        print(json.dumps(measure_peak(args.one, tuple(args.size))))
        return
    sweeps, size = (TINY, (64, 8, 512)) if args.tiny else (SWEEPS, MAIN)
    plans = {"main": [(name, size) for name in args.only or METHODS]}
    for sweep, sizes in sweeps.items():
        plans[sweep] = [(name, size) for name in args.only or CURVES for size in sizes]
    for part, plan in plans.items():
        if args.part in ("all", part):
            rows = [measure_in_subprocess(name, size, args.threads) for name, size in plan]
            words = {name: METHODS[name].words for name, _ in plan}
            figures = {"words": words, "budget_megabytes": 128 * 2**20 / 1e6, "rows": rows}
            print(f"written to {write_result(f'linear_peaks_{part}', figures, args.out, PACKAGES)}")


if __name__ == "__main__":
    main()
