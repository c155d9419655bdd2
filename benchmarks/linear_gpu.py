"""Time and memory of the exact KL and its gradient on a GPU, compared with the bare matmuls and other packages.

    python benchmarks/linear_gpu.py
    python benchmarks/linear_gpu.py --hidden 1024 --vocabulary 151936

Needs a CUDA device. bfloat16, frozen q, gradients for p's hidden states and head. Runs are interleaved after a warm-up:
in each round every candidate runs once, until the GPU has done all; medians are printed and written. ``rate`` is the
rate of the four matmuls (value and gradient) or two (value, statistics), as a share of the rate of the bare matmuls on
whole chunks (of ``--chunk`` tokens) in the same round. Peaks are the memory that torch allocated beyond the inputs.
kleash is compared with float64 before anything is timed.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from statistics import median
from time import perf_counter
from typing import Any

import torch
from harness import interleaved, parser_of, ratio, write_result
from linear_methods import PACKAGES, Inputs, cosine, gradients, kleash, make_inputs, trl
from torch import Tensor

from kleash.linear import LinearOptions, linear_kl, token_statistics

MATMULS = {"value": 2, "gradient": 4, "statistics": 2}
Candidates = dict[tuple[str, str], Callable[[], Any]]


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
    """The functions to time, by their name and by what they compute: "value", "gradient" or "statistics"."""
    runs: Candidates = {}
    runs["matmuls", "value"], runs["matmuls", "gradient"] = bare(x, args.chunk)
    runs["matmuls", "statistics"] = runs["matmuls", "value"]
    for name, options in {
        "kleash": LinearOptions(),
        "kleash, 128 MiB": LinearOptions(buffer_bytes=128 * 2**20),
        "kleash, uncompiled": LinearOptions(compile=False),
    }.items():
        runs[name, "statistics"] = partial(token_statistics, *x.models, x.ids, options=options)
        runs[name, "value"] = partial(value, x, options)
        runs[name, "gradient"] = lambda o=options: gradients(x, kleash(x, o))
    if find_spec("liger_kernel"):
        from liger_kernel.transformers import LigerFusedLinearJSD

        # jsd_beta 1 is KL(student || teacher); their mean is over the tokens, too.
        liger = LigerFusedLinearJSD(jsd_beta=1.0)
        runs["liger fused_linear_jsd", "gradient"] = lambda: gradients(
            x, liger(x.hidden_p, x.weight_p, x.hidden_q, x.weight_q, None)
        )
    if find_spec("trl"):
        runs["trl chunked_divergence", "gradient"] = lambda: gradients(x, trl(x))
    return runs


def value(x: Inputs, options: LinearOptions) -> Tensor:
    with torch.no_grad():
        return linear_kl(*x.models, options=options)


def check(args: argparse.Namespace) -> dict[str, float]:
    """Errors of kleash against itself in float64, 256 tokens: of the value (relative) and gradient (1 - cosine)."""
    small = make_inputs(256, args.hidden, min(args.vocabulary, 8192), dtype=torch.bfloat16)
    wide, chunked = small.to(torch.float64), LinearOptions(impl="chunked")
    exact, exact_gradients = value(wide, chunked), gradients(wide, kleash(wide, chunked))
    errors = {}
    for name, budget in (("rows", 2**30), ("fused", 2**16)):
        options = LinearOptions(buffer_bytes=budget)
        errors[f"value, {name}"] = float(((value(small, options) - exact).abs() / exact).max())
        ours = gradients(small, kleash(small, options))
        for what, a, b in zip(("hidden", "weight"), ours, exact_gradients, strict=True):
            errors[f"1 - cosine, {what}, {name}"] = 1 - cosine(a, b)
    assert max(errors.values()) < 1e-2, errors
    return errors


def synchronised_clock() -> float:
    """Seconds, when the GPU has done all that it was given."""
    torch.cuda.synchronize()
    return perf_counter()


def peak_mib(run: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def main() -> int:
    parser = parser_of(__doc__, tokens=8192, hidden=4096, vocabulary=128_256, rounds=5, chunk=1024)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("linear_gpu: no CUDA device; run this on a machine that has one", file=sys.stderr)
        return 2
    torch.set_default_device("cuda")
    figures: dict[str, Any] = vars(args) | {"errors": check(args), "results": []}
    x = make_inputs(args.tokens, args.hidden, args.vocabulary, dtype=torch.bfloat16)
    runs = candidates(x, args)
    for run in runs.values():
        run()
    times, _ = interleaved(runs, args.rounds, synchronised_clock)
    for (name, what), seconds in times.items():
        work = 2 * MATMULS[what] * args.tokens * args.hidden * args.vocabulary
        figures["results"].append(
            {
                "name": name,
                "what": what,
                "seconds": median(seconds),
                "all_seconds": seconds,
                "rate": ratio(times["matmuls", what], seconds),
                "teraflops": round(work / median(seconds) / 1e12, 1),
                "peak_mib": peak_mib(runs[name, what]),
            }
        )
        print(
            "{name:24} {what:9} {seconds:8.4f} s  rate {rate:5.2f}  {peak_mib:8.0f} MiB".format(
                **figures["results"][-1]
            )
        )
    sizes = {name: getattr(args, name) for name in ("tokens", "hidden", "vocabulary")}
    usual = all(size == parser.get_default(name) for name, size in sizes.items())
    name = "linear_gpu" if usual else "linear_gpu_{tokens}_{hidden}_{vocabulary}".format(**sizes)
    print(f"written to {write_result(name, figures, packages=PACKAGES)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
