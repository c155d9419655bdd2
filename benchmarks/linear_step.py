"""The head's share of the time of a training step on a CPU: with the exact KL, with k3, and with naive code.

    python benchmarks/linear_step.py
    python benchmarks/linear_step.py --rounds 3 --layers 4

A step of policy-gradient training: forward pass of the policy's and of the reference's transformer, the loss
(clipped ratio plus 0.05 KL) with its gradients for hidden states and head, the transformer's backward pass,
AdamW. Each part is timed separately; the head's part is "loss". "exact" and "k3" are `linear_objective`; the naive
variants hold all logits of both models; "no KL" holds the policy's only, and runs no reference. Losses and gradients
of "exact" and "naive exact", and of "k3" and "naive k3", are compared before anything is timed. For models too large
to train here, the head's share of the arithmetic of a step is computed and written too.
"""

import argparse
import os
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from harness import RESULTS, write_result
from linear_methods import cosine
from torch import Tensor
from torch.nn.functional import kl_div
from transformers import LlamaConfig, LlamaForCausalLM

from kleash.divergences import phi
from kleash.linear import Head, TokenTerms, linear_objective

PARTS = ("policy", "reference", "loss", "backward", "optimizer")
COUNTED = {"Qwen3-0.6B": (440_467_456, 1024, 151_936), "Llama-3-8B": (6_979_588_096, 4096, 128_256)}
"""Parameters without embedding and head, hidden size, vocabulary."""


