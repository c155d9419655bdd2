"""Seconds of exact KL and its gradient beside other packages' and the naive ways, on a CPU.

    python benchmarks/linear_peers.py
    python benchmarks/linear_peers.py --shape h4096
    python benchmarks/linear_peers.py --dtype bfloat16 --rounds 3
    python benchmarks/linear_peers.py --shape n1k --only matmuls kleash liger --out /tmp/results

Forward and backward pass: gradients for the hidden states and the head of p, a mean over the tokens; the ways
are those of linear_methods.py. A first call of each warms up and is checked: its value against kleash's token
statistics, its gradient against that of kleash (where it is a KL). Then come rounds in which every way runs
once; written are medians of the rounds' ratios: to the four bare matmuls that any such gradient needs, and of
ours to the others. "matmuls by oneDNN" are the same four by the library that kleash takes where it is the faster
one; "peak" is their arithmetic at the rate of the processor, with nothing read from memory.
Leave the machine alone meanwhile.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from harness import RESULTS, interleaved, ratio, write_result
from linear_methods import (
    METHODS,
    PACKAGES,
    Inputs,
    at_peak,
    bare,
    bare_by_onednn,
    cosine,
    expected,
    gradients,
    make_inputs,
)

from kleash.linear.impl import onednn

BARE: dict[str, Callable[[Inputs], Callable[[], Any]]] = {"matmuls": bare}
if onednn.faster_here():
    BARE["matmuls by oneDNN"] = bare_by_onednn
MATMULS = tuple(BARE)
BARE["peak"] = at_peak
ALL = (*BARE, *METHODS)
MOST = (*MATMULS, "kleash", "kleash compiled", "trl", "liger", "naive exact", "naive k3")
SOME = (*MATMULS, "kleash", "kleash compiled", "trl", "liger", "naive k3")
FEW = (*MATMULS, "kleash", "kleash compiled", "naive k3")
SHAPES: dict[str, tuple[tuple[int, int, int], tuple[str, ...], int]] = {
    "main": ((2048, 1024, 32_768), ALL, 9),
    "h4096": ((1024, 4096, 32_768), SOME, 2),
    "v128k": ((1024, 1024, 128_256), SOME, 2),
    "v152k": ((1024, 1024, 151_936), SOME, 2),
    "n1k": ((1024, 1024, 32_768), MOST, 3),
    "n8k": ((8192, 1024, 32_768), FEW, 2),
    "tiny": ((48, 32, 512), ALL, 2),
}
"""Tokens, hidden size and vocabulary; what is run there, and how often. Minutes on two cores with 160 GFLOP/s
between them: 10 for main, 4 in bfloat16, 2 for n1k, 3 for each of the others."""
OURS = ("kleash", "kleash compiled")


def checked(names: list[str], x: Inputs) -> dict[str, dict[str, float]]:
    """Run each once; its value, how far it is from the right one, and its gradients' cosines with the first KL's."""
    right, first = expected(x), None
    full = x.hidden_p.dtype == torch.float32
    found: dict[str, dict[str, float]] = {}
    for name in names:
        method = METHODS[name]
        loss = method.of(x)
        grads = gradients(x, loss)
        value = loss.item()
        error = value / right[method.what] - 1
        found[name] = {"value": value, "relative_error": error}
        assert abs(error) < (1e-3 if full else 5e-2), (name, value, right)
        if method.what == "kl":
            first = first or grads
            same = [cosine(a, b) for a, b in zip(grads, first, strict=True)]
            found[name] |= {"cosine_hidden": same[0], "cosine_weight": same[1]}
            assert min(same) > (0.999 if full else 0.95), (name, same)
    return found


def jobs(names: tuple[str, ...], x: Inputs) -> dict[str, Callable[[], Any]]:
    """Name -> forward and backward pass, the gradients dropped."""
    found: dict[str, Callable[[], Any]] = {}
    for name in names:
        found[name] = BARE[name](x) if name in BARE else lambda m=METHODS[name]: gradients(x, m.of(x))
    return found


def compared(times: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Of every way, its ratio to the matmuls, and ours to it."""
    found: dict[str, dict[str, float]] = {}
    for name, own in times.items():
        found[name] = {"seconds": round(median(own), 6)}
        if "matmuls" in times:
            found[name]["of_matmuls"] = ratio(own, times["matmuls"])
        for ours in OURS:
            if ours in times and ours != name:
                found[name][f"{ours} of it"] = ratio(times[ours], own)
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="main")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument(
        "--only", nargs="*", choices=ALL, help="what to run; the shape's own list if left out"
    )
    parser.add_argument("--rounds", type=int, help="rounds that count; the shape's own number if left out")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="start no round that would end later"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    size, names, rounds = SHAPES[args.shape]
    if args.dtype == "bfloat16":  # torch's own documentation: 20 to 50 times slower on a CPU
        names = tuple(name for name in names if name not in ("cross entropy", "matmuls by oneDNN", "peak"))
    names = tuple(name for name in ALL if name in (args.only or names))
    x = make_inputs(*size, dtype=getattr(torch, args.dtype))
    checks = checked([name for name in names if name in METHODS], x)
    work = jobs(names, x)
    for name in BARE:
        work.get(name, lambda: None)()
    times, loads = interleaved(work, args.rounds or rounds, args.minutes)
    found = compared(times)
    for name, row in found.items():
        print(f"{name:16}", row)
    figures = {
        "shape": args.shape,
        **dict(zip(("tokens", "hidden", "vocabulary"), size, strict=True)),
        "dtype": args.dtype,
        "rounds": len(loads),
        "load": loads,
        "words": {name: METHODS[name].words for name in names if name in METHODS},
        "results": found,
        "checks": checks,
        "all_seconds": times,
    }
    name = "_".join(["linear_peers", args.shape] + ["bfloat16"] * (args.dtype == "bfloat16"))
    print(f"written to {write_result(name, figures, args.out, PACKAGES)}")


if __name__ == "__main__":
    main()
