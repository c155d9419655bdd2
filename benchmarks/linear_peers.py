"""Time of the exact KL and its gradient, compared with other packages and with naive methods.

    python benchmarks/linear_peers.py                    # ten minutes on two cores
    python benchmarks/linear_peers.py --shape v152k --rounds 2 --only matmuls kleash "kleash compiled" liger
    RESULTS=/tmp/results python benchmarks/linear_peers.py --shape tiny

Forward and backward pass: gradients for the hidden states and the head of p, a mean over the tokens. The methods are
those of linear_methods.py. A first call of each method is a warm-up and a check: its value is compared with kleash's
token statistics, its gradient with kleash's (if it computes a KL). In each of the following rounds every method runs
once. Written are medians of ratios within rounds: of each method to the four bare matmuls that any such gradient needs,
and of kleash to each method. "matmuls by kleash's product" are the same four matmuls by its product
function, which takes oneDNN where that is faster.
Run nothing else on the machine meanwhile.
"""

from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from harness import interleaved, parser_of, ratio, write_result
from linear_methods import (
    METHODS,
    OTHER_LOSSES,
    PACKAGES,
    Inputs,
    bare,
    bare_by_kleash,
    cosine,
    expected,
    gradients,
    make_inputs,
)

BARE: dict[str, Callable[[Inputs], Callable[[], Any]]] = {
    "matmuls": bare,
    "matmuls by kleash's product": bare_by_kleash,
}
ALL = (*BARE, *METHODS)
SHAPES = {"main": (2048, 1024, 32_768), "v152k": (1024, 1024, 151_936), "tiny": (48, 32, 512)}
"""Tokens, hidden size and vocabulary."""
OURS = ("kleash", "kleash compiled")


def check_methods(names: list[str], x: Inputs) -> dict[str, dict[str, float]]:
    """Run each method once: its value, relative error, and gradient cosines with the first KL."""
    right, first = expected(x), None
    checks: dict[str, dict[str, float]] = {}
    for name in names:
        loss = METHODS[name](x)
        grads = gradients(x, loss)
        value = loss.item()
        error = value / right[OTHER_LOSSES.get(name, "kl")] - 1
        checks[name] = {"value": value, "relative_error": error}
        assert abs(error) < 1e-3, (name, value, right)
        if name not in OTHER_LOSSES:
            first = first or grads
            same = [cosine(a, b) for a, b in zip(grads, first, strict=True)]
            checks[name] |= {"cosine_hidden": same[0], "cosine_weight": same[1]}
            assert min(same) > 0.999, (name, same)
    return checks


def make_jobs(names: list[str], x: Inputs) -> dict[str, Callable[[], Any]]:
    """Forward and backward passes by method; the gradients are discarded."""
    runs: dict[str, Callable[[], Any]] = {}
    for name in names:
        runs[name] = BARE[name](x) if name in BARE else lambda of=METHODS[name]: gradients(x, of(x))
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


def main() -> None:
    parser = parser_of(__doc__, rounds=3, threads=2)
    parser.add_argument("--shape", choices=SHAPES, default="main")
    parser.add_argument("--only", nargs="*", choices=ALL, default=list(ALL), help="what to run")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    size = SHAPES[args.shape]
    x = make_inputs(*size)
    checks = check_methods([name for name in args.only if name in METHODS], x)
    for name in set(args.only) & set(BARE):
        BARE[name](x)()
    times, loads = interleaved(make_jobs(args.only, x), args.rounds)
    results = compare_times(times)
    for name, row in results.items():
        print(f"{name:16}", row)
    figures = {
        **dict(zip(("shape", "tokens", "hidden", "vocabulary"), (args.shape, *size), strict=True)),
        "load": loads,
        "results": results,
        "checks": checks,
        "all_seconds": times,
    }
    print(f"written to {write_result(f'linear_peers_{args.shape}', figures, packages=PACKAGES)}")


if __name__ == "__main__":
    main()
