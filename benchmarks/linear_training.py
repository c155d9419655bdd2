"""What the gradient of the exact KL costs, beside the matmuls, the one-sample estimate and the naive way.

    python benchmarks/linear_training.py
    python benchmarks/linear_training.py --tokens 512 --rounds 3 --no-compile
    python benchmarks/linear_training.py --memory "exact eager"

Forward and backward pass: gradients for the hidden states and the head of p, a mean over the tokens.
Interleaved after a warm-up: in each round every candidate runs once and is compared with others of that
round; printed and written are the medians of those ratios. ``matmuls`` are the four that any such gradient
needs, bare, in chunks of 512 tokens into buffers that exist. ``k3`` is the same engine with the one-sample
estimate in place of the exact KL. Peaks are resident memory beyond what was held when the inputs were made
and a call on eight tokens had loaded the libraries, each in a process of its own.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from harness import write_result
from torch import Tensor
from torch.nn.functional import kl_div

from kleash.divergences import phi
from kleash.linear import Head, LinearOptions, linear_kl, linear_kl_loss
from kleash.linear.checks import checked_pair
from kleash.linear.impl.gradient import both_sums
from kleash.linear.impl.lean import ROOMS
from kleash.linear.impl.loop import blocks, chunks, plan
from kleash.linear.impl.pair import Pair
from kleash.linear.impl.rows import side

BESIDE = {
    "exact eager": ("matmuls", "k3 eager", "naive exact", "naive k3"),
    "exact compiled": ("matmuls", "k3 eager", "naive exact", "naive k3"),
    "exact recomputed": ("matmuls", "k3 recomputed"),
    "k3 eager": ("matmuls",),
    "naive exact": ("matmuls",),
    "naive k3": ("matmuls",),
    "exact bf16": ("exact eager",),
}
P_ONLY = (True, True, False, False, False, False)


class Inputs:
    """Two models, one step apart, and some tokens."""

    def __init__(self, args: argparse.Namespace, tokens: int) -> None:
        torch.manual_seed(0)
        self.hidden_p = torch.randn(tokens, args.hidden).requires_grad_()
        self.hidden_q = self.hidden_p.detach() + 0.05 * torch.randn(tokens, args.hidden)
        self.weight_p = (torch.randn(args.vocabulary, args.hidden) * 0.05).requires_grad_()
        self.weight_q = self.weight_p.detach() + 0.001 * torch.randn(args.vocabulary, args.hidden)
        self.ids = torch.randint(args.vocabulary, (tokens,))
        self.weights = torch.full((tokens,), 1 / tokens)

    def narrowed(self) -> "Inputs":
        for name in ("hidden_p", "hidden_q", "weight_p", "weight_q"):
            old = getattr(self, name)
            setattr(self, name, old.detach().bfloat16().requires_grad_(old.requires_grad))
        return self

    @property
    def four(self):
        return self.hidden_p, Head(self.weight_p), self.hidden_q, Head(self.weight_q)

    def pair(self) -> Pair:
        return checked_pair(self.four[:2], self.four[2:], 1.0)

    def forget(self) -> None:
        self.hidden_p.grad = self.weight_p.grad = None


def bare(x: Inputs, size: int = 512) -> Callable[[], None]:
    rooms = torch.empty(2, size, len(x.weight_p))
    in_weight, in_hidden = torch.empty_like(x.weight_p), torch.empty_like(x.hidden_p)

    @torch.no_grad()
    def run() -> None:
        in_weight.zero_()
        for start in range(0, len(x.hidden_p), size):
            here = slice(start, start + size)
            zp, zq = rooms[:, : len(x.hidden_p[here])]
            torch.mm(x.hidden_p[here], x.weight_p.T, out=zp)
            torch.mm(x.hidden_q[here], x.weight_q.T, out=zq)
            torch.mm(zp, x.weight_p, out=in_hidden[here])
            in_weight.addmm_(zp.T, x.hidden_p[here])

    return run


@torch.no_grad()
def k3_values(x: Inputs) -> Tensor:
    """Of each token, the derivative of k3 in its log-probability under p: the value pass of the recomputed k3."""
    pair, slopes = x.pair(), torch.empty(len(x.ids))
    cut = plan(pair, LinearOptions(), ROOMS)
    room = torch.empty(2, cut.rows, pair.p.vocabulary)
    for chunk in chunks(pair, cut):
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
    pair = x.pair() if slopes is None else checked_pair(x.four[:2], x.four[:2], 1.0)
    cut = plan(x.pair(), LinearOptions(), ROOMS)
    room = torch.empty(2, cut.rows, pair.p.vocabulary)
    sums, _ = both_sums(x.pair(), P_ONLY)
    for chunk in p_chunks(x, cut) if slopes is not None else chunks(pair, cut):
        weights = x.weights[chunk.where]
        for here in blocks(chunk, cut.rows):
            if slopes is None:
                one, slope, column = k3_rows(chunk, here, x, room)
            else:
                z, column = chunk.zp[here], x.ids[chunk.where][here][:, None]
                one, slope = side(z, room[0, : len(z)]), slopes[chunk.where][here]
            c = (weights[here] * slope)[:, None]
            torch.mul(one.mass, -c / one.total, out=chunk.zp[here])
            chunk.zp[here].scatter_add_(-1, column, c)
        sums.add(chunk.where, chunk.zp, chunk.pair.p.hidden, cut.tile)
    x.hidden_p.grad, x.weight_p.grad = sums.done[:2]


def p_chunks(x: Inputs, cut):
    """Chunks in which q's logits are not computed."""
    room = torch.empty(cut.chunk, len(x.weight_p))
    tiny = torch.zeros(cut.chunk, 1)
    from kleash.linear.impl.loop import Chunk

    for start in range(0, len(x.ids), cut.chunk):
        where = slice(start, min(start + cut.chunk, len(x.ids)))
        pair = x.pair().at(where)
        z = room[: where.stop - start]
        torch.mm(pair.p.hidden, x.weight_p.T, out=z)
        yield Chunk(where, pair, z, tiny[: len(z)], False)


