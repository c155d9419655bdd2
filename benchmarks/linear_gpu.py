"""Time and memory of the exact KL and its gradient on a GPU, compared with the bare matmuls and other packages.

    python benchmarks/linear_gpu.py
    python benchmarks/linear_gpu.py --hidden 1024 --vocabulary 151936

Needs a CUDA device. bfloat16, frozen q, gradients for p's hidden states and head. Runs are interleaved after a warm-up:
in each round every candidate runs once, timed by CUDA events; medians are printed and written. ``rate`` is the rate of
the four matmuls (value and gradient) or two (value, statistics), as a share of the rate of the bare matmuls on whole
chunks in the same round. Peaks are the memory that torch allocated beyond the inputs. kleash is compared with float64
before anything is timed.
"""

import argparse
import sys
from collections.abc import Callable
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch
from harness import write_result
from torch import Tensor

from kleash.linear import Head, LinearOptions, linear_kl, linear_kl_loss, token_statistics

MATMULS = {"value": 2, "gradient": 4, "statistics": 2}
Candidates = dict[tuple[str, str], Callable[[], Any]]


class Inputs:
    """Two models, one step apart, and some tokens."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(0)

        def normal(*shape: int, size: float) -> Tensor:
            return (torch.randn(*shape, device="cuda") * size).bfloat16()

        self.hidden_p = normal(args.tokens, args.hidden, size=1.0).requires_grad_()
        self.hidden_q = self.hidden_p.detach() + normal(args.tokens, args.hidden, size=0.02)
        self.weight_p = normal(args.vocabulary, args.hidden, size=args.hidden**-0.5).requires_grad_()
        self.weight_q = self.weight_p.detach() + normal(args.vocabulary, args.hidden, size=1e-3)
        self.weights = torch.full((args.tokens,), 1 / args.tokens, device="cuda")

    @property
    def models(self) -> tuple[Tensor, Head, Tensor, Head]:
        return self.hidden_p, Head(self.weight_p), self.hidden_q, Head(self.weight_q)

    def gradients(self, loss: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss, (self.hidden_p, self.weight_p))


def bare(x: Inputs, chunk: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """Functions that run the matmuls of a value, and of a value and its gradient, into preallocated memory."""
    words, dim = x.weight_p.shape
    z = torch.empty(chunk, words, device="cuda")
    g = torch.empty(chunk, words, device="cuda", dtype=torch.bfloat16)
    total = torch.zeros(words, dim, device="cuda")
    pairs = ((x.hidden_p.detach(), x.weight_p.detach()), (x.hidden_q, x.weight_q))

    def run(gradient: bool) -> None:
        for start in range(0, len(x.hidden_p), chunk):
            for hidden, weight in pairs:
                rows = hidden[start : start + chunk]
                torch.mm(rows, weight.T, out_dtype=torch.float32, out=z[: len(rows)])
            if gradient:
                rows = pairs[0][0][start : start + chunk]
                torch.mm(g[: len(rows)], pairs[0][1])
                torch.addmm(total, g[: len(rows)].T, rows, out_dtype=torch.float32, out=total)

    return lambda: run(False), lambda: run(True)


def candidates(x: Inputs, args: argparse.Namespace) -> Candidates:
    """The functions to time, by their name and by what they compute: "value" or "gradient"."""
    runs: Candidates = {}
    runs["matmuls", "value"], runs["matmuls", "gradient"] = bare(x, args.chunk)
    runs["matmuls", "statistics"] = runs["matmuls", "value"]
    tokens = torch.arange(args.tokens, device="cuda") % args.vocabulary
    for name, options in {
        "kleash": LinearOptions(),
        "kleash, 128 MiB": LinearOptions(buffer_bytes=128 * 2**20),
        "kleash, uncompiled": LinearOptions(compile=False),
    }.items():
        runs[name, "statistics"] = lambda o=options: token_statistics(*x.models, tokens, options=o)
        runs[name, "value"] = lambda o=options: value(x, o)
        runs[name, "gradient"] = lambda o=options: x.gradients(
            linear_kl_loss(*x.models, weights=x.weights, options=o).loss
        )
    if find_spec("liger_kernel"):
        from liger_kernel.transformers import LigerFusedLinearJSD

        # jsd_beta 1 is KL(student || teacher); their mean is over the tokens, too.
        liger = LigerFusedLinearJSD(jsd_beta=1.0)
        runs["liger fused_linear_jsd", "gradient"] = lambda: x.gradients(
            liger(x.hidden_p, x.weight_p, x.hidden_q, x.weight_q, None)
        )
    if find_spec("trl"):
        from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

        def trl() -> tuple[Tensor, ...]:
            inputs = x.hidden_p, x.weight_p, None, x.hidden_q, x.weight_q, None, 1.0
            per_token, _ = ChunkedDivergenceFunction.apply(*inputs)
            return x.gradients(per_token.mean())

        runs["trl chunked_divergence", "gradient"] = trl
    return runs


def value(x: Inputs, options: LinearOptions) -> Tensor:
    with torch.no_grad():
        return linear_kl(*x.models, options=options)


def check(args: argparse.Namespace) -> dict[str, float]:
    """Errors of kleash against itself in float64, 256 tokens: of the value (relative) and gradient (1 - cosine)."""
    small = Inputs(
        argparse.Namespace(**vars(args) | {"tokens": 256, "vocabulary": min(args.vocabulary, 8192)})
    )
    leaves = small.hidden_p, small.weight_p, small.hidden_q, small.weight_q
    wide = [y.detach().double().requires_grad_(y.requires_grad) for y in leaves]
    exact = linear_kl_loss(
        wide[0], Head(wide[1]), wide[2], Head(wide[3]), weights=small.weights.double(),
        options=LinearOptions(impl="chunked"),
    )  # fmt: skip
    exact_gradients = torch.autograd.grad(exact.loss, wide[:2])
    errors = {}
    for name, budget in (("rows", 2**30), ("fused", 2**16)):
        options = LinearOptions(buffer_bytes=budget)
        error = (value(small, options) - exact.per_token).abs() / exact.per_token
        errors[f"value, {name}"] = float(error.max())
        ours = small.gradients(linear_kl_loss(*small.models, weights=small.weights, options=options).loss)
        for what, a, b in zip(("hidden", "weight"), ours, exact_gradients, strict=True):
            cosine = torch.nn.functional.cosine_similarity(a.double().flatten(), b.flatten(), dim=0)
            errors[f"1 - cosine, {what}, {name}"] = 1 - float(cosine)
    assert max(errors.values()) < 1e-2, errors
    return errors


def seconds(run: Callable[[], Any]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def peak_mib(run: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=128_256)
    parser.add_argument("--chunk", type=int, default=1024, help="tokens whose bare matmuls are done at once")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("linear_gpu: no CUDA device; run this on a machine that has one", file=sys.stderr)
        return 2
    figures: dict[str, Any] = vars(args) | {"errors": check(args)}
    x = Inputs(args)
    runs = candidates(x, args)
    times: dict[tuple[str, str], list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(args.rounds):
        for name, run in runs.items():
            times[name].append(seconds(run))
    figures["results"] = []
    for (name, what), run_seconds in times.items():
        rate = median(b / a for a, b in zip(run_seconds, times["matmuls", what], strict=True))
        work = 2 * MATMULS[what] * args.tokens * args.hidden * args.vocabulary
        figures["results"].append(
            {
                "name": name, "what": what, "seconds": median(run_seconds), "all_seconds": run_seconds,
                "rate": round(rate, 3), "teraflops": round(work / median(run_seconds) / 1e12, 1),
                "peak_mib": peak_mib(runs[name, what]),
            }
        )  # fmt: skip
        print("{name:24} {what:9} {seconds:8.4f} s  rate {rate:5.2f}  {peak_mib:8.0f} MiB".format(
            **figures["results"][-1]))  # fmt: skip
    sizes = {name: getattr(args, name) for name in ("tokens", "hidden", "vocabulary")}
    usual = all(size == parser.get_default(name) for name, size in sizes.items())
    name = "linear_gpu" if usual else "linear_gpu_{tokens}_{hidden}_{vocabulary}".format(**sizes)
    packages = [
        package for package in ("trl", "liger-kernel", "triton") if find_spec(package.replace("-", "_"))
    ]
    print(f"written to {write_result(name, figures, packages=packages)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
