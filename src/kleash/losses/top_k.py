"""Losses from the likeliest tokens: the rest as one bucket (a lower bound), or sampled (the value itself)."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor

from kleash.arguments import validated
from kleash.divergences import DIVERGENCES, Divergence
from kleash.divergences.functions import contributions
from kleash.divergences.table import identity
from kleash.errors import OptionError, ShapeError
from kleash.estimators import rounding_nats
from kleash.losses.surrogate import mask_and_weights, require_gradient, require_same_shape, with_gradient
from kleash.masking import as_mask
from kleash.precision import at_least_float32
from kleash.registry import look_up


class TopK(NamedTuple):
    """The log-probabilities of a list of tokens, and of all other tokens together."""

    ids: Int[Tensor, "*tokens k"]
    """Distinct; the same, in the same order, for both distributions of a pair."""
    logp: Float[Tensor, "*tokens k"]
    """Their log-probabilities in the whole distribution: not renormalised."""
    log_rest: Float[Tensor, "*tokens"]
    """The log of the probability of all other tokens."""


class Drawn(NamedTuple):
    """Sampled tokens and their log-probabilities under both distributions."""

    tokens: Int[Tensor, "*tokens"]
    token_logp: Float[Tensor, "*tokens"]
    token_logq: Float[Tensor, "*tokens"]


@validated
def top_k_of(logp: Float[Tensor, "*tokens vocab"], ids: Int[Tensor, "*tokens k"]) -> TopK:
    """The tokens ``ids`` of a whole distribution; the rest is summed over, not subtracted from 1.

    Differentiable in ``logp``; which tokens are chosen (``logp.topk(16).indices``, a teacher's) is a constant.
    """
    logp = at_least_float32(logp)
    rest_logp = logp.scatter(-1, ids, -torch.inf)
    return TopK(ids, logp.gather(-1, ids), rest_logp.logsumexp(-1))


@validated
def top_k_from(ids: Int[Tensor, "*tokens k"], logp: Float[Tensor, "*tokens k"]) -> TopK:
    """A top-k list of an inference engine; the rest is 1 minus the listed mass.

    A rest that rounding hides must not become a zero, against which every KL is infinite. So it is the
    most that rounding allows (``rounding_nats``: 4e-6 of the mass in float32); a list that is heavier than 1
    by more than that gives NaN.
    """
    upcast = at_least_float32(logp)
    listed_mass = (upcast - rounding_nats(logp)).exp().sum(-1)
    return TopK(ids, upcast, torch.where(listed_mass < 1, torch.log1p(-listed_mass), torch.nan))


@validated
def tail_bucket_loss(
    p: TopK,
    q: TopK,
    mask: Bool[Tensor, "*tokens"] | Integer[Tensor, "*tokens"],
    *,
    divergence: str | Divergence = "kl",
) -> Float[Tensor, "*tokens"]:
    """D(p || q) with all tokens outside the list taken as one: a lower bound in nats, per token.

        sum over the list of p(x) f(log p(x) - log q(x)), plus P f(log P - log Q)

    P and Q are the masses outside. Never above the divergence, 0 only where list and masses agree, and the
    gradient is that of this coarser divergence: it moves mass between list and rest, but cannot tell the
    tokens of the rest apart. Dropping the rest would reward moving mass out of the list; renormalising
    the list would not see it.

    Args:
        p: the side averaged over.
        q: the same tokens under the other side.
        mask: true (or 1) for the positions that count; elsewhere value and gradient are 0, and nothing is read.
        divergence: a name of ``DIVERGENCES``, or a record.

    Raises:
        UnknownNameError: if there is no such divergence.
        ShapeError: if the shapes do not fit together.
        DetachedError: if gradients are enabled and neither side carries one.
    """
    record = look_up(DIVERGENCES, divergence, "divergence") if isinstance(divergence, str) else divergence
    _require_lists(p, q, mask)
    require_gradient(p.logp, p.log_rest, q.logp, q.log_rest)
    counts = as_mask(mask).unsqueeze(-1)
    coarse_p, coarse_q = (
        torch.where(counts, torch.cat([at_least_float32(x.logp), x.log_rest.unsqueeze(-1)], -1), 0.0)
        for x in (p, q)
    )
    return record.finish(contributions(record, coarse_p, coarse_q).sum(-1))


@validated
def sampled_tail_loss(
    p: TopK,
    q: TopK,
    drawn: Drawn,
    mask: Bool[Tensor, "*tokens"] | Integer[Tensor, "*tokens"],
    *,
    weights: Float[Tensor, "*tokens"] | None = None,
    divergence: str | Divergence = "kl",
) -> Float[Tensor, "*tokens"]:
    """D(p || q) with the list summed exactly and the rest by the one token that was drawn; unbiased.

        value        sum over the list of p f(u)  +  [y outside] w f(u_y),      u = log p - log q
        gradient     that of the sum              +  [y outside] w (f + f')(u_y) grad log p(y)

    For y ~ p without weights, for y ~ behaviour with w = p(y) / behaviour(y): value and gradient, in p and in
    q, are those of the whole divergence in expectation, whichever tokens are in the list (p's likeliest,
    a teacher's), as the choice only divides one sum in two. What varies is the rest alone. With f as in
    ``DIVERGENCES`` ("kl": k3, "reverse_kl": the forward KL of q from p's samples), where "kl" has the weight
    u; were the value of a token the bare u, it would be u + 1. Surrogates that put ``ratio * stop_gradient(u)``
    on the rest forget the 1, and with it that the list can lose mass to the rest.

    This is each position's divergence, given its prefix: off-policy, multiply it by the weight of the prefix.

    Args:
        p: the side averaged over; ``log_rest`` is not used.
        q: the same tokens under the other side.
        drawn: the sampled tokens under both sides, with their gradients.
        mask: true (or 1) for the positions that count; elsewhere value and gradient are 0, and nothing is read.
        weights: of the drawn tokens (``importance_weights`` of level "token"), without a gradient.
        divergence: a name of ``DIVERGENCES``, or a record; a mean, and not the root of one (hellinger).

    Raises:
        UnknownNameError: if there is no such divergence.
        OptionError: for hellinger, of which one token gives no unbiased value.
        ShapeError: if the shapes do not fit together.
        DetachedError: if gradients are enabled and neither side carries one, or if ``weights`` carry one.
    """
    record = look_up(DIVERGENCES, divergence, "divergence") if isinstance(divergence, str) else divergence
    if record.finish is not identity:
        raise OptionError(
            f"{divergence!r} is the root of a mean, which no single token estimates without bias; "
            "give a divergence that is a mean, or tail_bucket_loss"
        )
    _require_lists(p, q, mask)
    require_same_shape(mask=mask, **drawn._asdict(), weights=weights)
    require_gradient(p.logp, q.logp, drawn.token_logp, drawn.token_logq)
    counts = as_mask(mask).unsqueeze(-1)
    head_p, head_q = (torch.where(counts, at_least_float32(x.logp), 0.0) for x in (p, q))
    outside = as_mask(mask) & ~(p.ids == drawn.tokens.unsqueeze(-1)).any(-1)
    tail = _sampled_tail(record, drawn, *mask_and_weights(outside, weights))
    return contributions(record, head_p, head_q).sum(-1) + tail


def _sampled_tail(record: Divergence, sample: Drawn, counts: Tensor, weights: Tensor | None) -> Tensor:
    token_logp, token_logq = at_least_float32(sample.token_logp), at_least_float32(sample.token_logq)
    log_ratio = torch.where(counts, (token_logp - token_logq).detach(), 0.0)
    value, grad_p = record.of(log_ratio), record.score(log_ratio)
    grad_q = value - grad_p
    if weights is not None:
        value, grad_p, grad_q = weights * value, weights * grad_p, weights * grad_q
    return with_gradient(value, token_logp, grad_p, (token_logq, grad_q))


def _require_lists(p: TopK, q: TopK, mask: Tensor) -> None:
    shapes = [tuple(x.shape) for x in (p.ids, p.logp, q.ids, q.logp)]
    if len(set(shapes)) > 1 or shapes[0][:-1] != tuple(mask.shape):
        raise ShapeError(
            f"p lists {shapes[0]} tokens with {shapes[1]} numbers, q {shapes[2]} with {shapes[3]}, and mask is "
            f"{tuple(mask.shape)}; give both sides the same tokens, [batch, time, k] where mask is [batch, time]"
        )
    require_same_shape(mask=mask, p_log_rest=p.log_rest, q_log_rest=q.log_rest)
