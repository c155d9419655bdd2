"""What the gradient of the exact KL costs, beside the matmuls, the one-sample estimate and the naive way.

    python benchmarks/linear_training.py
    python benchmarks/linear_training.py --tokens 512 --rounds 3 --no-compile

Forward and backward pass: gradients for the hidden states and the head of p, a mean over the tokens.
Interleaved after a warm-up: in each round every candidate runs once and is compared with others of that
round; printed and written are the medians of those ratios. ``matmuls`` are the four that any such gradient
needs, bare, in chunks of 512 tokens into buffers that exist. ``k3`` is the same engine with the one-sample
estimate in place of the exact KL; compiled, its elementwise work is k3_rows.c. linear_peers.py compares with
the packages, linear_peaks.py takes the memory.
"""

import argparse
import ctypes
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from harness import RESULTS, interleaved, ratio, write_result
from linear_methods import Inputs, bare, built, kleash, make_inputs, naive_exact, naive_k3
from torch import Tensor

from kleash.divergences import phi
from kleash.linear import LinearOptions, linear_kl
from kleash.linear.checks import checked_pair
from kleash.linear.impl.gradient import both_sums
from kleash.linear.impl.kl_fast import NUM_BUFFERS
from kleash.linear.impl.loop import Chunk, blocks, chunks, plan
from kleash.linear.impl.pair import HeadPair
from kleash.linear.impl.project import multiply_
from kleash.linear.impl.row_statistics import side

BESIDE = {
    "exact eager": ("matmuls", "k3 eager", "naive exact", "naive k3"),
    "exact compiled": ("matmuls", "k3 compiled", "naive exact", "naive k3"),
    "exact recomputed": ("matmuls", "k3 recomputed"),
    "exact recomputed, compiled": ("matmuls", "k3 recomputed"),
    "k3 eager": ("matmuls",),
    "k3 compiled": ("matmuls",),
    "naive exact": ("matmuls",),
    "naive k3": ("matmuls",),
    "exact bf16": ("exact eager",),
    "exact bf16, compiled": ("exact compiled",),
}
P_ONLY = (True, True, False, False, False, False)


def pair(x: Inputs) -> HeadPair:
    return checked_pair(x.models[:2], x.models[2:], 1.0)


@torch.no_grad()
def k3_values(x: Inputs) -> Tensor:
    """Of each token, the derivative of k3 in its log-probability under p: the value pass of the recomputed k3."""
    both, slopes = pair(x), torch.empty(len(x.ids))
    cut = plan(both, LinearOptions(), NUM_BUFFERS)
    room = torch.empty(2, cut.rows, both.p.vocabulary)
    for chunk in chunks(both, cut):
        for here in blocks(chunk, cut.rows):
            slopes[chunk.where][here] = k3_rows(chunk, here, x, room)[1]
    return slopes


def k3_rows(chunk, here: slice, x: Inputs, room: Tensor):
    column = x.ids[chunk.where][here][:, None]
    sides = []
    for z, out in ((chunk.zp[here], room[0]), (chunk.zq[here], room[1])):
        one = side(z, out[: len(z)])
        sides.append((one, z.gather(-1, column) - one.top - one.total.log()))
    log_ratio = sides[0][1] - sides[1][1]
    assert phi(log_ratio).min() >= 0
    return sides[0][0], -torch.expm1(-log_ratio)[:, 0], column


@torch.no_grad()
def k3_at_once(x: Inputs, slopes: Tensor | None = None) -> None:
    """k3 and its gradient, formed while the logits are there; given the slopes, p's logits alone are enough."""
    both = pair(x)
    cut = plan(both, LinearOptions(), NUM_BUFFERS)
    room = torch.empty(2, cut.rows, both.p.vocabulary)
    sums, _ = both_sums(both, P_ONLY)
    for chunk in p_chunks(x, cut) if slopes is not None else chunks(both, cut):
        for here in blocks(chunk, cut.rows):
            if slopes is None:
                one, slope, column = k3_rows(chunk, here, x, room)
            else:
                z, column = chunk.zp[here], x.ids[chunk.where][here][:, None]
                one, slope = side(z, room[0, : len(z)]), slopes[chunk.where][here]
            c = slope[:, None] / len(x.ids)
            torch.mul(one.mass, -c / one.total, out=chunk.zp[here])
            chunk.zp[here].scatter_add_(-1, column, c)
        sums.add(chunk.where, chunk.zp, chunk.pair.p.hidden, cut.tile)
    x.hidden_p.grad, x.weight_p.grad = sums.done[:2]


