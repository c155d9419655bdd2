"""The quantities that a value or a gradient is compared with, exact in float64 on the toy distributions."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from math import inf
from types import MappingProxyType
from typing import TypeAlias

import torch
from jaxtyping import Float64
from torch import Tensor

from kleash.auditing.toy_distributions import (
    VOCAB_SIZE,
    Sampling,
    ToyDistributions,
    one_token_distributions,
    toy_distributions,
)
from kleash.divergences import DIVERGENCES, Divergence, cross_entropy, divergence, entropy, phi

DistributionFunction: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""A function of ``logp`` and ``logq`` [prefixes, vocab] with one number per prefix."""

LABELS: Mapping[str, str] = MappingProxyType(
    {
        "kl": "KL(p ‖ q)",
        "reverse_kl": "KL(q ‖ p)",
        "jeffreys": "KL(p ‖ q) + KL(q ‖ p)",
        "jensen_shannon": "Jensen-Shannon(p, q)",
        "chi_squared": "chi-squared(p ‖ q)",
        "total_variation": "total variation(p, q)",
        "hellinger": "Hellinger(p, q)",
    }
)
"""Key of ``DIVERGENCES`` -> its label in an audit."""


def _is_symmetric(record: Divergence) -> bool:
    """Whether D(p || q) = D(q || p), from the generators at a few log ratios."""
    u = torch.linspace(-8.0, 8.0, 33, dtype=torch.float64)
    return torch.allclose(record.of(u), record.swapped.of(u), rtol=1e-12, atol=1e-15)


SYMMETRIC = tuple(name for name, record in DIVERGENCES.items() if _is_symmetric(record))
"""Divergences for which an audited function must not depend on the order of p and q."""
UNBOUNDED = tuple(
    name for name, record in DIVERGENCES.items() if inf in (record.where_q_is_zero, record.where_p_is_zero)
)
"""Divergences that are infinite where one distribution has no mass and the other some."""


def divergence_label(name: str) -> str:
    """The label of a divergence in an audit."""
    return LABELS.get(name, f"{name}(p ‖ q)")


@dataclass(frozen=True, kw_only=True)
class KnownQuantity:
    """A quantity that the expected value of a KL function may turn out to be."""

    kind: str
    """The kind of finding if the convention claims something else."""
    function: DistributionFunction


def _expectation(of_log_ratio: Callable[[Tensor], Tensor]) -> DistributionFunction:
    return lambda logp, logq: (logp.exp() * of_log_ratio(logp - logq)).sum(-1)


def _weighted_twice(of_log_ratio: Callable[[Tensor], Tensor]) -> DistributionFunction:
    return lambda logp, logq: ((2 * logp).exp() * of_log_ratio(logp - logq)).sum(-1)


def _top_k_kl(k: int, remainder: str, chosen_by: str) -> DistributionFunction:
    """KL(p || q) of the k tokens most likely under p, or under q."""

    def truncated_kl(logp: Tensor, logq: Tensor) -> Tensor:
        tokens = (logp if chosen_by == "p" else logq).topk(k, dim=-1).indices
        p, q = logp.gather(-1, tokens), logq.gather(-1, tokens)
        if remainder == "renormalised":
            p, q = p.log_softmax(-1), q.log_softmax(-1)
        if remainder == "the rest in one bucket":
            p, q = (torch.cat([x, (1 - x.exp().sum(-1, keepdim=True)).log()], -1) for x in (p, q))
        return (p.exp() * (p - q)).sum(-1)

    return truncated_kl


def _exchanged(function: DistributionFunction) -> DistributionFunction:
    return lambda logp, logq: function(logq, logp)


def _truncated_quantities() -> dict[str, DistributionFunction]:
    """KLs over the likeliest tokens only, with the rest renormalised, in one bucket or dropped."""
    functions: dict[str, DistributionFunction] = {}
    for k in range(2, VOCAB_SIZE):
        for remainder in ("renormalised", "the rest in one bucket", "the rest dropped"):
            if remainder == "the rest in one bucket" and k == VOCAB_SIZE - 1:
                continue  # a bucket of one token leaves nothing out
            by_p, by_q = _top_k_kl(k, remainder, "p"), _top_k_kl(k, remainder, "q")
            for first, second in ("pq", "qp"):
                label = f"KL({first} ‖ {second}) of {{}}'s {k} likeliest tokens, {remainder}"
                if first == "p":
                    functions[label.format("p")], functions[label.format("q")] = by_p, by_q
                else:
                    functions[label.format("q")] = _exchanged(by_p)
                    functions[label.format("p")] = _exchanged(by_q)
    return functions


