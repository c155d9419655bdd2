"""Peak memory of the exact KL from hidden states, at a size whose logits take 41 GB for each model.

    python benchmarks/linear_memory.py
    python benchmarks/linear_memory.py --tokens 20000

The peak is the kernel's high-water mark of resident memory during the call (Linux only), less that before it.
Before the call the inputs (hidden states of both models, both heads, token ids) are in memory, and a first call on
three tokens has loaded the libraries. So the peak includes buffers, results, and the memory of the matrix library and,
if it is used, of the compiler.
"""

import time
from collections.abc import Callable
from pathlib import Path

import torch
from harness import RESULTS, parser_of, peak_of, resident, write_result

from kleash.linear import Head, LinearOptions, linear_kl, token_statistics
from kleash.linear.chunked import CPU_BYTES


def measure(name: str, run: Callable[[], float], first: Callable[[], float]) -> dict[str, float]:
    """Peak memory and seconds of ``run``, which returns a mean KL, after a warm-up by ``first``."""
    first()
    mean_kls: list[float] = []
    start = time.perf_counter()
    extra = peak_of(lambda: mean_kls.append(run()))
    seconds = time.perf_counter() - start
    print(f"{name}: {extra:.0f} MB beyond the inputs, {seconds:.0f} s, mean KL {mean_kls[0]:.6f} nats")
    return {"extra_megabytes": extra, "seconds": round(seconds, 1), "mean_kl_nats": mean_kls[0]}


def main() -> None:
    parser = parser_of(__doc__)
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
    options = LinearOptions(compile={"auto": None, "always": True, "never": False}[args.compile])

    def kl(n: int) -> float:
        return linear_kl(hidden_p[:n], head_p, hidden_q[:n], head_q, options=options).mean().item()

    def statistics(n: int) -> float:
        result = token_statistics(hidden_p[:n], head_p, hidden_q[:n], head_q, tokens[:n], options=options)
        return result.kl_pq.mean().item()

    figures = {name: value for name, value in vars(args).items() if name != "out"}
    figures |= {
        "budget_megabytes": CPU_BYTES / 1e6,
        "inputs_megabytes": round(resident("VmRSS")),
        "logits_of_each_model_megabytes": args.tokens * args.vocabulary * 4 / 1e6,
    }
    print(f"logits of each model would take {figures['logits_of_each_model_megabytes']:.0f} MB")
    for name, function in (("kl", kl), ("statistics", statistics)):
        if args.what in (name, "both"):
            figures[name] = measure(name, lambda f=function: f(args.tokens), lambda f=function: f(3))
    whole = args.tokens == parser.get_default("tokens")
    name = "linear_memory" if whole else "linear_memory_small"
    print(f"written to {write_result(name, figures, args.out)}")


if __name__ == "__main__":
    main()
