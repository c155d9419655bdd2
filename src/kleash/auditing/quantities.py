"""The known quantities, exact in float64 on the toy distributions, and matching a value or a gradient with them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from math import inf, log
from types import MappingProxyType
from typing import Literal, TypeAlias

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from kleash.auditing.toy_distributions import (
    VOCAB_SIZE,
    Sampling,
    ToyDistributions,
    one_token_distributions,
    response_logp,
)
from kleash.divergences import (
    DIVERGENCES,
    at_temperature,
    cross_entropy,
    divergence,
    entropy,
    find_divergence,
    phi,
)

DistributionFunction: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""A function of ``logp`` and ``logq`` [prefixes, vocab] with one number per prefix."""

ValueOrGradient = Literal["value", "gradient"]
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
"""Key of ``DIVERGENCES`` -> its label in an audit; a divergence with a parameter is its own label."""


def label_of(claims: str) -> str:
    """The label of a divergence in an audit."""
    return LABELS.get(claims, claims)


def is_unbounded(claims: str) -> bool:
    """Whether a divergence is infinite where one distribution has no mass and the other some."""
    record = find_divergence(claims)
    return inf in (record.where_q_is_zero, record.where_p_is_zero)


@dataclass(frozen=True, kw_only=True)
class KnownQuantity:
    """A quantity that the expected value of a KL function may turn out to be."""

    kind: str
    """The kind of finding if the convention claims something else."""
    function: DistributionFunction


def _expectation(of_log_ratio: Callable[[Tensor], Tensor], weight: int = 1) -> DistributionFunction:
    """The sum over the vocabulary of a function of the log ratio times p to the power of ``weight``."""
    return lambda logp, logq: ((weight * logp).exp() * of_log_ratio(logp - logq)).sum(-1)


def _truncated_kl(k: int, remainder: str, of: str, by: str, logp: Tensor, logq: Tensor) -> Tensor:
    """The KL ``of`` one distribution from the other over the k tokens that are likeliest ``by`` p or q.

    The remainder is renormalised, in both or in the first alone, in one bucket, or dropped.
    """
    tokens = (logp if by == "p" else logq).topk(k, dim=-1).indices
    sides = (logp, logq) if of == "p ‖ q" else (logq, logp)
    p, q = (side.gather(-1, tokens) for side in sides)
    if "renormalised" in remainder:
        p, q = p.log_softmax(-1), (q if "alone" in remainder else q.log_softmax(-1))
    if remainder == "the rest in one bucket":
        p, q = (torch.cat([x, (1 - x.exp().sum(-1, keepdim=True)).log()], -1) for x in (p, q))
    return (p.exp() * (p - q)).sum(-1)


BY_VOCABULARY = " divided by the size of the vocabulary"
"""End of the label of a quantity that ``F.kl_div`` with ``reduction="mean"`` gives."""
OF_FAMILIES = tuple(
    f"{family}:{mix}"
    for family in ("skew_kl", "skew_reverse_kl", "jensen_shannon")
    for mix in (0.1, 0.2, 0.3, 0.7, 0.8, 0.9)
)
"""Divergences with a parameter that are in use, by what a convention claims."""


