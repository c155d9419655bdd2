"""Time of the gradient of the exact KL, compared with the matmuls, the one-sample estimate and naive code.

    python benchmarks/linear_training.py
    python benchmarks/linear_training.py --tokens 512 --rounds 3 --no-compile

Forward and backward pass: gradients for the hidden states and the head of p, a mean over the tokens. Runs are
interleaved after a warm-up: in each round every candidate runs once, and its time is divided by those of others in the
same round. The medians of these ratios are printed and written. ``matmuls`` are the four that any such gradient needs,
in chunks of 512 tokens and into preallocated buffers. ``k3`` is the same engine with the one-sample estimate instead of
the exact KL; its compiled elementwise work is k3_rows.c. linear_peers.py compares with other packages, linear_peaks.py
measures memory.
"""

import argparse
import ctypes
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from harness import RESULTS, interleaved, ratio, write_result
from linear_methods import Inputs, bare, build_library, kleash, make_inputs, naive_exact, naive_k3
from torch import Tensor

from kleash.divergences import phi
from kleash.linear import LinearOptions, linear_kl
from kleash.linear.checks import checked_pair
from kleash.linear.impl.base import HeadPair, per_tensor
from kleash.linear.impl.chunk_loop import Chunk, ChunkPlan, chunks, logit_blocks, plan_chunks
from kleash.linear.impl.kl_fast import NUM_BUFFERS
from kleash.linear.impl.project import multiply_
from kleash.linear.impl.row_statistics import softmax_sums
from kleash.linear.impl.sums import new_gradient_sums

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
P_ONLY = per_tensor([True, True, False, False, False, False])


def pair(x: Inputs) -> HeadPair:
    return checked_pair(x.models[:2], x.models[2:], 1.0)


@torch.no_grad()
def k3_values(x: Inputs) -> Tensor:
    """The derivative of k3 in log p of each token: the value pass of the recomputed k3."""
    both, slopes = pair(x), torch.empty(len(x.ids))
    plan = plan_chunks(both, LinearOptions(), NUM_BUFFERS)
    buffers = torch.empty(2, plan.block_rows, both.local_vocab_size)
    for chunk in chunks(both, plan):
        for rows in logit_blocks(chunk, plan.block_rows):
            slopes[chunk.positions][rows] = k3_rows(chunk, rows, x, buffers)[1]
    return slopes


def k3_rows(chunk, rows: slice, x: Inputs, buffers: Tensor):
    column = x.ids[chunk.positions][rows][:, None]
    sides = []
    for z, out in ((chunk.zp[rows], buffers[0]), (chunk.zq[rows], buffers[1])):
        part = softmax_sums(z, out[: len(z)])
        sides.append((part, z.gather(-1, column) - part.top - part.total.log()))
    log_ratio = sides[0][1] - sides[1][1]
    assert phi(log_ratio).min() >= 0
    return sides[0][0], -torch.expm1(-log_ratio)[:, 0], column


@torch.no_grad()
def k3_at_once(x: Inputs, slopes: Tensor | None = None) -> None:
    """k3 and its gradient from logits that are computed once; with the slopes known, p's logits suffice."""
    both = pair(x)
    plan = plan_chunks(both, LinearOptions(), NUM_BUFFERS)
    buffers = torch.empty(2, plan.block_rows, both.local_vocab_size)
    sums, _ = new_gradient_sums(both, P_ONLY)
    for chunk in p_chunks(x, plan) if slopes is not None else chunks(both, plan):
        for rows in logit_blocks(chunk, plan.block_rows):
            if slopes is None:
                p_side, slope, column = k3_rows(chunk, rows, x, buffers)
            else:
                z, column = chunk.zp[rows], x.ids[chunk.positions][rows][:, None]
                p_side, slope = softmax_sums(z, buffers[0, : len(z)]), slopes[chunk.positions][rows]
            c = slope[:, None] / len(x.ids)
            torch.mul(p_side.mass, -c / p_side.total, out=chunk.zp[rows])
            chunk.zp[rows].scatter_add_(-1, column, c)
        sums.add(chunk.positions, chunk.zp, chunk.pair.p.hidden, plan.tile_rows)
    x.hidden_p.grad, x.weight_p.grad = sums.gradients.hidden, sums.gradients.weight