def naive(x: Inputs, exact: bool) -> None:
    logp = (x.hidden_p @ x.weight_p.T).log_softmax(-1)
    with torch.no_grad():
        logq = (x.hidden_q @ x.weight_q.T).log_softmax(-1)
    if exact:
        loss = kl_div(logq, logp, log_target=True, reduction="none").sum(-1)
    else:
        loss = phi((logp - logq).gather(-1, x.ids[:, None])[:, 0])
    (loss * x.weights).sum().backward()


def candidates(args: argparse.Namespace, tokens: int) -> dict[str, Callable[[], None]]:
    """Name -> forward and backward pass."""
    x, thin = Inputs(args, tokens), Inputs(args, tokens).narrowed()

    def exact(of: Inputs, choice: str) -> Callable[[], None]:
        options = LinearOptions(compile=choice)
        return lambda: linear_kl_loss(*of.four, weights=of.weights, options=options).loss.backward()

    eager = LinearOptions(compile="never")
    found: dict[str, Callable[[], None]] = {
        "matmuls": bare(x),
        "exact eager": exact(x, "never"),
        "k3 eager": lambda: k3_at_once(x),
        "exact recomputed": lambda: (linear_kl(*x.four, options=eager) * x.weights).sum().backward(),
        "k3 recomputed": lambda: k3_at_once(x, k3_values(x)),
        "naive exact": lambda: naive(x, True),
        "naive k3": lambda: naive(x, False),
        "exact bf16": exact(thin, "never"),
    }
    if args.compile:
        found["exact compiled"] = exact(x, "always")

    def clean(run: Callable[[], None]) -> Callable[[], None]:
        def both() -> None:
            x.forget()
            thin.forget()
            run()

        return both

    return {name: clean(run) for name, run in found.items()}


def resident(what: str) -> float:
    """VmRSS (now) or VmHWM (at most so far) of this process, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what)) * 1024 / 1e6


def peak(args: argparse.Namespace) -> float:
    candidates(args, 8)[args.memory]()
    run = candidates(args, args.tokens)[args.memory]
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    run()
    return round(resident("VmHWM") - before, 1)


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
    parser.add_argument("--peaks", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--only", nargs="*", help="candidates to run; all if left out")
    parser.add_argument("--memory", help="measure the peak of this candidate, and nothing else")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    if args.memory:
        print(peak(args))
        return
    clock = time.perf_counter if args.clock == "wall" else time.process_time
    found = candidates(args, args.tokens)
    found = {name: run for name, run in found.items() if not args.only or name in args.only}
    times: dict[str, list[float]] = {name: [] for name in found}
    for run in found.values():
        run()
    loads = []
    for _ in range(args.rounds):
        loads.append(os.getloadavg()[0])
        for name, run in found.items():
            start = clock()
            run()
            times[name].append(clock() - start)
    ratios = {
        name: {
            rival: round(median(a / b for a, b in zip(times[name], times[rival], strict=True)), 3)
            for rival in rivals
            if rival in times
        }
        for name, rivals in BESIDE.items()
        if name in times
    }
    for name, seconds in times.items():
        print(f"{name:18} {median(seconds):7.2f} s  {ratios.get(name, '')}")
    figures: dict[str, object] = vars(args) | {"load": loads, "seconds": times, "ratios": ratios}
    if args.peaks:
        sizes = [f"--{name}={getattr(args, name)}" for name in ("tokens", "vocabulary", "hidden", "threads")]
        figures["peak_megabytes"] = peaks = {}
        for name in found:
            command = [sys.executable, __file__, *sizes, "--memory", name]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            peaks[name] = float(done.stdout)
            print(f"{name:18} {peaks[name]:7.0f} MB")
    usual = (args.tokens, args.vocabulary, args.hidden, args.clock) == (2048, 32_768, 1024, "wall")
    print(f"written to {write_result('linear_training' if usual else 'linear_training_small', figures)}")


if __name__ == "__main__":
    main()