@cache
def known_quantities() -> Mapping[str, KnownQuantity]:
    """Label -> quantity: the divergences of the table, and what KL code computes by mistake."""
    by_kind: dict[str, dict[str, DistributionFunction]] = {
        "other_divergence": {
            **{divergence_label(name): _divergence(name) for name in DIVERGENCES},
            "chi-squared(q ‖ p)": _exchanged(_divergence("chi_squared")),
        },
        "cross_entropy": {
            "the cross-entropy of q under p": cross_entropy,
            "the cross-entropy of p under q": _exchanged(cross_entropy),
            "the entropy of p": lambda p, q: entropy(p),
            "the entropy of q": lambda p, q: entropy(q),
        },
    }
    quantities = {
        label: KnownQuantity(kind=kind, function=function)
        for kind, functions in by_kind.items()
        for label, function in functions.items()
    }

    def add(kind: str, label: str, function: DistributionFunction) -> None:
        quantities[label] = KnownQuantity(kind=kind, function=function)

    add("other_divergence", "zero", lambda p, q: torch.zeros(len(p), dtype=p.dtype))
    add("other_divergence", "sum |p - q|", lambda p, q: 2 * divergence("total_variation", p, q))
    add("biased_value", "E_p (log p - log q)^2 / 2", _expectation(lambda u: u.square() / 2))
    add("biased_value", "E_p |log p - log q|", _expectation(torch.abs))
    add(
        "other_divergence",
        "KL(p ‖ q) - KL(q ‖ p)",
        lambda p, q: divergence("kl", p, q) - divergence("kl", q, p),
    )
    add("weighted_twice", "sum p^2 (log p - log q)", _weighted_twice(lambda u: u))
    add("weighted_twice", "sum p^2 (log p - log q)^2 / 2", _weighted_twice(lambda u: u.square() / 2))
    add("weighted_twice", "sum p^2 k3", _weighted_twice(phi))
    for label, function in _truncated_quantities().items():
        add("truncated", label, function)
    return MappingProxyType(quantities)


def _divergence(name: str) -> DistributionFunction:
    return lambda logp, logq: divergence(name, logp, logq)


@cache
def quantity_values() -> Mapping[str, tuple[float, ...]]:
    """Label -> the quantity on each of the one-token distributions."""
    pairs = [
        (toy.logits_p.log_softmax(-1), toy.logits_q.log_softmax(-1)) for toy in one_token_distributions()
    ]
    return MappingProxyType(
        {
            label: tuple(quantity.function(p, q).item() for p, q in pairs)
            for label, quantity in known_quantities().items()
        }
    )


GRADIENT_EXCLUDED = ("zero", "the entropy of q", "the cross-entropy of p under q")
"""Quantities whose gradient in p is zero, or that of KL(q || p)."""


@cache
def gradient_candidates() -> tuple[str, ...]:
    """Labels of the quantities whose gradients an expected gradient is compared with."""
    return tuple(
        label
        for label, quantity in known_quantities().items()
        if quantity.kind not in ("truncated", "weighted_twice") and label not in GRADIENT_EXCLUDED
    )


@cache
def token_gradient(toy_name: str, sampling: Sampling, label: str) -> Float64[Tensor, "prefixes vocab"]:
    """The gradient in the policy's logits of a quantity summed over the steps, prefixes held as sampled."""
    toy = toy_distributions()[toy_name]
    logits = toy.logits_p.clone().requires_grad_()
    by_prefix = known_quantities()[label].function(logits.log_softmax(-1), toy.logits_q.log_softmax(-1))
    (gradient,) = torch.autograd.grad((prefix_probabilities(toy, sampling) * by_prefix).sum(), logits)
    return gradient


@cache
def sequence_gradient(toy_name: str, label: str) -> Float64[Tensor, "prefixes vocab"]:
    """The gradient in the policy's logits of a quantity of the distributions over whole responses."""
    toy = toy_distributions()[toy_name]
    logits = toy.logits_p.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(_of_responses(toy, logits, label), logits)
    return gradient


def _of_responses(toy: ToyDistributions, logits_p: Tensor, label: str) -> Tensor:
    """A quantity of the distributions over whole responses, p given by ``logits_p``."""

    def sequence_logp(logits: Tensor) -> Tensor:
        logp = logits.log_softmax(-1)[toy.prefix_rows]
        return logp.gather(-1, toy.tokens.unsqueeze(-1)).squeeze(-1).sum(-1)

    p, q = sequence_logp(logits_p).unsqueeze(0), sequence_logp(toy.logits_q).unsqueeze(0)
    return known_quantities()[label].function(p, q).squeeze(0)


@cache
def prefix_probabilities(toy: ToyDistributions, sampling: Sampling) -> Float64[Tensor, " prefixes"]:
    """The probability that a sampled response begins with each prefix."""
    rows, probabilities = toy.prefix_rows, toy.probabilities(sampling)
    sums = torch.zeros(len(toy.logits_p), dtype=torch.float64)
    return sums.index_add(0, rows.flatten(), probabilities.unsqueeze(-1).expand_as(rows).flatten())


@cache
def exact_values(toy: ToyDistributions, sampling: Sampling, label: str) -> Mapping[str, float]:
    """Level -> the quantity: "token" summed over sampled prefixes, "sequence" of whole responses."""
    logp, logq = toy.logits_p.log_softmax(-1), toy.logits_q.log_softmax(-1)
    by_prefix = known_quantities()[label].function(logp, logq)
    token_sum = (prefix_probabilities(toy, sampling) * by_prefix).sum().item()
    if toy.steps == 1:
        return {"token": token_sum}
    return {"token": token_sum, "sequence": _of_responses(toy, toy.logits_p, label).item()}
