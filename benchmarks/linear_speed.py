"""Time of kleash.linear's functions on a CPU, as multiples of the bare matmuls that each of them needs.

    python benchmarks/linear_speed.py
    python benchmarks/linear_speed.py --tokens 4096 --vocabulary 151936 --rounds 5

The loss and the objective need four products with the heads, statistics two. The products are computed by kleash's own
product function, in chunks of 512 tokens. All run once in each round, after a first call of each; printed and written
are medians of ratios within rounds.
"""

from collections.abc import Callable
from typing import Any

import torch
from harness import interleaved, parser_of, ratio, write_result
from linear_methods import Inputs, bare, bare_by_kleash, gradients, kleash, make_inputs

from kleash.linear import LinearOptions, TokenTerms, linear_objective, token_statistics


def objective(x: Inputs, options: LinearOptions) -> None:
    """One step of a trainer: policy loss, entropy bonus and exact KL, with the gradients of p."""

    def losses(terms: TokenTerms, rows: slice) -> torch.Tensor:
        return terms.kl - terms.token_logp - 0.01 * terms.entropy

    hidden_p, head_p, hidden_q, head_q = x.models
    loss, _ = linear_objective(hidden_p, head_p, x.ids, hidden_q, head_q, losses, options=options)
    gradients(x, loss)


def jobs_of(x: Inputs) -> dict[str, Callable[[], Any]]:
    """The functions, uncompiled and compiled, and the matmuls."""
    jobs: dict[str, Callable[[], Any]] = {"torch.mm": bare(x), "four matmuls": bare_by_kleash(x)}
    for name, compile in (("", False), (", compiled", True)):
        options = LinearOptions(compile=compile)
        jobs[f"loss{name}"] = lambda o=options: gradients(x, kleash(x, o))
        jobs[f"objective{name}"] = lambda o=options: objective(x, o)
        jobs[f"statistics{name}"] = lambda o=options: token_statistics(*x.models, x.ids, options=o)
    return jobs


def main() -> None:
    args = parser_of(__doc__, tokens=1024, hidden=1024, vocabulary=32_768, rounds=5, threads=2).parse_args()
    torch.set_num_threads(args.threads)
    jobs = jobs_of(make_inputs(args.tokens, args.hidden, args.vocabulary))
    for job in jobs.values():
        job()
    times, loads = interleaved(jobs, args.rounds)
    ratios = {
        # Two of the four products are of the logits; all have the same number of multiplications.
        name: ratio(seconds, times["four matmuls"]) * (2 if name.startswith("statistics") else 1)
        for name, seconds in times.items()
    }
    for name, value in ratios.items():
        print(f"{name:24s} {value:.2f} x {'two' if name.startswith('statistics') else 'four'} matmuls")
    figures = {"shape": [args.tokens, args.hidden, args.vocabulary], "of_matmuls": ratios, "loads": loads}
    write_result(f"linear_speed_{args.tokens}_{args.hidden}_{args.vocabulary}", figures)


if __name__ == "__main__":
    main()
