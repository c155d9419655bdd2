"""Certified lower and upper bounds of a divergence from the top-k log-probabilities of both distributions."""

from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from kleash.arguments import validated
from kleash.divergences import Divergence, find_divergence
from kleash.divergences.functions import contributions
from kleash.precision import at_least_float32
from kleash.registry import options_given, require_at_least

NORMALISER_NATS = 32.0
"""Assumed size of the log-sum-exp that was subtracted; its rounding error is part of a log-probability."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Tail:
    """Bounds on the log-probability of every token outside the head, in nats; numbers, or one per position."""

    logp_least: Float[Tensor, "*any"] | float = -inf
    """Lower bound under ``p``."""
    logp_most: Float[Tensor, "*any"] | float = 0.0
    """Upper bound under ``p``: the smallest of ``p``'s top k, if the head contains all of these."""
    logq_least: Float[Tensor, "*any"] | float = -inf
    """Lower bound under ``q``; without it a KL has no upper bound."""
    logq_most: Float[Tensor, "*any"] | float = 0.0
    """Upper bound under ``q``: the smallest of ``q``'s top k, if the head contains all of these."""


UNKNOWN_TAIL = Tail()


class KLBounds(NamedTuple):
    """Lower and upper bound of a divergence, and the mass of the head under both distributions; in float64."""

    lower: Float64[Tensor, "*batch"]
    """No smaller value is possible."""
    upper: Float64[Tensor, "*batch"]
    """No larger value is possible; ``inf`` if there is no bound."""
    mass_p: Float64[Tensor, "*batch"]
    """Probability of the head under ``p``; rounding may make it larger than 1."""
    mass_q: Float64[Tensor, "*batch"]
    """Probability of the head under ``q``; rounding may make it larger than 1."""


class LogpInterval(NamedTuple):
    """Lower and upper bounds of log-probabilities, in float64."""

    low: Float64[Tensor, "*batch head"]
    high: Float64[Tensor, "*batch head"]


@validated
def kl_bounds(
    head_logp: Float[Tensor, "*batch head"],
    head_logq: Float[Tensor, "*batch head"],
    *,
    divergence: str | Divergence = "kl",
    tail: Tail | None = UNKNOWN_TAIL,
    error_nats: float | None = None,
) -> KLBounds:
    """Bounds on D(p || q) from the log-probabilities of some tokens under both; without gradient.

        lower = head's sum + Q F(P/Q)                     P, Q: masses outside; F(t) = t f(log t)
        upper = head's sum + [(P - mQ) F(M)/M + (Q - P/M) F(m)] / (1 - m/M)

    Lower bound: each token adds q F(p/q) with F convex, so by Jensen's inequality the tokens outside the head add at
    least Q F(P/Q), as one bucket with all their mass. Renormalising the head, or dropping the rest, gives no bound.

    Upper bound: outside the head, p/q is between ``m`` = min p / max q and ``M`` = max p / min q, where F is below its
    chord. A sum of q times a linear function of p/q depends on P and Q alone: it is that of one token of ratio M and
    one of ratio m. The bound is attained if tokens of these ratios exist, so it is tight up to whole numbers of tokens.
    max p is at most P, max q at most Q. For KL with a lower bound ``b`` on q alone, it is the head's
    p (log p - log q), plus P (log P - log b). Total variation, Hellinger and Jensen-Shannon are finite at zeros and
    need no bound.

    Both hold for every pair within ``error_nats`` of the arguments: the lower bound moves every mass towards that of
    the other distribution, the upper bound away from it. NaN if the head's mass exceeds 1 by more than that, if the
    bounds of the tail contradict its mass, or if the head contains NaN. A token with -inf on both sides is padding;
    -inf on one side is a probability of 0.

    Args:
        head_logp: natural log-probabilities, full softmax, of distinct tokens under ``p``: its own top k, that of ``q``
            or the union.
        head_logq: the same tokens under ``q`` (``shared_head`` finds them in two top-k lists).
        divergence: a name of ``DIVERGENCES``, or a record.
        tail: bounds on the tokens outside the head; None if there are no tokens outside.
        error_nats: largest error of a log-probability. By default the rounding of its dtype and of the softmax: about
            4e-6 in float32, 1/128 of its size in bfloat16. On a CPU torch's ``log_softmax`` in float32 errs by
            several 1e-4 over 150 000 tokens; ``at_temperature(logits, 1.0)`` does not.

    Raises:
        UnknownNameError: if there is no divergence of this name.
        OptionError: if ``error_nats`` is negative or not finite.
        ShapeError: if the two differ in shape, or are not floating-point.

    References:
        Liese & Vajda, "On Divergences and Informations in Statistics and Information Theory" (2006).

    >>> listed_p, listed_q = torch.tensor([[0.6, 0.3], [0.5, 0.2]]).log()  # of a larger vocabulary
    >>> kleash.kl_bounds(listed_p, listed_q).lower
    tensor(0.1212, dtype=torch.float64)
    """
    record = find_divergence(divergence)
    require_at_least(0.0, **options_given(error_nats=error_nats))
    with torch.no_grad():
        p, q = logp_interval(head_logp, error_nats), logp_interval(head_logq, error_nats)
        lower, upper = bounds_of_intervals(p, q, divergence=record, tail=tail)
        # The bounds of a tail can contradict its mass by their rounding.
        if tail is not None and upper.isnan().any():
            widened = _widened(tail, head_logp.dtype, error_nats)
            _, widened_upper = bounds_of_intervals(p, q, divergence=record, tail=widened)
            upper = torch.where(upper.isnan(), widened_upper, upper)
        mass_p, mass_q = (x.to(torch.float64).exp().sum(-1) for x in (head_logp, head_logq))
        return KLBounds(lower, upper, mass_p, mass_q)