@cache
def known_quantities() -> Mapping[str, KnownQuantity]:
    """Label -> quantity: the divergences of the table, and what KL code computes by mistake."""
    kls = {LABELS[name]: partial(divergence, name) for name in ("kl", "reverse_kl")}
    of_temperature: dict[str, DistributionFunction] = {
        f"{label} at temperature {each:g}": lambda p, q, of=function, each=each: of(
            at_temperature(p, each), at_temperature(q, each)
        )
        for label, function in kls.items()
        for each in (0.5, 0.7, 0.8, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10)
    }
    by_kind: dict[str, dict[str, DistributionFunction]] = {
        "other_divergence": {
            **{LABELS[name]: partial(divergence, name) for name in DIVERGENCES},
            "chi-squared(q ‖ p)": lambda p, q: divergence("chi_squared", q, p),
            "zero": lambda p, q: torch.zeros(len(p), dtype=p.dtype),
            "sum |p - q|": lambda p, q: 2 * divergence("total_variation", p, q),
            "KL(p ‖ q) - KL(q ‖ p)": lambda p, q: divergence("kl", p, q) - divergence("kl", q, p),
            "(KL(m ‖ p) + KL(m ‖ q)) / 2, m the mean of p and q": lambda p, q: divergence(
                "kl", (torch.logaddexp(p, q) - log(2)).expand(2, *p.shape), torch.stack([p, q])
            ).mean(0),
            "the square root of Jensen-Shannon(p, q)": lambda p, q: divergence("jensen_shannon", p, q).sqrt(),
        },
        "cross_entropy": {
            "the cross-entropy of q under p": cross_entropy,
            "the cross-entropy of p under q": lambda p, q: cross_entropy(q, p),
            "the entropy of p": lambda p, q: entropy(p),
            "the entropy of q": lambda p, q: entropy(q),
        },
        "wrong_direction": {"chi-squared(p ‖ q) - KL(p ‖ q)": _expectation(lambda u: phi(-u))},
        "other_temperature": of_temperature,
        "wrong_scale": {
            label + BY_VOCABULARY: lambda p, q, of=function: of(p, q) / p.shape[-1]
            for label, function in {**kls, **of_temperature}.items()
        },
        "biased_value": {
            "E_p (log p - log q)^2 / 2": _expectation(lambda u: u.square() / 2),
            "E_p |log p - log q|": _expectation(torch.abs),
        },
        "weighted_twice": {
            "sum p^2 (log p - log q)": _expectation(lambda u: u, weight=2),
            "sum p^2 (log p - log q)^2 / 2": _expectation(lambda u: u.square() / 2, weight=2),
            "sum p^2 k3": _expectation(phi, weight=2),
        },
        "truncated": {
            f"KL({of}) of {by}'s {k} likeliest tokens, {remainder.format(of[0])}": partial(
                _truncated_kl, k, remainder, of, by
            )
            for k, remainder, of, by in product(
                range(2, VOCAB_SIZE),
                ("renormalised", "{} alone renormalised", "the rest in one bucket", "the rest dropped"),
                ("p ‖ q", "q ‖ p"),
                "pq",
            )
            if (k, remainder) != (VOCAB_SIZE - 1, "the rest in one bucket")  # which leaves nothing out
        },
    }
    return MappingProxyType(
        {
            label: KnownQuantity(kind=kind, function=function)
            for kind, functions in by_kind.items()
            for label, function in functions.items()
        }
    )


EXCHANGED = ", p and q exchanged"
"""End of the label of a divergence with a parameter and its arguments in the other order."""


def quantity_of(label: str) -> KnownQuantity:
    """The known quantity of a label, or the divergence with a parameter that a label is."""
    known = known_quantities()
    if label in known:
        return known[label]
    record = find_divergence(label.removesuffix(EXCHANGED))
    record = record.swapped if label.endswith(EXCHANGED) else record
    return KnownQuantity(kind="other_divergence", function=partial(divergence, record))


VALUES_ONLY = ("truncated", "weighted_twice", "zero", "the entropy of q", "the cross-entropy of p under q")
"""Two kinds of quantities that no gradient is compared with, and three whose gradient is zero or that of KL(q || p)."""


@cache
def prefix_probabilities(toy: ToyDistributions, sampling: Sampling) -> Float64[Tensor, " prefixes"]:
    """The probability that a sampled response begins with each prefix."""
    rows, probabilities = toy.prefix_rows, toy.probabilities(sampling)
    sums = torch.zeros(len(toy.logits_p), dtype=torch.float64)
    return sums.index_add(0, rows.flatten(), probabilities.unsqueeze(-1).expand_as(rows).flatten())


