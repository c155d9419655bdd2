"""Peak memory of exact KL from hidden states, at the size whose logits would fill 41 GB for each model.

    python benchmarks/linear_memory.py
    python benchmarks/linear_memory.py --tokens 20000

Counted is what the process holds at most beyond what it held when the inputs (hidden states of both
models, both heads, token ids) were made and a first call on three tokens had loaded the libraries:
the kernel's high-water mark of resident memory, reset at that moment (Linux). So it includes buffers,
results, and whatever the matrix library and, where it is used, the compiler take.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from harness import RESULTS, peak_of, resident, write_result

from kleash.linear import Head, LinearOptions, linear_kl, token_statistics


def measured(name: str, run: Callable[[], float], first: Callable[[], float]) -> dict[str, float]:
    first()
    found: list[float] = []
    start = time.perf_counter()
    extra = peak_of(lambda: found.append(run()))
    seconds = time.perf_counter() - start
    print(f"{name}: {extra:.0f} MB beyond the inputs, {seconds:.0f} s, mean KL {found[0]:.6f} nats")
    return {"extra_megabytes": extra, "seconds": round(seconds, 1), "mean_kl_nats": found[0]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=320_000, help="32 sequences of 10 000")
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--compile", default="auto", choices=["auto", "always", "never"])
    parser.add_argument("--what", default="kl", choices=["kl", "statistics", "both"])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    hidden_p = torch.randn(args.tokens, args.hidden)
    hidden_q = torch.randn(args.tokens, args.hidden).mul_(0.05).add_(hidden_p)
    weight = torch.randn(args.vocabulary, args.hidden) / args.hidden**0.5
    head_p, head_q = Head(weight), Head(weight + 0.001 * torch.randn_like(weight))
    tokens = torch.randint(args.vocabulary, (args.tokens,))
    options = LinearOptions(compile=args.compile)

    def kl(n: int) -> float:
        return linear_kl(hidden_p[:n], head_p, hidden_q[:n], head_q, options=options).mean().item()

    def statistics(n: int) -> float:
        found = token_statistics(hidden_p[:n], head_p, hidden_q[:n], head_q, tokens[:n], options=options)
        return found.kl_pq.mean().item()

    figures = {name: value for name, value in vars(args).items() if name != "out"}
    figures |= {
        "budget_megabytes": options.buffer_bytes / 1e6,
        "inputs_megabytes": round(resident("VmRSS")),
        "logits_of_each_model_megabytes": args.tokens * args.vocabulary * 4 / 1e6,
    }
    print(f"logits of each model would take {figures['logits_of_each_model_megabytes']:.0f} MB")
    for name, function in (("kl", kl), ("statistics", statistics)):
        if args.what in (name, "both"):
            figures[name] = measured(name, lambda f=function: f(args.tokens), lambda f=function: f(3))
    whole = args.tokens == parser.get_default("tokens")
    name = "linear_memory" if whole else "linear_memory_small"
    print(f"written to {write_result(name, figures, args.out)}")


if __name__ == "__main__":
    main()