def _widened(tail: Tail, dtype: torch.dtype, error_nats: float | None) -> Tail:
    """The tail's bounds moved outwards by the error of log-probabilities of that type, as those of the head are."""

    def interval(bound: Tensor | float) -> LogpInterval:
        return logp_interval(
            torch.as_tensor(bound, dtype=None if isinstance(bound, Tensor) else dtype), error_nats
        )

    return Tail(
        logp_least=interval(tail.logp_least).low,
        logp_most=interval(tail.logp_most).high,
        logq_least=interval(tail.logq_least).low,
        logq_most=interval(tail.logq_most).high,
    )


def bounds_of_intervals(
    p: LogpInterval, q: LogpInterval, *, divergence: Divergence, tail: Tail | None
) -> tuple[Float64[Tensor, "*batch"], Float64[Tensor, "*batch"]]:
    """Lower and upper bound of a divergence, as of ``kl_bounds``, for heads of which intervals are known."""
    lower = _smallest_contributions(divergence, p, q).sum(-1)
    # The function is convex, so its largest value is at a corner of both intervals.
    corners = contributions(divergence, p.high, q.low), contributions(divergence, p.low, q.high)
    upper = torch.maximum(*corners).sum(-1)
    if tail is not None:
        rest_p, rest_q = _mass_outside(p), _mass_outside(q)
        lower = lower + _smallest_contributions(divergence, rest_p, rest_q).squeeze(-1)
        upper = upper + _largest_tail(divergence, rest_p, rest_q, tail).squeeze(-1)
    return divergence.finish(lower), divergence.finish(upper)


@validated
def rounding_nats(logp: Float[Tensor, "*any"], stored_in: torch.dtype | None = None) -> Float[Tensor, "*any"]:
    """Largest rounding error of each log-probability, from its dtype and from the softmax that computed it.

    Args:
        logp: log-probabilities.
        stored_in: their dtype where they were computed; None for that which they have.
    """
    dtype = stored_in or logp.dtype
    storage_eps, softmax_eps = (
        torch.finfo(x).eps for x in (dtype, torch.promote_types(dtype, torch.float32))
    )
    size = torch.where(logp.isinf(), 0.0, at_least_float32(logp).abs())
    return size * storage_eps + NORMALISER_NATS * softmax_eps


class SharedHead(NamedTuple):
    """The tokens that two top-k lists share, as arguments of ``kl_bounds``."""

    logp: Float[Tensor, "*batch k"]
    """Of p's list; -inf for tokens that are not in q's list."""
    logq: Float[Tensor, "*batch k"]
    """Under ``q``, of the tokens of p's list; -inf for tokens that are not in q's list."""
    tail: Tail
    """Upper bounds for the tokens outside, from the ends of the lists, the unshared tokens and rounding."""


@validated
def shared_head(
    ids_p: Int[Tensor, "*batch k"],
    logp: Float[Tensor, "*batch k"],
    ids_q: Int[Tensor, "*batch m"],
    logq: Float[Tensor, "*batch m"],
) -> SharedHead:
    """Combine two top-k lists with different tokens into one head for ``kl_bounds``.

    Each list must contain the likeliest tokens of its distribution, distinct, in any order; remove a sampled token
    that an engine appends (a token that is listed twice makes the bounds NaN). Negative ids are padding, of logp -inf.
    A token that is in one list only belongs to the tail with its mass. The bounds are tighter if both engines can
    return the union of the two lists.
    """
    logp, logq = unless_repeated(ids_p, logp), unless_repeated(ids_q, logq)
    matches = ids_p.unsqueeze(-1) == ids_q.unsqueeze(-2)
    in_q, in_p = matches.any(-1), matches.any(-2)
    logq_of_p = torch.where(matches, logq.unsqueeze(-2), -inf).amax(-1)
    return SharedHead(
        logp=torch.where(in_q, logp, -inf),
        logq=logq_of_p,
        tail=Tail(
            logp_most=_largest_logp_outside(ids_p, logp, in_q),
            logq_most=_largest_logp_outside(ids_q, logq, in_p),
        ),
    )


def unless_repeated(ids: Int[Tensor, "*tokens k"], logp: Float[Tensor, "*tokens k"]) -> Tensor:
    """The log-probabilities, or NaN where a list has a token twice, as of an engine that appends the sampled one."""
    in_order = ids.sort(-1).values
    is_repeated = (in_order.diff(dim=-1) == 0) & (in_order[..., 1:] >= 0)
    return torch.where(is_repeated.any(-1, keepdim=True), torch.nan, logp)


