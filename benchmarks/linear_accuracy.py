"""How right each way to a KL is, in value and gradient, from bfloat16 inputs, near and far.

    python benchmarks/linear_accuracy.py
    python benchmarks/linear_accuracy.py --only kleash trl

Two policies one optimiser step apart differ by 1e-6 to 1e-3 nats. For each distance the inputs are moved apart
until the KL of the *rounded* inputs is what was asked for; what is right is then computed from the same rounded
inputs in float64, with all logits. Written are the relative error of the mean over all tokens, the median
relative error of one token's own KL and how many of those are negative (each way is called with one token
at a time for that), and the cosines of the gradients of the mean with the right ones.
"""

import argparse
from pathlib import Path
from statistics import median
from typing import Any

import torch
from harness import RESULTS, write_result
from linear_methods import METHODS, PACKAGES, Inputs, Method, cosine, gradients, make_inputs, naive_exact
from torch import Tensor

DISTANCES = (1e-6, 1.7e-5, 2.6e-4, 1.0)


def naive_upcast(x: Inputs) -> Tensor:
    """What one gets who knows that bfloat16 logits are too coarse, and pays for it."""
    upcast = (x.hidden_p.float(), x.weight_p.float(), x.hidden_q.float(), x.weight_q.float())
    return naive_exact(Inputs(*upcast, x.ids))


WAYS = {name: method for name, method in METHODS.items() if method.what == "kl"} | {
    "naive upcast": Method(of=naive_upcast, words="naive exact, hidden states and heads made float32 first")
}


def exact(x: Inputs) -> Tensor:
    """KL(p || q) of each token in float64, with all logits."""
    logp, logq = (
        (hidden.double() @ weight.double().T).log_softmax(-1)
        for hidden, weight in ((x.hidden_p, x.weight_p), (x.hidden_q, x.weight_q))
    )
    return (logp.exp() * (logp - logq)).sum(-1)


def at_distance(nats: float, size: tuple[int, int, int], dtype: torch.dtype = torch.bfloat16) -> Inputs:
    """Inputs whose mean KL is within a twentieth of this, found by bisection."""
    low, high = 1e-6, 1e3
    for _ in range(40):
        middle = (low * high) ** 0.5
        x = make_inputs(*size, apart=middle, dtype=dtype)
        with torch.no_grad():
            found = exact(x).mean().item()
        if abs(found / nats - 1) < 0.05:
            return x
        low, high = (middle, high) if found < nats else (low, middle)
    raise SystemExit(f"no inputs of {size} in {dtype} are {nats} nats apart: {found} is the nearest")


def measured(name: str, x: Inputs, single: int) -> dict[str, float]:
    """The errors of one way on these inputs."""
    wide = x.to(torch.float64)
    right = exact(wide)
    right_gradients = gradients(wide, right.mean())
    loss = WAYS[name].of(x)
    value = loss.item()
    in_hidden, in_weight = gradients(x, loss)
    with torch.no_grad():
        alone = [WAYS[name].of(x.at(i)).item() for i in range(single)]
    errors = [abs(a / b - 1) for a, b in zip(alone, right.tolist(), strict=False)]
    return {
        "kl": right.mean().item(),
        "value": value,
        "relative_error": abs(value / right.mean().item() - 1),
        "median_error_of_a_token": median(errors),
        "negative_share": sum(a < 0 for a in alone) / len(alone),
        "cosine_hidden": cosine(in_hidden, right_gradients[0]),
        "cosine_weight": cosine(in_weight, right_gradients[1]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=32_768)
    parser.add_argument("--single", type=int, default=32, help="tokens whose KL is computed one by one")
    parser.add_argument("--only", nargs="*", choices=WAYS, default=list(WAYS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    size = (args.tokens, args.hidden, args.vocabulary)
    rows: list[dict[str, Any]] = []
    for nats in DISTANCES:
        x = at_distance(nats, size)
        for name in args.only:
            rows.append({"name": name, "nats": nats, **measured(name, x, args.single)})
            print(
                "{name:16} KL {nats:7.1e}  value {relative_error:8.1e}  token {median_error_of_a_token:8.1e} "
                " negative {negative_share:4.2f}  cosines {cosine_hidden:8.5f} {cosine_weight:8.5f}".format(
                    **rows[-1]
                )
            )
    figures = {
        **{name: getattr(args, name) for name in ("tokens", "hidden", "vocabulary", "single")},
        "words": {name: WAYS[name].words for name in args.only},
        "rows": rows,
    }
    print(f"written to {write_result('linear_accuracy', figures, args.out, PACKAGES)}")


if __name__ == "__main__":
    main()