@cache
def exact(
    of: ValueOrGradient, toy: ToyDistributions, sampling: Sampling, label: str
) -> Mapping[str, Float64[Tensor, "*prefixes_vocab"]]:
    """Level -> a quantity, or its gradient in the policy's logits.

    Level "token" is the sum over the sampled prefixes, which the gradient holds as sampled; for responses of several
    tokens "sequence" is the quantity of the distributions over whole responses.
    """
    function, logits = quantity_of(label).function, toy.logits_p.clone().requires_grad_()
    by_prefix = function(logits.log_softmax(-1), toy.logits_q.log_softmax(-1))
    values = {"token": (prefix_probabilities(toy, sampling) * by_prefix).sum()}
    if toy.steps > 1:
        p, q = (response_logp(toy, side).unsqueeze(0) for side in (logits, toy.logits_q))
        values["sequence"] = function(p, q).squeeze(0)
    if of == "value":
        return {level: value.detach() for level, value in values.items()}
    return {
        level: torch.autograd.grad(value, logits, retain_graph=True)[0] for level, value in values.items()
    }


@cache
def candidates(of: ValueOrGradient, claimed: str) -> Mapping[str, Float64[Tensor, "pairs entries"]]:
    """Label -> the claimed and each known quantity that a value or a gradient may be, on the one-token distributions.

    Without quantities divided by the size of the vocabulary, which is the same on all of them.
    """
    logits = torch.cat([toy.logits_p for toy in one_token_distributions()]).requires_grad_()
    logq = torch.cat([toy.logits_q for toy in one_token_distributions()]).log_softmax(-1)
    exchanged = () if claimed in known_quantities() else (claimed + EXCHANGED,)
    left_out = {"wrong_scale", *(VALUES_ONLY if of == "gradient" else ())}
    values = {
        label: quantity_of(label).function(logits.log_softmax(-1), logq)
        for label in dict.fromkeys((claimed, *exchanged, *known_quantities(), *OF_FAMILIES))
        if left_out.isdisjoint((quantity_of(label).kind, label))
    }
    if of == "value":
        return MappingProxyType({label: each.detach().unsqueeze(-1) for label, each in values.items()})
    return MappingProxyType(
        {label: torch.autograd.grad(each.sum(), logits)[0] for label, each in values.items()}
    )


TOLERANCE = 1e-3
"""Relative; a function may compute in float32, and no two quantities agree so closely on every pair."""

NEGLIGIBLE = 1e-5
"""A smaller multiple counts as zero: a function may compute in float32."""

ROUNDING = 1e-6
"""A difference in nats that is no difference."""

MODERATE_PAIRS = ("near", "peaked", "flat")
"""The pairs on which no log ratio is large."""

MAX_STANDARD_ERRORS = 8.0
"""By how many standard errors the mean of a random function may differ."""

Relation = Literal["itself", "shifted", "multiple"]


@dataclass(frozen=True, kw_only=True)
class QuantityMatch:
    """A known quantity that an expected value or gradient was matched with."""

    quantity: str
    """Its label."""
    relation: Relation
    factor: float = 1.0
    """The multiple, or for "shifted" the constant that is added."""
    everywhere: bool = True
    """False if it matches only on the pairs without large log ratios."""

    @property
    def restriction(self) -> str:
        """Where it is true, as the end of a clause; "" everywhere."""
        return "" if self.everywhere else ", where no log ratio is large"

    def __str__(self) -> str:
        """The label with the factor or the constant."""
        if self.relation == "itself":
            return self.quantity
        if self.relation == "shifted":
            return f"{self.quantity} {'+' if self.factor > 0 else '-'} {abs(self.factor):.4g}"
        is_sum = " + " in self.quantity or " - " in self.quantity
        multiple = "-" if abs(self.factor + 1) < TOLERANCE else f"{self.factor:.4g} x "
        return multiple + (f"({self.quantity})" if is_sum else self.quantity)


def is_quantity(match: QuantityMatch | None, label: str, *, everywhere: bool = True) -> bool:
    """Whether the match is this quantity itself, neither scaled nor shifted; with ``everywhere``, on every pair."""
    if match is None or (match.quantity, match.relation) != (label, "itself"):
        return False
    return match.everywhere or not everywhere


