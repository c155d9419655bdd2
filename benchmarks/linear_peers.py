"""Time of the exact KL and its gradient, compared with other packages and with naive methods.

    python benchmarks/linear_peers.py
    python benchmarks/linear_peers.py --dtype bfloat16 --rounds 3
    python benchmarks/linear_peers.py --shape n1k --only matmuls kleash liger --out /tmp/results
    python benchmarks/linear_peers.py --shape n4k_v152k --minutes 5
    python benchmarks/linear_peers.py --shape n4k_v152k --dtype bfloat16 --device cuda

Forward and backward pass: gradients for the hidden states and the head of p, a mean over the tokens. The methods are
those of linear_methods.py. A first call of each method is a warm-up and a check: its value is compared with kleash's
token statistics, its gradient with kleash's (if it computes a KL). In each of the following rounds every method runs
once. Written are medians of ratios within rounds: of each method to the four bare matmuls that any such gradient needs,
and of kleash to each method. "matmuls by kleash's product" are the same four matmuls by its product
function, which takes oneDNN where that is faster.
Run nothing else on the machine meanwhile.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from harness import RESULTS, interleaved, parser_of, ratio, write_result
from linear_methods import (
    METHODS,
    PACKAGES,
    Inputs,
    bare,
    bare_by_kleash,
    cosine,
    expected,
    gradients,
    make_inputs,
)

BARE: dict[str, Callable[[Inputs], Callable[[], Any]]] = {"matmuls": bare}
BARE["matmuls by kleash's product"] = bare_by_kleash
MATMULS = tuple(BARE)
ALL = (*BARE, *METHODS)
MOST = (*MATMULS, "kleash", "kleash compiled", "trl", "liger", "naive exact", "naive k3")
LARGE = ("matmuls", "kleash compiled", "liger", "naive k3")
FITTING = ("matmuls", "kleash compiled", "liger")


class Shape(NamedTuple):
    """The size of the inputs, and the methods that run on them."""

    tokens: int
    hidden: int
    vocabulary: int
    names: tuple[str, ...]
    """The methods of each round."""
    rounds: int


SHAPES: dict[str, Shape] = {
    "main": Shape(2048, 1024, 32_768, ALL, 9),
    "n1k": Shape(1024, 1024, 32_768, MOST, 7),
    "v152k": Shape(1024, 1024, 151_936, LARGE, 7),
    "n4k_v152k": Shape(4096, 1024, 151_936, FITTING, 7),
    "tiny": Shape(48, 32, 512, ALL, 2),
}
"""Minutes on two cores with 160 GFLOP/s between them: 10 for main, 4 in bfloat16, 2 for n1k, 3 to 6 for v152k, 12 to 25
for n4k_v152k."""
OURS = ("kleash", "kleash compiled")


def check_methods(names: list[str], x: Inputs) -> dict[str, dict[str, float]]:
    """Run each method once: its value, relative error, and gradient cosines with the first KL."""
    right, first = expected(x), None
    full = x.hidden_p.dtype == torch.float32
    checks: dict[str, dict[str, float]] = {}
    for name in names:
        method = METHODS[name]
        loss = method.compute_loss(x)
        grads = gradients(x, loss)
        value = loss.item()
        error = value / right[method.what] - 1
        checks[name] = {"value": value, "relative_error": error}
        assert abs(error) < (1e-3 if full else 5e-2), (name, value, right)
        if method.what == "kl":
            first = first or grads
            same = [cosine(a, b) for a, b in zip(grads, first, strict=True)]
            checks[name] |= {"cosine_hidden": same[0], "cosine_weight": same[1]}
            assert min(same) > (0.999 if full else 0.95), (name, same)
    return checks


def make_jobs(names: tuple[str, ...], x: Inputs) -> dict[str, Callable[[], Any]]:
    """Forward and backward passes by method; the gradients are discarded."""
    runs: dict[str, Callable[[], Any]] = {}
    for name in names:
        runs[name] = (
            BARE[name](x) if name in BARE else lambda m=METHODS[name]: gradients(x, m.compute_loss(x))
        )
    return runs


def compare_times(times: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """For each method its median seconds, its ratio to the matmuls, and the ratio of kleash to it."""
    rows: dict[str, dict[str, float]] = {}
    for name, seconds in times.items():
        rows[name] = {"seconds": round(median(seconds), 6)}
        if "matmuls" in times:
            rows[name]["of_matmuls"] = ratio(seconds, times["matmuls"])
        for ours in OURS:
            if ours in times and ours != name:
                rows[name][f"{ours} of it"] = ratio(times[ours], seconds)
    return rows


def synchronised_clock() -> float:
    """Seconds, when the GPU has done all that it was given."""
    torch.cuda.synchronize()
    return perf_counter()


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="main")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--only", nargs="*", choices=ALL, help="what to run; default: the list of the shape")
    parser.add_argument("--rounds", type=int, help="rounds that are timed; default: the number of the shape")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="start no round that would end after this time"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    torch.set_default_device(args.device)
    *size, names, rounds = SHAPES[args.shape]
    parts = ["linear_peers", args.shape, args.dtype, args.device]
    name = "_".join(part for part in parts if part not in ("float32", "cpu"))
    if args.dtype == "bfloat16":  # torch's own documentation: 20 to 50 times slower on a CPU
        names = tuple(name for name in names if name not in ("cross entropy", "matmuls by kleash's product"))
    names = tuple(way for way in ALL if way in (args.only or names))
    x = make_inputs(*size, dtype=getattr(torch, args.dtype))
    checks = check_methods([way for way in names if way in METHODS], x)
    for way in set(names) & set(BARE):
        BARE[way](x)()
    clock = perf_counter if args.device == "cpu" else synchronised_clock
    times, loads = interleaved(make_jobs(names, x), args.rounds or rounds, args.minutes, clock)
    results = compare_times(times)
    for way, row in results.items():
        print(f"{way:16}", row)
    figures = {
        "shape": args.shape,
        **dict(zip(("tokens", "hidden", "vocabulary"), size, strict=True)),
        "dtype": args.dtype,
        "rounds": len(loads),
        "load": loads,
        "words": {way: METHODS[way].words for way in names if way in METHODS},
        "results": results,
        "checks": checks,
        "all_seconds": times,
    }
    print(f"written to {write_result(name, figures, args.out, PACKAGES)}")


if __name__ == "__main__":
    main()