def _largest_logp_outside(ids: Tensor, logp: Tensor, inside: Tensor) -> Tensor:
    """Upper bound, with rounding, on the log-probability of a token that is not ``inside``.

    ``logp`` is a top-k list, so a token that it does not list has at most its smallest entry, padding apart.
    """
    logp = logp + rounding_nats(logp)
    return torch.maximum(torch.where(inside, -inf, logp).amax(-1), torch.where(ids < 0, inf, logp).amin(-1))


def logp_interval(
    logp: Float[Tensor, "*shape"], error_nats: float | Float64[Tensor, "*shape"] | None = None
) -> LogpInterval:
    """The log-probabilities minus and plus their largest errors; by default those of ``rounding_nats``."""
    error = rounding_nats(logp) if error_nats is None else error_nats
    logp, error = (torch.as_tensor(x, dtype=torch.float64, device=logp.device) for x in (logp, error))
    return LogpInterval(logp - error, logp + error)


def _mass_outside(head: LogpInterval) -> LogpInterval:
    """The log mass outside the head, as one more token; NaN if the head's mass exceeds 1 by more than rounding."""
    smallest, largest = (1 - x.exp().sum(-1, keepdim=True) for x in (head.high, head.low))
    return LogpInterval(smallest.clamp(min=0).log(), torch.where(largest < 0, torch.nan, largest).log())


def _smallest_contributions(record: Divergence, p: LogpInterval, q: LogpInterval) -> Tensor:
    """The smallest contributions of tokens within both intervals: p and q as close as possible.

    Where the intervals overlap p and q can be equal, so any number for both gives the contribution 0.
    """
    p_above, p_below = p.low > q.high, p.high < q.low
    nearest_p = torch.where(p_above, p.low, p.high)
    nearest_q = torch.where(p_above, q.high, torch.where(p_below, q.low, p.high))
    # a NaN of p is in both already
    return torch.where(q.high.isnan(), torch.nan, contributions(record, nearest_p, nearest_q))


def _largest_tail(record: Divergence, p: LogpInterval, q: LogpInterval, tail: Tail) -> Tensor:
    """The largest contribution of the tokens outside the head, from their masses and the bounds of their ratios.

        [(P - mQ) F(M)/M + (Q - P/M) F(m)] / (1 - m/M),    m = min p / max q,    M = max p / min q

    as ``kl_bounds`` explains: P at its largest and Q at its smallest in the first term, and the other way round in the
    second. F(M)/M is the contribution per unit of p's mass at the ratio M, F(m) that per unit of q's mass at m. Without
    a ratio to choose (m = M) all of P is at M.

    Args:
        record: the divergence.
        p: interval of the log mass outside the head under ``p``, with a last axis of one entry.
        q: interval of the log mass outside the head under ``q``, with a last axis of one entry.
        tail: bounds on the log-probability of each token outside.
    """
    min_p, max_p, min_q, max_q = (
        torch.as_tensor(x, dtype=torch.float64, device=p.high.device).unsqueeze(-1).expand_as(p.high)
        for x in (tail.logp_least, tail.logp_most, tail.logq_least, tail.logq_most)
    )
    max_p, max_q = torch.minimum(max_p, p.high), torch.minimum(max_q, q.high)
    largest_p = torch.where(max_p == -inf, 0.0, p.high.exp())
    log_max_ratio = torch.where(max_p == -inf, -inf, max_p - min_q)
    log_min_ratio = torch.where(min_p == -inf, -inf, min_p - max_q)
    one_ratio = (log_min_ratio == log_max_ratio) & (log_max_ratio > -inf)
    ratio_range = -torch.expm1(torch.where(log_min_ratio == -inf, -inf, log_min_ratio - log_max_ratio))
    excess_p = largest_p - _product(log_min_ratio, q.low)
    excess_q = q.high.exp() - _product(p.low, -log_max_ratio)
    # p's mass at M and q's mass at m
    mass_at_max = torch.where(one_ratio, largest_p, excess_p / ratio_range)
    mass_at_min = torch.where(one_ratio, 0.0, excess_q / ratio_range)
    zero = torch.zeros_like(log_max_ratio)
    total = _times(mass_at_max, contributions(record, zero, -log_max_ratio)) + _times(
        mass_at_min, contributions(record, log_min_ratio, zero)
    )
    contradictory = (log_min_ratio > log_max_ratio) | (mass_at_max < 0) | (mass_at_min < 0)
    return torch.where(contradictory, torch.nan, total)


def _product(log_a: Tensor, log_b: Tensor) -> Tensor:
    """exp(a + b), which is 0 if either factor is 0."""
    return torch.where((log_a == -inf) | (log_b == -inf), 0.0, (log_a + log_b).exp())


def _times(mass: Tensor, contribution: Tensor) -> Tensor:
    """The product, which is 0 if the mass is 0, also for an infinite contribution."""
    return torch.where(mass == 0, 0.0, mass * contribution)