def match_quantity(
    measured: Float[Tensor, "pairs entries"],
    candidates: Mapping[str, Float[Tensor, "pairs entries"]],
    pairs: Sequence[str],
    claimed: str,
    errors: Float[Tensor, " pairs"] | None = None,
) -> QuantityMatch | None:
    """The candidate that is measured on every pair, or else on the moderate pairs.

    Args:
        measured: the expected value on each pair, or the entries of the expected gradient, of which none is a shift.
        candidates: label -> the quantity on each pair; the first that fits is taken.
        pairs: the names of the pairs.
        claimed: the label of the claimed divergence.
        errors: standard errors of ``measured``, as a norm.
    """
    targets = torch.stack([*candidates.values()])
    noise = torch.zeros(len(pairs)) if errors is None else MAX_STANDARD_ERRORS * errors
    is_gradient = measured.shape[1] > 1
    relations: tuple[Relation, ...] = (
        ("itself", "multiple") if is_gradient else ("itself", "shifted", "multiple")
    )
    for rows in torch.tensor([[True] * len(pairs), [pair in MODERATE_PAIRS for pair in pairs]]):
        everywhere, part, slack = bool(rows.all()), measured[rows], noise[rows]
        norms = candidates[claimed][rows].norm(dim=-1)
        is_zero = part.norm(dim=-1) < NEGLIGIBLE * norms + torch.minimum(slack, norms / 4)
        if is_gradient and bool(is_zero.all()):
            return QuantityMatch(quantity="zero", relation="itself", everywhere=everywhere)
        for relation in relations:
            factors, is_match = _factors(relation, part, targets[:, rows], slack)
            for quantity, factor, is_this in zip(
                candidates, factors.tolist(), is_match.tolist(), strict=True
            ):
                if is_this:
                    return QuantityMatch(
                        quantity=quantity, relation=relation, factor=factor, everywhere=everywhere
                    )
    return None


def _factors(
    relation: Relation,
    measured: Float[Tensor, "pairs entries"],
    targets: Float[Tensor, "labels pairs entries"],
    slack: Float[Tensor, " pairs"],
) -> tuple[Float[Tensor, " labels"], Bool[Tensor, " labels"]]:
    """The factors or shifts by which what is measured may follow from each target, and whether it does on all pairs.

    Args:
        relation: how what is measured may follow from a target.
        measured: values or gradients of the function on each pair of distributions.
        targets: those of each known quantity.
        slack: error of ``measured`` that is allowed on each pair, as a norm; pairs with a smaller relative one count
            more in the factor.
    """
    factors, expected, rounding = targets.new_ones(len(targets)), targets, torch.tensor(ROUNDING)
    if relation == "shifted":
        factors = (measured - targets).mean((1, 2))
        expected = targets + factors[:, None, None]
    if relation == "multiple":
        norms = targets.norm(dim=-1)
        weights = (TOLERANCE + slack / norms) ** -2
        products = (measured * targets).sum(-1) / norms.square()
        factors = (products * weights).sum(-1) / weights.sum(-1)  # NaN if the target is 0 on a pair
        expected = factors[:, None, None] * targets
        rounding = ROUNDING * factors.abs().clamp(max=1).unsqueeze(-1)
    allowed = TOLERANCE * expected.norm(dim=-1) + rounding + slack
    is_close = ((measured - expected).norm(dim=-1) <= allowed).all(-1)
    if relation != "itself":  # noise larger than the value leaves room for any factor
        is_close &= (slack <= expected.norm(dim=-1)).all(-1)
    return factors, is_close & ((factors.abs() > NEGLIGIBLE) | torch.tensor(relation == "shifted"))


def cosine_similarities(
    gradient: Float[Tensor, " entries"], targets: Float[Tensor, "labels entries"]
) -> Float[Tensor, " labels"]:
    """The cosine between a gradient and each target; NaN if either is zero, or the first only rounding error."""
    size, sizes = gradient.norm(), targets.norm(dim=-1)
    return torch.where(size < 1e-6 * sizes, torch.nan, targets @ gradient / (size * sizes))
