"""The right answers: what a value or a gradient could be, in every world, in float64."""

from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import TypeAlias

import torch
from jaxtyping import Float64
from torch import Tensor

from kleash.auditing.worlds import VOCAB, Sampling, World, one_token_worlds, worlds
from kleash.divergences import DIVERGENCES, cross_entropy, divergence, entropy, phi

Quantity: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Of ``logp`` and ``logq`` [prefixes, vocab]: one number per prefix."""

LABELS: Mapping[str, str] = MappingProxyType(
    {
        "kl": "KL(p || q)",
        "reverse_kl": "KL(q || p)",
        "jeffreys": "KL(p || q) + KL(q || p)",
        "jensen_shannon": "Jensen-Shannon(p, q)",
        "chi_squared": "chi-squared(p || q)",
        "total_variation": "total variation(p, q)",
        "hellinger": "Hellinger(p, q)",
    }
)
"""Divergences of the table as the audit writes them."""


def label(claims: str) -> str:
    """How the audit writes a divergence of the table."""
    return LABELS.get(claims, f"{claims}(p || q)")


SYMMETRIC = ("jeffreys", "jensen_shannon", "total_variation", "hellinger")


def _mean(of_ratio: Callable[[Tensor], Tensor]) -> Quantity:
    return lambda logp, logq: (logp.exp() * of_ratio(logp - logq)).sum(-1)


def _twice(of_ratio: Callable[[Tensor], Tensor]) -> Quantity:
    return lambda logp, logq: ((2 * logp).exp() * of_ratio(logp - logq)).sum(-1)


def _likeliest(k: int, form: str, chosen_by: str) -> Quantity:
    """KL(p || q) of the k tokens that p, or q, gives most to."""

    def of(logp: Tensor, logq: Tensor) -> Tensor:
        best = (logp if chosen_by == "p" else logq).topk(k, dim=-1).indices
        p, q = logp.gather(-1, best), logq.gather(-1, best)
        if form == "renormalised":
            p, q = p.log_softmax(-1), q.log_softmax(-1)
        if form == "the rest in one bucket":
            p, q = (torch.cat([x, (1 - x.exp().sum(-1, keepdim=True)).log()], -1) for x in (p, q))
        return (p.exp() * (p - q)).sum(-1)

    return of


def _truncated() -> dict[str, Quantity]:
    found: dict[str, Quantity] = {}
    for k in range(2, VOCAB):
        for form in ("renormalised", "the rest in one bucket", "the rest dropped"):
            if form == "the rest in one bucket" and k == VOCAB - 1:
                continue  # a bucket of one token leaves nothing out
            for side, other in ("pq", "qp"):
                same, crossed = _likeliest(k, form, "p"), _likeliest(k, form, "q")
                told = f"KL({side} || {other}) of {{}}'s {k} likeliest tokens, {form}"
                if side == "p":
                    found[told.format("p")], found[told.format("q")] = same, crossed
                else:
                    found[told.format("q")], found[told.format("p")] = _exchanged(same), _exchanged(crossed)
    return found


def _exchanged(of: Quantity) -> Quantity:
    return lambda logp, logq: of(logq, logp)


@cache
def quantities() -> Mapping[str, tuple[str, Quantity]]:
    """Label -> the kind of finding it is where something else was claimed, and the quantity."""
    found: dict[str, tuple[str, Quantity]] = {
        label(name): ("other_divergence", lambda p, q, name=name: divergence(name, p, q))
        for name in DIVERGENCES
    }
    found["chi-squared(q || p)"] = ("other_divergence", lambda p, q: divergence("chi_squared", q, p))
    found["the cross-entropy of q under p"] = ("cross_entropy", cross_entropy)
    found["the cross-entropy of p under q"] = ("cross_entropy", lambda p, q: cross_entropy(q, p))
    found["the entropy of p"] = ("cross_entropy", lambda p, q: entropy(p))
    found["the entropy of q"] = ("cross_entropy", lambda p, q: entropy(q))
    found["zero"] = ("other_divergence", lambda p, q: torch.zeros(len(p), dtype=p.dtype))
    found["sum |p - q|"] = ("other_divergence", lambda p, q: 2 * divergence("total_variation", p, q))
    found["E_p (log p - log q)^2 / 2"] = ("biased_value", _mean(lambda u: u.square() / 2))
    found["E_p |log p - log q|"] = ("biased_value", _mean(torch.abs))
    found["KL(p || q) - KL(q || p)"] = (
        "other_divergence",
        lambda p, q: divergence("kl", p, q) - divergence("kl", q, p),
    )
    found["sum p^2 (log p - log q)"] = ("weighted_twice", _twice(lambda u: u))
    found["sum p^2 (log p - log q)^2 / 2"] = ("weighted_twice", _twice(lambda u: u.square() / 2))
    found["sum p^2 k3"] = ("weighted_twice", _twice(phi))
    found.update({name: ("truncated", of) for name, of in _truncated().items()})
    return MappingProxyType(found)


@cache
def quantity_values() -> Mapping[str, tuple[float, ...]]:
    """Label -> the quantity in each world of one token."""
    sides = [(w.logits_p.log_softmax(-1), w.logits_q.log_softmax(-1)) for w in one_token_worlds()]
    return MappingProxyType(
        {name: tuple(of(p, q).item() for p, q in sides) for name, (_, of) in quantities().items()}
    )


NO_GRADIENT_OF_THEIR_OWN = ("zero", "the entropy of q", "the cross-entropy of p under q")
"""In p they have none, or that of KL(q || p)."""


@cache
def gradient_candidates() -> tuple[str, ...]:
    """Labels of the quantities that a gradient may turn out to be that of."""
    return tuple(
        name
        for name, (kind, _) in quantities().items()
        if kind not in ("truncated", "weighted_twice") and name not in NO_GRADIENT_OF_THEIR_OWN
    )


@cache
def token_gradient(world_name: str, sampling: Sampling, quantity: str) -> Float64[Tensor, "prefixes vocab"]:
    """Of the quantity summed over the steps, along prefixes as they are sampled, in the policy's logits."""
    world = worlds()[world_name]
    _, of = quantities()[quantity]
    leaf = world.logits_p.clone().requires_grad_()
    each = of(leaf.log_softmax(-1), world.logits_q.log_softmax(-1))
    (gradient,) = torch.autograd.grad((prefix_weights(world, sampling) * each).sum(), leaf)
    return gradient


