"""Accuracy of each method for the KL and its gradient, from bfloat16 inputs, for near and distant models.

    python benchmarks/linear_accuracy.py
    python benchmarks/linear_accuracy.py --only kleash trl

Two policies one optimiser step apart differ by 1e-6 to 1e-3 nats. For each distance, inputs are generated whose KL,
after rounding to bfloat16, is that distance. The exact values are computed in float64 from the same rounded inputs,
with all logits. Written are the relative error of the mean over all tokens, the median relative error of a single
token's KL and the share of tokens with a negative KL (each method is called with one token at a time for these,
``--single`` of them), and the cosines between the gradients of the mean and the exact gradients.
"""

from statistics import median
from typing import Any

import torch
from harness import parser_of, write_result
from linear_methods import (
    METHODS,
    OTHER_LOSSES,
    PACKAGES,
    Inputs,
    cosine,
    gradients,
    make_inputs,
    naive_exact,
)
from torch import Tensor

DISTANCES = (1e-6, 1.7e-5, 2.6e-4, 1.0)


def naive_upcast(x: Inputs) -> Tensor:
    """The naive exact KL with hidden states and heads converted to float32 first."""
    upcast = (x.hidden_p.float(), x.weight_p.float(), x.hidden_q.float(), x.weight_q.float())
    return naive_exact(Inputs(*upcast, x.ids))


WAYS = {name: method for name, method in METHODS.items() if name not in OTHER_LOSSES}
WAYS["naive upcast"] = naive_upcast


def exact(x: Inputs) -> Tensor:
    """KL(p || q) of each token in float64, with all logits."""
    logp, logq = (
        (hidden.double() @ weight.double().T).log_softmax(-1)
        for hidden, weight in ((x.hidden_p, x.weight_p), (x.hidden_q, x.weight_q))
    )
    return (logp.exp() * (logp - logq)).sum(-1)


def at_distance(nats: float, size: tuple[int, int, int], dtype: torch.dtype = torch.bfloat16) -> Inputs:
    """Inputs whose mean KL is within 5 % of ``nats``, by bisection over the distance."""
    low, high, mean_kl = 1e-6, 1e3, float("nan")
    for _ in range(40):
        middle = (low * high) ** 0.5
        x = make_inputs(*size, distance=middle, dtype=dtype)
        with torch.no_grad():
            mean_kl = exact(x).mean().item()
        if abs(mean_kl / nats - 1) < 0.05:
            return x
        low, high = (middle, high) if mean_kl < nats else (low, middle)
    raise SystemExit(f"no inputs of {size} in {dtype} are {nats} nats apart: {mean_kl} is the nearest")


def measure_errors(name: str, x: Inputs, single: int) -> dict[str, float]:
    """The errors of one method on these inputs."""
    wide = x.to(torch.float64)
    exact_kl = exact(wide)
    exact_gradients = gradients(wide, exact_kl.mean())
    loss = WAYS[name](x)
    value = loss.item()
    in_hidden, in_weight = gradients(x, loss)
    with torch.no_grad():
        token_values = [WAYS[name](x.at(i)).item() for i in range(single)]
    errors = [abs(a / b - 1) for a, b in zip(token_values, exact_kl.tolist(), strict=False)]
    return {
        "kl": exact_kl.mean().item(),
        "value": value,
        "relative_error": abs(value / exact_kl.mean().item() - 1),
        "median_error_of_a_token": median(errors),
        "negative_share": sum(a < 0 for a in token_values) / len(token_values),
        "cosine_hidden": cosine(in_hidden, exact_gradients[0]),
        "cosine_weight": cosine(in_weight, exact_gradients[1]),
    }


def main() -> None:
    parser = parser_of(__doc__, tokens=64, hidden=512, vocabulary=32_768, single=32, threads=2)
    parser.add_argument("--only", nargs="*", choices=WAYS, default=list(WAYS))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    size = (args.tokens, args.hidden, args.vocabulary)
    rows: list[dict[str, Any]] = []
    for nats in DISTANCES:
        x = at_distance(nats, size)
        for name in args.only:
            rows.append({"name": name, "nats": nats, **measure_errors(name, x, args.single)})
            print(
                "{name:16} KL {nats:7.1e}  value {relative_error:8.1e}  token {median_error_of_a_token:8.1e} "
                " negative {negative_share:4.2f}  cosines {cosine_hidden:8.5f} {cosine_weight:8.5f}".format(
                    **rows[-1]
                )
            )
    print(f"written to {write_result('linear_accuracy', vars(args) | {'rows': rows}, packages=PACKAGES)}")


if __name__ == "__main__":
    main()
