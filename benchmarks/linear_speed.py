"""What exact KL costs beside the two head matmuls that any log-probability needs.

    python benchmarks/linear_speed.py
    python benchmarks/linear_speed.py --threads 1 --clock cpu

Runs are interleaved after a warm-up: in each round every candidate runs once. Its time is divided by that of the bare
matmuls (the same chunks, into the same buffer) and by that of a pass that computes only k3, in the same round. The
medians of these ratios are printed and written. On a shared machine wall time is noisy; use one thread and its
processor time.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from harness import RESULTS, interleaved, ratio, write_result
from torch import Tensor

from kleash.divergences import phi
from kleash.linear import Head, LinearOptions, linear_kl, token_statistics
from kleash.linear.checks import checked_pair
from kleash.linear.impl.chunk_loop import RowFunction, evaluate_rows, plan_chunks
from kleash.linear.impl.project import normalised
from kleash.linear.impl.row_statistics import NO_BUFFERS, NUM_BUFFERS, Buffers, softmax_sums

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def k3_rows(zp: Tensor, zq: Tensor, tokens: Tensor, buffers: Buffers = NO_BUFFERS) -> tuple[Tensor, ...]:
    """k3 of each row: both log-sum-exps, and phi of one log ratio."""
    p, q, column = softmax_sums(zp, buffers[0]), softmax_sums(zq, buffers[1]), tokens[:, None]
    logp = zp.gather(-1, column) - p.top - p.total.log()
    logq = zq.gather(-1, column) - q.top - q.total.log()
    return (phi(logp - logq)[:, 0],)


def fallback_k3_rows(zp: Tensor, zq: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
    logp, logq = (normalised(z).gather(-1, tokens[:, None]) for z in (zp, zq))
    return (phi(logp - logq)[:, 0],)


K3 = RowFunction(k3_rows, fallback_k3_rows, slice(0, 1), NUM_BUFFERS)


def candidates(args: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    """Functions by their names, the bare matmuls first."""
    torch.manual_seed(0)
    hidden_p = torch.randn(args.tokens, args.hidden)
    hidden_q = hidden_p + 0.05 * torch.randn(args.tokens, args.hidden)
    weight_p = torch.randn(args.vocabulary, args.hidden) * 0.05
    weight_q = weight_p + 0.001 * torch.randn_like(weight_p)
    ids = torch.randint(args.vocabulary, (args.tokens,))
    models = hidden_p, Head(weight_p), hidden_q, Head(weight_q)
    pair = checked_pair(models[:2], models[2:], 1.0)
    chunk = plan_chunks(pair, LinearOptions(), 3).chunk_tokens
    buffers = torch.empty(chunk, args.vocabulary)

    def bare() -> None:
        for start in range(0, args.tokens, chunk):
            for hidden, weight in ((hidden_p, weight_p), (hidden_q, weight_q)):
                rows = hidden[start : start + chunk]
                torch.mm(rows, weight.T, out=buffers[: len(rows)])

    runs: dict[str, Callable[[], Any]] = {"matmuls": bare}
    for way in ("eager", "compiled"):
        if way == "eager" or args.compile:
            options = LinearOptions(compile=way == "compiled")
            runs[f"k3 {way}"] = lambda o=options: evaluate_rows(K3, pair, o, ids)
            runs[f"kl {way}"] = lambda o=options: linear_kl(*models, options=o)
            runs[f"statistics {way}"] = lambda o=options: token_statistics(*models, ids, options=o)
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=32_768)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clock", default="wall", choices=CLOCKS)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    clock, runs = CLOCKS[args.clock], candidates(args)
    for run in runs.values():
        run()
    times, loads = interleaved(runs, args.rounds, clock=clock)
    figures = {name: value for name, value in vars(args).items() if name != "out"}
    figures |= {"load": loads, "seconds": times}
    ratios: dict[str, dict[str, float]] = {}
    for name in list(runs)[1:]:
        rivals = {"of the matmuls": "matmuls", "of k3": f"k3 {name.split()[1]}"}
        ratios[name] = {words: ratio(times[name], times[rival]) for words, rival in rivals.items()}
        print(f"{name:20} {median(times[name]):7.2f} s  {ratios[name]}")
    figures["ratios"] = ratios
    name = "linear_speed" if args.clock == "wall" else "linear_speed_one_thread"
    print(f"matmuls {median(times['matmuls']):.2f} s; written to {write_result(name, figures, args.out)}")


if __name__ == "__main__":
    main()