@cache
def sequence_gradient(world_name: str, claims: str) -> Float64[Tensor, "prefixes vocab"]:
    """Of the divergence between whole responses, in the policy's logits."""
    world = worlds()[world_name]
    leaf = world.logits_p.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(_between_responses(world, leaf, claims), leaf)
    return gradient


def _between_responses(world: World, logits_p: Tensor, claims: str) -> Tensor:
    def logs(logits: Tensor) -> Tensor:
        each = logits.log_softmax(-1)[world.prefixes]
        return each.gather(-1, world.tokens.unsqueeze(-1)).squeeze(-1).sum(-1)

    return divergence(claims, logs(logits_p), logs(world.logits_q))


@cache
def prefix_weights(world: World, sampling: Sampling) -> Float64[Tensor, " prefixes"]:
    """How likely a response reaches each prefix."""
    rows, after = world.prefixes, world.masses(sampling)
    weights = torch.zeros(len(world.logits_p), dtype=torch.float64)
    return weights.index_add(0, rows.flatten(), after.unsqueeze(-1).expand_as(rows).flatten())


@cache
def exact_values(world: World, sampling: Sampling, claims: str) -> Mapping[str, float]:
    """By level: the claimed divergence summed over sampled prefixes, and between whole responses."""
    each = divergence(claims, world.logits_p.log_softmax(-1), world.logits_q.log_softmax(-1))
    tokens = (prefix_weights(world, sampling) * each).sum().item()
    if world.steps == 1:
        return {"token": tokens}
    return {"token": tokens, "sequence": _between_responses(world, world.logits_p, claims).item()}
