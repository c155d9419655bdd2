"""Time saved and error made by ``skip_below``, on distributions as uneven as those of language.

    python benchmarks/linear_skipping.py
    python benchmarks/linear_skipping.py --tokens 512 --rounds 2

Loss and backward pass, gradients for the hidden states and the head of p, uncompiled. Logits are the sum of a Zipf-like
prior and a part that depends on the token, with a standard deviation of ``--spread`` nats and sharper for some tokens
than for others. There is one set of inputs for each spread, and its median entropy is written. q is p with slightly
changed hidden states. For each ``skip_below`` are written: the time as a ratio to that without skipping (median over
interleaved rounds), the share of entries that was multiplied, and the relative errors of both gradients.
``--shuffled`` uses a vocabulary that is not sorted by frequency.
"""

import argparse
import time
from typing import Any

import torch
from harness import interleaved, ratio, write_result
from torch import Tensor

from kleash.linear import Head, LinearOptions, Skipped, linear_kl_loss
from kleash.linear.impl.project import normalised


class Inputs:
    """A policy and its reference, whose logits are as uneven as those of language."""

    def __init__(self, args: argparse.Namespace, spread: float) -> None:
        random = torch.Generator().manual_seed(0)
        tokens, words, hidden = args.tokens, args.vocabulary, args.hidden
        sharp = torch.exp(0.4 * torch.randn(tokens, 1, generator=random))
        states = spread * torch.randn(tokens, hidden - 1, generator=random)
        weight = torch.randn(words, hidden - 1, generator=random) / (hidden - 1) ** 0.5
        prior = -1.3 * (torch.arange(words) + 3.7).log()
        if args.shuffled:
            prior = prior[torch.randperm(words, generator=random)]
        self.weight = torch.cat([weight, prior[:, None]], 1).requires_grad_()
        self.hidden_p = (sharp * torch.cat([states, torch.ones(tokens, 1)], 1)).requires_grad_()
        moved = 0.02 * torch.randn(tokens, hidden, generator=random)
        self.hidden_q = self.hidden_p.detach() + moved
        self.weight_q = self.weight.detach().clone()
        self.weights = torch.full((tokens,), 1 / tokens)

    @torch.no_grad()
    def entropy(self) -> float:
        logp = normalised(self.hidden_p[:512] @ self.weight.T)
        return float(-(logp.exp() * logp).sum(-1).median())

    def gradients(self, options: LinearOptions) -> tuple[Tensor, Tensor]:
        result = linear_kl_loss(
            self.hidden_p,
            Head(self.weight),
            self.hidden_q,
            Head(self.weight_q),
            weights=self.weights,
            options=options,
        )
        in_hidden, in_weight = torch.autograd.grad(result.loss, (self.hidden_p, self.weight))
        return in_hidden, in_weight


def measure_spread(args: argparse.Namespace, spread: float) -> dict[str, Any]:
    """The figures of the inputs with one spread."""
    x = Inputs(args, spread)
    whole = x.gradients(LinearOptions(compile="never"))
    figures: dict[str, Any] = {"median_entropy_nats": round(x.entropy(), 2)}
    options = {"0": LinearOptions(compile="never")}
    for below in args.below:
        seen: list[Skipped] = []
        options[f"{below:g}"] = LinearOptions(compile="never", skip_below=below, report=seen.append)
        errors = [
            float((a - b).norm() / b.norm())
            for a, b in zip(x.gradients(options[f"{below:g}"]), whole, strict=True)
        ]
        figures[f"{below:g}"] = {
            "multiplied": round(seen[0].multiplied, 3),
            "error_in_hidden": float(f"{errors[0]:.2g}"),
            "error_in_weight": float(f"{errors[1]:.2g}"),
        }
    jobs = {name: lambda choice=choice: x.gradients(choice) for name, choice in options.items()}
    clock = time.perf_counter if args.clock == "wall" else time.process_time
    times, loads = interleaved(jobs, args.rounds, clock=clock)
    for below in args.below:
        figures[f"{below:g}"]["time"] = ratio(times[f"{below:g}"], times["0"])
        print(f"spread {spread:g} skip_below {below:<6g} {figures[f'{below:g}']}")
    return figures | {"seconds": times, "load": loads}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=32_768)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--spread", type=float, nargs="*", default=[2.0, 7.0, 10.0])
    parser.add_argument("--below", type=float, nargs="*", default=[1e-4, 1e-3, 1e-2])
    parser.add_argument("--clock", default="wall", choices=["wall", "cpu"])
    parser.add_argument("--shuffled", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    figures = {f"spread {spread:g}": measure_spread(args, spread) for spread in args.spread}
    usual = (args.tokens, args.vocabulary, args.hidden, args.clock) == (
        2048,
        32_768,
        1024,
        "wall",
    ) and not args.shuffled
    name = "linear_skipping" if usual else "linear_skipping_other"
    print(f"written to {write_result(name, vars(args) | figures)}")


if __name__ == "__main__":
    main()