@torch.no_grad()
def k3_compiled(x: Inputs, library: ctypes.CDLL) -> Tensor:
    """k3 of each token; its gradient is stored in the inputs. The elementwise work is done in C."""
    both, values = pair(x), torch.empty(len(x.ids))
    plan = plan_chunks(both, LinearOptions(), 0, native=True)
    buffers = torch.empty(plan.threads, both.local_vocab_size)
    weights = torch.full((len(x.ids),), 1 / len(x.ids))
    sums, _ = new_gradient_sums(both, P_ONLY)
    for chunk in chunks(both, plan):
        for rows in logit_blocks(chunk, plan.block_rows):
            zp, zq = chunk.zp[rows], chunk.zq[rows]
            row_values, *row_inputs = (y[chunk.positions][rows] for y in (values, x.ids, weights))
            sizes = (ctypes.c_int64(n) for n in zp.shape)
            threads = ctypes.c_int64(plan.threads)
            pointers = [ctypes.c_void_p(y.data_ptr()) for y in (zp, zq, buffers, *row_inputs, row_values)]
            library.k3_gradient(*pointers[:2], *sizes, pointers[2], threads, *pointers[3:])
        sums.add(chunk.positions, chunk.zp, chunk.pair.p.hidden, plan.tile_rows)
    x.hidden_p.grad, x.weight_p.grad = sums.gradients.hidden, sums.gradients.weight
    return values


def p_chunks(x: Inputs, plan: ChunkPlan):
    """Chunks with p's logits only."""
    buffer = torch.empty(plan.chunk_tokens, len(x.weight_p))
    tiny = torch.zeros(plan.chunk_tokens, 1)
    for start in range(0, len(x.ids), plan.chunk_tokens):
        where = slice(start, min(start + plan.chunk_tokens, len(x.ids)))
        chunk_pair = pair(x).select(where)
        z = buffer[: where.stop - start]
        multiply_(z, chunk_pair.p, chunk_pair.p.hidden, plan.tile_rows)
        yield Chunk(where, chunk_pair, z, tiny[: len(z)], False)


def candidates(args: argparse.Namespace, tokens: int) -> dict[str, Callable[[], None]]:
    """Forward and backward passes by candidate."""
    x = make_inputs(tokens, args.hidden, args.vocabulary)
    thin = x.to(torch.bfloat16)

    def exact(of: Inputs, choice: Literal["never", "always"]) -> Callable[[], None]:
        options = LinearOptions(compile=choice)
        return lambda: kleash(of, options).backward()

    eager = LinearOptions(compile="never")
    runs: dict[str, Callable[[], Any]] = {
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
        library = build_library("k3_rows.c")
        runs["exact compiled"] = exact(x, "always")
        runs["exact bf16, compiled"] = exact(thin, "always")
        runs["k3 compiled"] = lambda: k3_compiled(x, library)
        runs["exact recomputed, compiled"] = lambda: linear_kl(*x.models).mean().backward()

    def clean(run: Callable[[], Any]) -> Callable[[], None]:
        def both() -> None:
            x.forget()
            thin.forget()
            run()

        return both

    return {name: clean(run) for name, run in runs.items()}


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
    parser.add_argument("--only", nargs="*", help="candidates to run; default: all")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    clock = time.perf_counter if args.clock == "wall" else time.process_time
    runs = candidates(args, args.tokens)
    runs = {name: run for name, run in runs.items() if not args.only or name in args.only}
    for run in runs.values():
        run()
    times, loads = interleaved(runs, args.rounds, clock=clock)
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
