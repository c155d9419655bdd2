"""Accuracy of KL(q || p) and its gradient from a cached softmax(z_q) W; the reason why kleash has no such cache.

    python benchmarks/linear_cached_mean.py

With one frozen head W for both models the gradient of KL(q || p) in p's hidden states is (p - q) W. If q W and the
entropy of q were cached with the reference, two products with W would be needed instead of three:

    gradient = p W - cached        value = logsumexp(h_p W^T) - h_p . cached - entropy(q)

Both ways are computed in float32 and compared with float64 on the same inputs. The cache is in float32 or, like cached
hidden states, in bfloat16. For the value, the median relative error over tokens and the share of negative tokens are
written; for the gradient, its cosine with the exact gradient and its relative error.
"""

import argparse
from typing import Any

import torch
from harness import write_result
from torch import Tensor
from torch.nn.functional import cosine_similarity

from kleash.linear import Head, linear_divergence

DISTANCES = 1.0, 0.1, 0.01, 1e-3


def from_cache(
    hidden_p: Tensor, hidden_q: Tensor, weight: Tensor, cache_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Value and gradient with two products; what is cached is computed in float64, so only its rounding counts."""
    logq = (hidden_q.double() @ weight.double().T).log_softmax(-1)
    mean = (logq.exp() @ weight.double()).to(cache_dtype).float()
    entropy = -(logq.exp() * logq).sum(-1).float()
    z = hidden_p @ weight.T
    total = z.logsumexp(-1, keepdim=True)
    value = total[:, 0] - (hidden_p * mean).sum(-1) - entropy
    return value, (z - total).exp() @ weight - mean


def ours(hidden_p: Tensor, hidden_q: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Value and gradient with three products."""
    leaf = hidden_p.clone().requires_grad_()
    head = Head(weight)
    value = linear_divergence(hidden_q, head, leaf, head)
    return value.detach(), torch.autograd.grad(value.sum(), leaf)[0]


def errors(result: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor]) -> dict[str, float]:
    value, gradient = (x.double() for x in result)
    difference = (gradient - exact[1]).norm() / exact[1].norm()
    return {
        "value": float(f"{((value - exact[0]).abs() / exact[0]).median():.1e}"),
        "below_0": round(float((value < 0).double().mean()), 3),
        "cosine": round(float(cosine_similarity(gradient.flatten(), exact[1].flatten(), dim=0)), 6),
        "gradient": float(f"{difference:.1e}"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=32_768)
    parser.add_argument("--hidden", type=int, default=256)
    args = parser.parse_args()
    torch.manual_seed(0)
    weight = torch.randn(args.vocabulary, args.hidden) / args.hidden**0.5
    hidden_q = 3 * torch.randn(args.tokens, args.hidden)
    figures: dict[str, Any] = vars(args)
    for distance in DISTANCES:
        hidden_p = hidden_q + distance * torch.randn(args.tokens, args.hidden)
        inputs = hidden_p, hidden_q, weight
        exact = ours(*(x.double() for x in inputs))
        results = {
            "kleash": ours(*inputs),
            "cache in float32": from_cache(*inputs, torch.float32),
            "cache in bfloat16": from_cache(*inputs, torch.bfloat16),
        }
        nats = f"{exact[0].median():.1e} nats"
        figures[nats] = {name: errors(x, exact) for name, x in results.items()}
        for name, x in figures[nats].items():
            print(f"{nats:12} {name:18} {x}")
    print(f"written to {write_result('linear_cached_mean', figures)}")


if __name__ == "__main__":
    main()
