"""What the likeliest tokens alone certify about a divergence: a lower bound, and an upper one."""

from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from kleash.arguments import validated
from kleash.divergences import DIVERGENCES, Divergence
from kleash.divergences.functions import contributions
from kleash.errors import ShapeError
from kleash.precision import at_least_float32
from kleash.registry import look_up

NORMALISER_NATS = 32.0
"""A log-sum-exp of about this size was subtracted to make a log-probability, and left its rounding in it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Tail:
    """Between what each token outside the head lies, in nats; numbers, or one per position. By default: anything."""

    logp_least: Float[Tensor, "*any"] | float = -inf
    """No token outside is less likely than this under ``p``."""
    logp_most: Float[Tensor, "*any"] | float = 0.0
    """Nor more likely: the least of ``p``'s own top k, where the head holds all of these."""
    logq_least: Float[Tensor, "*any"] | float = -inf
    """The floor on ``q``, without which a KL has no upper bound."""
    logq_most: Float[Tensor, "*any"] | float = 0.0
    """The least of ``q``'s own top k, where the head holds all of these."""


UNKNOWN = Tail()


class KLBounds(NamedTuple):
    """Between what the divergence lies, and how much of both distributions was seen; in float64."""

    lower: Float64[Tensor, "*batch"]
    upper: Float64[Tensor, "*batch"]
    """``inf`` where nothing forbids it."""
    mass_p: Float64[Tensor, "*batch"]
    """The probability of the head under ``p``, as given: rounding may put it above 1."""
    mass_q: Float64[Tensor, "*batch"]


class _Range(NamedTuple):
    """Log-probabilities, each known to lie between two."""

    low: Tensor
    high: Tensor


@validated
def kl_bounds(
    head_logp: Float[Tensor, "*batch_p head_p"],
    head_logq: Float[Tensor, "*batch_q head_q"],
    *,
    divergence: str | Divergence = "kl",
    tail: Tail | None = UNKNOWN,
    error_nats: float | None = None,
) -> KLBounds:
    """Bounds on D(p || q) from some tokens' log-probabilities under both; no gradient.

        lower = head's sum + Q F(P/Q)                     P, Q: the masses outside; F(t) = t f(log t)
        upper = head's sum + [(P - mQ) F(M)/M + (Q - P/M) F(m)] / (1 - m/M)

    Lower: each token adds q F(p/q), F convex, so by Jensen's inequality the tokens outside add at least
    Q F(P/Q): one bucket holds them all. Renormalising the head, or dropping the rest, bounds nothing.

    Upper: outside, p/q lies between ``m`` = least p / most q and ``M`` = most p / least q, where F is below
    its chord. A sum of q times a linear function of p/q depends on P and Q alone: it is that of one token of
    ratio M and one of ratio m. Reached where tokens of these ratios fit, so up to whole numbers of tokens
    nothing better follows. Most p is at most P, most q at most Q. With a floor ``b`` on q alone, for KL: the
    head's p (log p - log q), plus P (log P - log b). Total variation, Hellinger and Jensen-Shannon, finite
    where a side is 0, need no limit.

    Both hold for every pair within ``error_nats`` of what is given: the lower bound moves every mass towards
    its partner by that much, the upper one away. A head heavier than 1 by more than that belongs to no
    distribution, and tails whose limits contradict their masses to no pair: NaN. So does NaN in the head. A
    token with -inf on both sides is padding; -inf on one is a zero, taken at its word.

    Args:
        head_logp: natural log-probabilities, full softmax, of distinct tokens under ``p``: its top k, a
            teacher's, the union.
        head_logq: the same tokens under ``q`` (``shared_head`` finds them in two top-k lists).
        divergence: a name of ``DIVERGENCES``, or a record.
        tail: what else is known of the tokens outside; None if there are none.
        error_nats: how far a log-probability may be from the true one. Left out, what its dtype and the
            softmax that made it round off: about 4e-6 in float32, 1/128 of its size in bfloat16.

    Raises:
        UnknownNameError: if there is no such divergence.
        ShapeError: if the two differ in shape, or are not floating-point.

    References:
        Liese & Vajda, "On Divergences and Informations in Statistics and Information Theory" (2006).
    """
    record = look_up(DIVERGENCES, divergence, "divergence") if isinstance(divergence, str) else divergence
    _require_heads(head_logp, head_logq)
    with torch.no_grad():
        p, q = _range(head_logp, error_nats), _range(head_logq, error_nats)
        lower, upper = _nearest(record, p, q).sum(-1), _farthest(record, p, q).sum(-1)
        if tail is not None:
            rest_p, rest_q = _outside(p), _outside(q)
            lower = lower + _nearest(record, rest_p, rest_q).squeeze(-1)
            upper = upper + _chord(record, rest_p, rest_q, tail).squeeze(-1)
        mass_p, mass_q = (x.to(torch.float64).exp().sum(-1) for x in (head_logp, head_logq))
        return KLBounds(record.finish(lower), record.finish(upper), mass_p, mass_q)