class Step:
    """Two models and a batch of responses."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=args.vocabulary, hidden_size=args.hidden, intermediate_size=11 * args.hidden // 4,
            num_hidden_layers=args.layers, num_attention_heads=args.hidden // 64 or 1, use_cache=False,
            tie_word_embeddings=False, initializer_range=0.05,
        )  # fmt: skip
        self.policy = LlamaForCausalLM(config)
        self.reference = deepcopy(self.policy).requires_grad_(False)
        with torch.no_grad():
            for parameter in self.policy.parameters():
                parameter.mul_(1 + 0.02 * torch.randn_like(parameter))
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=1e-7)
        self.ids = torch.randint(args.vocabulary, (args.sequences, args.length))
        self.next = torch.randint(args.vocabulary, (args.sequences * args.length,))
        self.gain = torch.randn(args.sequences * args.length)
        with torch.no_grad():
            hidden = self.policy.model(self.ids).last_hidden_state
            self.old = self.chosen((hidden @ self.policy.lm_head.weight.T).flatten(0, 1).log_softmax(-1))

    def chosen(self, logp: Tensor) -> Tensor:
        return logp.gather(-1, self.next[:, None])[:, 0]

    def per_token(self, token_logp: Tensor, penalty: Tensor | float, rows: slice = slice(None)) -> Tensor:
        """The loss of each token, divided by the number of tokens."""
        ratio, gain = torch.exp(token_logp - self.old[rows]), self.gain[rows]
        surrogate = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
        return (0.05 * penalty - surrogate) / len(self.next)

    def ours(self, exact: bool) -> Callable[[Tensor, Tensor], Tensor]:
        def objective(terms: TokenTerms, rows: slice) -> Tensor:
            penalty = terms.kl if exact else phi(terms.token_logp - terms.token_logq)
            return self.per_token(terms.token_logp, penalty, rows)

        def loss(hidden_p: Tensor, hidden_q: Tensor) -> Tensor:
            heads = Head(self.policy.lm_head.weight), Head(self.reference.lm_head.weight)
            return linear_objective(hidden_p, heads[0], self.next, hidden_q, heads[1], objective)[0]

        return loss

    def naive(self, exact: bool) -> Callable[[Tensor, Tensor], Tensor]:
        def loss(hidden_p: Tensor, hidden_q: Tensor) -> Tensor:
            logp = self.policy.lm_head(hidden_p).log_softmax(-1)
            with torch.no_grad():
                logq = self.reference.lm_head(hidden_q).log_softmax(-1)
            token_logp = self.chosen(logp)
            if exact:
                penalty = kl_div(logq, logp, log_target=True, reduction="none").sum(-1)
            else:
                penalty = phi(token_logp - self.chosen(logq))
            return self.per_token(token_logp, penalty).sum()

        return loss

    def without(self, hidden_p: Tensor, _: Tensor) -> Tensor:
        logp = self.policy.lm_head(hidden_p).log_softmax(-1)
        return self.per_token(self.chosen(logp), 0.0).sum()

    def ways(self) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
        fused = {"exact": self.ours(True), "k3": self.ours(False)}
        naive = {"naive exact": self.naive(True), "naive k3": self.naive(False)}
        return fused | naive | {"no KL": self.without}

    def run(self, name: str, update: bool = True) -> tuple[float, dict[str, float]]:
        """The loss, and the seconds of each part."""
        self.optimizer.zero_grad(set_to_none=True)
        began, marks = perf_counter(), []
        hidden_p = self.policy.model(self.ids).last_hidden_state.flatten(0, 1)
        marks.append(perf_counter())
        with torch.no_grad():
            needs_reference = name != "no KL"
            hidden_q = (
                self.reference.model(self.ids).last_hidden_state.flatten(0, 1)
                if needs_reference
                else hidden_p
            )
        marks.append(perf_counter())
        leaf = hidden_p.detach().requires_grad_()
        loss = self.ways()[name](leaf, hidden_q)
        loss.backward()
        marks.append(perf_counter())
        hidden_p.backward(leaf.grad)
        marks.append(perf_counter())
        if update:
            self.optimizer.step()
        marks.append(perf_counter())
        spans = [b - a for a, b in zip([began, *marks], marks, strict=False)]
        return loss.item(), dict(zip(PARTS, spans, strict=True))

    def check(self) -> dict[str, dict[str, float]]:
        """Losses, and cosines of gradients, of kleash and the naive code; raises if they differ."""
        checks = {}
        for name in ("exact", "k3"):
            values, grads = [], []
            for way in (name, f"naive {name}"):
                values.append(self.run(way, update=False)[0])
                grads.append(
                    torch.cat([p.grad.flatten() for p in self.policy.parameters() if p.grad is not None])
                )
            checks[name] = {"loss": values[0], "naive_loss": values[1], "cosine": cosine(*grads)}
            assert abs(values[0] - values[1]) < 1e-4 * abs(values[1]) + 1e-6, checks
            assert checks[name]["cosine"] > 0.9999, checks
        self.run("no KL", update=False)
        return checks


def count_shares() -> dict[str, dict[str, float]]:
    """The head's share of a step's operations: 8 per transformer parameter, 2 per weight and head product."""
    shares = {}
    for name, (body, hidden, vocabulary) in COUNTED.items():
        head_matmul = 2 * hidden * vocabulary
        whole = 8 * body + 4 * head_matmul
        shares[name] = {
            "head_share": round(4 * head_matmul / whole, 4),
            "one_matmul_share": round(head_matmul / whole, 4),
        }
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, size in {
        "sequences": 8,
        "length": 256,
        "hidden": 512,
        "layers": 8,
        "vocabulary": 32_768,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    step = Step(args)
    checks, loads = step.check(), []
    times: dict[str, list[dict[str, float]]] = {name: [] for name in step.ways()}
    for _ in range(args.rounds):
        loads.append(os.getloadavg()[0])
        for name, rounds in times.items():
            rounds.append(step.run(name)[1])
    results: dict[str, Any] = {}
    for name, rounds in times.items():
        results[name] = {part: round(median(r[part] for r in rounds), 6) for part in PARTS}
        results[name]["step"] = round(median(sum(r.values()) for r in rounds), 6)
        results[name]["loss_share"] = round(median(r["loss"] / sum(r.values()) for r in rounds), 4)
        print(f"{name:12}", results[name])
    figures = {name: value for name, value in vars(args).items() if name != "out"}
    figures |= {"body_parameters": sum(p.numel() for p in step.policy.model.layers.parameters())}
    figures |= {"load": loads, "checks": checks, "results": results, "counted": count_shares()}
    print(f"written to {write_result('linear_step', figures, args.out, ['transformers'])}")


if __name__ == "__main__":
    main()
