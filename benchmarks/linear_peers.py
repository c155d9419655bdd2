"""Seconds of exact KL and its gradient beside other packages' and the naive ways, on a CPU.

    python benchmarks/linear_peers.py
    python benchmarks/linear_peers.py --shape h4096
    python benchmarks/linear_peers.py --dtype bfloat16 --rounds 3
    python benchmarks/linear_peers.py --shape n1k --only matmuls kleash liger --out /tmp/results
    python benchmarks/linear_peers.py --shape n4k_v262k --minutes 5
    python benchmarks/linear_peers.py --shape n4k_v262k --minutes 5 --resume

Forward and backward pass: gradients for the hidden states and the head of p, a mean over the tokens; the ways
are those of linear_methods.py. A first call of each warms up and is checked: its value against kleash's token
statistics, its gradient against that of kleash (where it is a KL). Then come rounds in which every way runs
once; written are medians of the rounds' ratios: to the four bare matmuls that any such gradient needs, and of
ours to the others. "matmuls by oneDNN" are the same four by the library that kleash takes where it is the faster
one; "peak" is their arithmetic at the rate of the processor, with nothing read from memory.
``--resume`` adds rounds to the result of the same commit until there are enough of them.
Leave the machine alone meanwhile.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from harness import RESULTS, circumstances, interleaved, ratio, write_result
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
LARGE = ("matmuls", "kleash compiled", "liger", "naive k3")
FITTING = ("matmuls", "kleash compiled", "liger")


class Shape(NamedTuple):
    """The size of the inputs, and what is run on them."""

    tokens: int
    hidden: int
    vocabulary: int
    names: tuple[str, ...]
    """What is run in each round."""
    rounds: int
    once: tuple[str, ...] = ()
    """What is run and timed in the first calls only: peers that are far from the fastest."""
    left_out: str = ""
    """Which peers do not run, and why."""


TOO_LARGE = (
    "The naive ways and torchtune-style chunks, which hold more than 10 GB, and TRL, which takes more than twice the "
    "fastest peer's time at 1024 tokens, are left out."
)
SHAPES: dict[str, Shape] = {
    "main": Shape(2048, 1024, 32_768, ALL, 9),
    "h4096": Shape(1024, 4096, 32_768, SOME, 2),
    "n8k": Shape(8192, 1024, 32_768, FEW, 2),
    "n1k": Shape(1024, 1024, 32_768, MOST, 7),
    "v128k": Shape(1024, 1024, 128_256, LARGE, 7, ("kleash", "trl", "naive exact")),
    "v152k": Shape(1024, 1024, 151_936, LARGE, 7, ("kleash", "trl", "naive exact")),
    "v262k": Shape(1024, 1024, 262_144, LARGE, 7, ("kleash", "trl", "naive exact")),
    "n4k": Shape(4096, 1024, 32_768, LARGE, 7, ("kleash", "trl", "naive exact")),
    "n4k_v128k": Shape(4096, 1024, 128_256, FITTING, 7, (), TOO_LARGE),
    "n4k_v152k": Shape(4096, 1024, 151_936, FITTING, 7, (), TOO_LARGE),
    "n4k_v262k": Shape(4096, 1024, 262_144, FITTING, 7, (), TOO_LARGE),
    "tiny": Shape(48, 32, 512, ALL, 2),
}
"""Minutes on two cores with 160 GFLOP/s between them: 10 for main, 4 in bfloat16, 2 for n1k, 3 to 6 for the other
shapes of 1024 tokens and n4k, 12 to 25 for the larger ones of 4096 tokens."""
WARM_TOKENS = 1024
OURS = ("kleash", "kleash compiled")


def checked(names: list[str], x: Inputs) -> dict[str, dict[str, float]]:
    """Run each once; its value, how far it is from the right one, and its gradients' cosines with the first KL's."""
    right, first = expected(x), None
    full = x.hidden_p.dtype == torch.float32
    found: dict[str, dict[str, float]] = {}
    for name in names:
        method = METHODS[name]
        start = perf_counter()
        loss = method.of(x)
        grads = gradients(x, loss)
        seconds = perf_counter() - start
        value = loss.item()
        error = value / right[method.what] - 1
        found[name] = {"value": value, "relative_error": error, "seconds_of_first_call": round(seconds, 3)}
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


def earlier(path: Path) -> dict[str, Any]:
    """The figures of a result of this commit and these packages.

    Raises:
        ValueError: if another commit or other packages made it.
    """
    result, here = json.loads(path.read_text()), circumstances(PACKAGES)
    for key in ("commit", "versions"):
        if result[key] != here[key]:
            raise ValueError(f"{path} is of {key} {result[key]}, not {here[key]}; measure it anew")
    return result["figures"]


def warm_up(names: tuple[str, ...], x: Inputs) -> None:
    """A first call of each, for as many tokens as a peer takes at once."""
    few = replace(x, hidden_p=x.hidden_p.detach()[:WARM_TOKENS].requires_grad_(), hidden_q=x.hidden_q[:WARM_TOKENS],
                  ids=x.ids[:WARM_TOKENS])  # fmt: skip
    for job in jobs(names, few).values():
        job()


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
    parser.add_argument("--resume", action="store_true", help="add rounds to the result that is there")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    shape = SHAPES[args.shape]
    *size, names, rounds, once, left_out = shape
    name = "_".join(["linear_peers", args.shape] + ["bfloat16"] * (args.dtype == "bfloat16"))
    if args.dtype == "bfloat16":  # torch's own documentation: 20 to 50 times slower on a CPU
        names = tuple(name for name in names if name not in ("cross entropy", "matmuls by oneDNN", "peak"))
    names = tuple(way for way in ALL if way in (args.only or names))
    x = make_inputs(*size, dtype=getattr(torch, args.dtype))
    before = earlier(args.out / f"{name}.json") if args.resume else None
    if before is None:
        tried = names if args.only else (*names, *once)
        checks = checked([way for way in tried if way in METHODS], x)
        for way in set(names) & set(BARE):
            BARE[way](x)()
    else:
        names, checks = tuple(before["all_seconds"]), before["checks"]
        warm_up(names, x)
    left = (args.rounds or rounds) - (before["rounds"] if before else 0)
    if left <= 0:
        print(f"there are {before['rounds'] if before else 0} rounds already")
        return
    times, loads = interleaved(jobs(names, x), left, args.minutes)
    if before is not None:
        times = {way: before["all_seconds"][way] + seconds for way, seconds in times.items()}
        loads = before["load"] + loads
    found = compared(times)
    for way, row in found.items():
        print(f"{way:16}", row)
    for way in once:
        if way in checks:
            print(f"{way:16}", "once:", checks[way]["seconds_of_first_call"], "s")
    figures = {
        "shape": args.shape,
        **dict(zip(("tokens", "hidden", "vocabulary"), size, strict=True)),
        "dtype": args.dtype,
        "rounds": len(loads),
        "load": loads,
        "words": {way: METHODS[way].words for way in names if way in METHODS},
        "once": {way: METHODS[way].words for way in once if way in checks},
        "left_out": left_out,
        "results": found,
        "checks": checks,
        "all_seconds": times,
    }
    print(f"written to {write_result(name, figures, args.out, PACKAGES)}")


if __name__ == "__main__":
    main()