@validated
def rounding_nats(logp: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """How far each may be from the true one, by its dtype and by the softmax that made it."""
    own, arithmetic = torch.finfo(logp.dtype).eps, torch.finfo(at_least_float32(logp).dtype).eps
    size = torch.where(logp.isinf(), 0.0, at_least_float32(logp).abs())
    return size * own + NORMALISER_NATS * arithmetic


class SharedHead(NamedTuple):
    """The tokens that two top-k lists have in common, as ``kl_bounds`` takes them."""

    logp: Float[Tensor, "*batch k"]
    """As long as p's list; -inf where a token is not in q's."""
    logq: Float[Tensor, "*batch k"]
    tail: Tail
    """The most that a token outside can have under either: by the lists' ends, what was left out, and rounding."""


@validated
def shared_head(
    ids_p: Int[Tensor, "*batch k"],
    logp: Float[Tensor, "*batch k"],
    ids_q: Int[Tensor, "*batch m"],
    logq: Float[Tensor, "*batch m"],
) -> SharedHead:
    """Two engines' top-k lists, each with its own tokens, as one head.

    Each list must be that distribution's likeliest tokens, distinct, in any order: leave out a sampled
    token that an engine appends to them. A token of one list alone goes to the tail with its mass. Asking both
    engines for the union of the two lists, where they can, gives tighter bounds.
    """
    same = ids_p.unsqueeze(-1) == ids_q.unsqueeze(-2)
    in_q, in_p = same.any(-1), same.any(-2)
    at_p = torch.where(same, logq.unsqueeze(-2), -inf).amax(-1)
    return SharedHead(
        logp=torch.where(in_q, logp, -inf),
        logq=at_p,
        tail=Tail(logp_most=_most_outside(logp, in_q), logq_most=_most_outside(logq, in_p)),
    )


def _most_outside(logp: Tensor, inside: Tensor) -> Tensor:
    logp = logp + rounding_nats(logp)
    return torch.maximum(torch.where(inside, -inf, logp).amax(-1), logp.amin(-1))


def _range(logp: Tensor, error_nats: float | None) -> _Range:
    error = (
        rounding_nats(logp) if error_nats is None else torch.full_like(logp, error_nats, dtype=torch.float64)
    )
    logp, error = logp.to(torch.float64), error.to(torch.float64)
    return _Range(logp - error, logp + error)


def _outside(head: _Range) -> _Range:
    """The log of what the head leaves, as one more token; NaN where it is heavier than 1 whatever the rounding."""
    least, most = (1 - x.exp().sum(-1, keepdim=True) for x in (head.high, head.low))
    return _Range(least.clamp(min=0).log(), torch.where(most < 0, torch.nan, most).log())


def _nearest(record: Divergence, p: _Range, q: _Range) -> Tensor:
    """The least that tokens within both ranges add: the sum grows as p and q part."""
    ahead, behind = p.low > q.high, p.high < q.low
    at_p = torch.where(ahead, p.low, p.high)
    at_q = torch.where(ahead, q.high, torch.where(behind, q.low, p.high))
    unknown = p.high.isnan() | q.high.isnan()
    return torch.where(unknown, torch.nan, contributions(record, at_p, at_q))


def _farthest(record: Divergence, p: _Range, q: _Range) -> Tensor:
    """The most: a convex function is largest at a corner."""
    return torch.maximum(contributions(record, p.high, q.low), contributions(record, p.low, q.high))


def _chord(record: Divergence, p: _Range, q: _Range, tail: Tail) -> Tensor:
    """The most that the tokens outside add, given their masses and between what their ratios lie."""
    least_p, most_p, least_q, most_q = (
        torch.as_tensor(x, dtype=torch.float64, device=p.high.device).unsqueeze(-1).expand_as(p.high)
        for x in (tail.logp_least, tail.logp_most, tail.logq_least, tail.logq_most)
    )
    most_p, most_q = torch.minimum(most_p, p.high), torch.minimum(most_q, q.high)
    log_most = torch.where(most_p == -inf, -inf, most_p - least_q)
    log_least = torch.where(least_p == -inf, -inf, least_p - most_q)
    one_ratio = (log_least == log_most) & (log_most > -inf)
    spread = -torch.expm1(torch.where(log_least == -inf, -inf, log_least - log_most))
    share_p = p.high.exp() - _product(log_least, q.low)
    share_q = q.high.exp() - _product(p.low, -log_most)
    at_most = torch.where(one_ratio, p.high.exp(), share_p / spread)
    at_least = torch.where(one_ratio, 0.0, share_q / spread)
    zero = torch.zeros_like(log_most)
    most = _times(at_most, contributions(record, zero, -log_most)) + _times(
        at_least, contributions(record, log_least, zero)
    )
    contradictory = (log_least > log_most) | (at_most < 0) | (at_least < 0)
    return torch.where(contradictory, torch.nan, most)


def _product(log_a: Tensor, log_b: Tensor) -> Tensor:
    """exp(a + b), which is 0 where either factor is."""
    return torch.where((log_a == -inf) | (log_b == -inf), 0.0, (log_a + log_b).exp())


def _times(mass: Tensor, each: Tensor) -> Tensor:
    """No mass adds nothing, however much each unit of it would."""
    return torch.where(mass == 0, 0.0, mass * each)


def _require_heads(head_logp: Tensor, head_logq: Tensor) -> None:
    for name, values in (("head_logp", head_logp), ("head_logq", head_logq)):
        if not values.is_floating_point() or values.ndim == 0:
            raise ShapeError(
                f"{name} is {values.dtype} of shape {tuple(values.shape)}; "
                "give floating-point log-probabilities with the head's tokens on the last axis"
            )
    if head_logp.shape != head_logq.shape:
        raise ShapeError(
            f"head_logp is {tuple(head_logp.shape)} and head_logq {tuple(head_logq.shape)}; "
            "give the same tokens under both"
        )