@torch.no_grad()
def k3_compiled(x: Inputs, library: ctypes.CDLL) -> Tensor:
    """k3 and its gradient, the elementwise work in C; returns each token's k3."""
    both, found = pair(x), torch.empty(len(x.ids))
    cut = plan(both, LinearOptions(), 0, native=True)
    room = torch.empty(cut.threads, both.p.vocabulary)
    weights = torch.full((len(x.ids),), 1 / len(x.ids))
    sums, _ = both_sums(both, P_ONLY)
    for chunk in chunks(both, cut):
        for here in blocks(chunk, cut.rows):
            zp, zq = chunk.zp[here], chunk.zq[here]
            rows, *given = (y[chunk.where][here] for y in (found, x.ids, weights))
            sizes = (ctypes.c_int64(n) for n in zp.shape)
            threads = ctypes.c_int64(cut.threads)
            pointers = [ctypes.c_void_p(y.data_ptr()) for y in (zp, zq, room, *given, rows)]
            library.k3_gradient(*pointers[:2], *sizes, pointers[2], threads, *pointers[3:])
        sums.add(chunk.where, chunk.zp, chunk.pair.p.hidden, cut.tile)
    x.hidden_p.grad, x.weight_p.grad = sums.done[:2]
    return found


def p_chunks(x: Inputs, cut):
    """Chunks in which q's logits are not computed."""
    room = torch.empty(cut.chunk, len(x.weight_p))
    tiny = torch.zeros(cut.chunk, 1)
    for start in range(0, len(x.ids), cut.chunk):
        where = slice(start, min(start + cut.chunk, len(x.ids)))
        here = pair(x).at(where)
        z = room[: where.stop - start]
        multiply_(z, here.p, here.p.hidden, cut.tile)
        yield Chunk(where, here, z, tiny[: len(z)], False)


def candidates(args: argparse.Namespace, tokens: int) -> dict[str, Callable[[], None]]:
    """Name -> forward and backward pass."""
    x = make_inputs(tokens, args.hidden, args.vocabulary)
    thin = x.to(torch.bfloat16)

    def exact(of: Inputs, choice: str) -> Callable[[], None]:
        options = LinearOptions(compile=choice)
        return lambda: kleash(of, options).backward()

    eager = LinearOptions(compile="never")
    found: dict[str, Callable[[], Any]] = {
        "matmuls": bare(x),
        "exact eager": exact(x, "never"),
        "k3 eager": lambda: k3_at_once(x),
        "exact recomputed": lambda: linear_kl(*x.models, options=eager).mean().backward(),
        "k3 recomputed": lambda: k3_at_once(x, k3_values(x)),
        "naive exact": lambda: naive_exact(x).backward(),
        "naive k3": lambda: naive_k3(x).backward(),
        "exact bf16": exact(thin, "never"),
    }
    if args.compile:
        library = built("k3_rows.c")
        found["exact compiled"] = exact(x, "always")
        found["exact bf16, compiled"] = exact(thin, "always")
        found["k3 compiled"] = lambda: k3_compiled(x, library)
        found["exact recomputed, compiled"] = lambda: linear_kl(*x.models).mean().backward()

    def clean(run: Callable[[], Any]) -> Callable[[], None]:
        def both() -> None:
            x.forget()
            thin.forget()
            run()

        return both

    return {name: clean(run) for name, run in found.items()}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=32_768)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clock", default="wall", choices=["wall", "cpu"])
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--only", nargs="*", help="candidates to run; all if left out")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    clock = time.perf_counter if args.clock == "wall" else time.process_time
    found = candidates(args, args.tokens)
    found = {name: run for name, run in found.items() if not args.only or name in args.only}
    for run in found.values():
        run()
    times, loads = interleaved(found, args.rounds, clock=clock)
    ratios = {
        name: {rival: ratio(times[name], times[rival]) for rival in rivals if rival in times}
        for name, rivals in BESIDE.items()
        if name in times
    }
    for name, seconds in times.items():
        print(f"{name:18} {median(seconds):7.2f} s  {ratios.get(name, '')}")
    figures = {name: value for name, value in vars(args).items() if name != "out"}
    figures |= {"load": loads, "seconds": times, "ratios": ratios}
    usual = (args.tokens, args.vocabulary, args.hidden, args.clock) == (2048, 32_768, 1024, "wall")
    name = "linear_training" if usual else "linear_training_small"
    print(f"written to {write_result(name, figures, args.out)}")


if __name__ == "__main__":
    main()
