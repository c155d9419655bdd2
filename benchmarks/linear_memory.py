"""Peak memory of the exact KL from hidden states, at a size whose logits take 41 GB for each model.

    python benchmarks/linear_memory.py
    RESULTS=/tmp/results python benchmarks/linear_memory.py --tokens 20000

The peak is the kernel's high-water mark of resident memory during the call (Linux only), less that before it.
Before the call the inputs (hidden states of both models, both heads, token ids) are in memory, and a first call on
three tokens has loaded the libraries. So the peak includes buffers, results, and the memory of the matrix library and,
if it is used, of the compiler.
"""

from time import perf_counter

import torch
from harness import parser_of, peak_of, resident, write_result

from kleash.linear import Head, linear_kl
from kleash.linear.chunked import CPU_BYTES


def main() -> None:
    args = parser_of(__doc__, tokens=320_000, vocabulary=32_000, hidden=256, threads=2).parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    hidden_p = torch.randn(args.tokens, args.hidden)
    hidden_q = torch.randn(args.tokens, args.hidden).mul_(0.05).add_(hidden_p)
    weight = torch.randn(args.vocabulary, args.hidden) / args.hidden**0.5
    head_p, head_q = Head(weight), Head(weight + 0.001 * torch.randn_like(weight))
    means: list[float] = []

    def measure(tokens: int) -> None:
        means.append(linear_kl(hidden_p[:tokens], head_p, hidden_q[:tokens], head_q).mean().item())

    figures = vars(args) | {
        "budget_megabytes": CPU_BYTES / 1e6,
        "inputs_megabytes": round(resident("VmRSS")),
        "logits_of_each_model_megabytes": args.tokens * args.vocabulary * 4 / 1e6,
    }
    measure(3)
    start = perf_counter()
    figures |= {"extra_megabytes": peak_of(lambda: measure(args.tokens)), "mean_kl_nats": means[-1]}
    figures["seconds"] = round(perf_counter() - start, 1)
    print(
        "{extra_megabytes:.0f} MB beyond the inputs, {seconds:.0f} s, mean KL {mean_kl_nats:.6f} nats; the logits of "
        "each model would take {logits_of_each_model_megabytes:.0f} MB".format(**figures)
    )
    print(f"written to {write_result('linear_memory', figures)}")


if __name__ == "__main__":
    main()
