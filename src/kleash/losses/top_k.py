"""Losses from the likeliest tokens, with the other tokens as one bucket (a lower bound) or sampled (unbiased)."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor
from torch.nn.functional import pad

from kleash.arguments import validated
from kleash.divergences import Divergence, find_divergence
from kleash.divergences.functions import contributions
from kleash.divergences.table import identity
from kleash.errors import OptionError
from kleash.estimators.bounds import rounding_nats, unless_repeated
from kleash.losses.surrogate import require_gradient, sampled_pair, with_pair_gradient
from kleash.masking import as_mask
from kleash.precision import at_least_float32, nan_unless_normalised


class TopK(NamedTuple):
    """The log-probabilities of a list of tokens, and of all other tokens together."""

    ids: Int[Tensor, "*tokens k"]
    """Distinct tokens, in the same order for both distributions of a pair; losses of other lists are NaN."""
    logp: Float[Tensor, "*tokens k"]
    """Their log-probabilities in the whole distribution: not renormalised."""
    log_rest: Float[Tensor, "*tokens"]
    """The log of the probability of all other tokens; of an engine's list, the largest within rounding."""
    is_complete: bool = False
    """Whether the list is known to have the whole vocabulary, so that there is no rest, whatever ``log_rest`` is."""
    log_rest_least: Float[Tensor, "*tokens"] | None = None
    """The smallest ``log_rest`` within rounding; None if it is known."""


class Drawn(NamedTuple):
    """Sampled tokens and their log-probabilities under both distributions."""

    tokens: Int[Tensor, "*tokens"]
    token_logp: Float[Tensor, "*tokens"]
    token_logq: Float[Tensor, "*tokens"]


@validated
def top_k_of(logp: Float[Tensor, "*tokens vocab"], ids: Int[Tensor, "*tokens k"]) -> TopK:
    """The tokens ``ids`` of a whole distribution, with the mass of the rest summed over its tokens.

    Differentiable in ``logp``, with gradient 0 through a rest that is 0, infinite or NaN. The choice of tokens
    (``logp.topk(16).indices``, or those of a teacher) is a constant. NaN if a token is listed twice; negative ids are
    padding, of logp -inf. Rows that are not normalised are refused, as by ``kl``.
    """
    upcast, is_padding = at_least_float32(logp), ids < 0
    # Padding repeats a token of the list; a list of nothing else repeats token 0, which stays in the rest.
    tokens = torch.where(is_padding, pad(ids, (1, 0)).amax(-1, keepdim=True), ids).long()
    has_tokens = (~is_padding).any(-1, keepdim=True).expand_as(ids)
    is_listed = torch.zeros_like(upcast, dtype=torch.bool).scatter(-1, tokens, has_tokens)
    rest_logp = upcast.masked_fill(is_listed, -torch.inf)
    largest = rest_logp.detach().amax(-1)
    has_rest = largest.isfinite()
    log_rest = torch.where(
        has_rest, torch.where(has_rest.unsqueeze(-1), rest_logp, 0.0).logsumexp(-1), largest
    )
    listed = unless_repeated(ids, torch.where(is_padding, -torch.inf, upcast.gather(-1, tokens)))
    log_rest = nan_unless_normalised(
        log_rest, logp=torch.cat([listed, log_rest.unsqueeze(-1)], -1).to(logp.dtype)
    )
    return TopK(ids, listed, log_rest, is_complete=ids.shape[-1] == logp.shape[-1] and not is_padding.any())


@validated
def top_k_from(ids: Int[Tensor, "*tokens k"], logp: Float[Tensor, "*tokens k"]) -> TopK:
    """A top-k list from an inference engine, with 1 minus the listed mass as the mass of the rest.

    Rounding may hide a rest (``rounding_nats``: 4e-6 of the mass in float32). So it is known within bounds, of which
    ``tail_bucket_loss`` takes what is nearest to the other side's rest: no KL is infinite or too large by rounding. If
    the list's mass exceeds 1 by more than that, the rest is NaN, and so is the list if it has a token twice; negative
    ids are padding, of logp -inf.
    """
    upcast, error = at_least_float32(logp), rounding_nats(logp)
    most, least = (1 - (upcast + sign * error).exp().sum(-1) for sign in (-1, 1))
    log_rest = torch.where(most > 0, most, torch.nan).log()
    return TopK(ids, unless_repeated(ids, upcast), log_rest, log_rest_least=least.clamp(min=0).log())


def _nearest_rest(side: TopK, other: TopK) -> Tensor:
    """The ``log_rest`` of a side that is nearest to the other's, so that rounding raises no divergence."""
    if side.log_rest_least is None:
        return side.log_rest
    return torch.minimum(side.log_rest, torch.maximum(side.log_rest_least, other.log_rest.detach()))


def _listed(p: TopK, q: TopK, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The log-probabilities of both lists in at least float32; NaN if they differ in a token, 0 where masked."""
    is_same = (p.ids == q.ids).all(-1, keepdim=True)
    listed_p, listed_q = (torch.where(is_same, at_least_float32(x.logp), torch.nan) for x in (p, q))
    is_counted = as_mask(mask).unsqueeze(-1)
    return torch.where(is_counted, listed_p, 0.0), torch.where(is_counted, listed_q, 0.0)


@validated
def tail_bucket_loss(
    p: TopK,
    q: TopK,
    mask: Bool[Tensor, "*tokens"] | Integer[Tensor, "*tokens"],
    *,
    divergence: str | Divergence = "kl",
) -> Float[Tensor, "*tokens"]:
    """A lower bound of D(p || q) per token, in nats, with all tokens outside the list merged into one.

        sum over the list of p(x) f(log p(x) - log q(x)), plus P f(log P - log Q)

    P and Q are the masses outside the list. It is never above the divergence, and 0 only if list and masses agree. Its
    gradient moves mass between the list and the rest, but does not distinguish the tokens of the rest. Without the
    rest, moving mass out of the list would lower the loss; with a renormalised list it would not change the loss.

    Args:
        p: the distribution that is averaged over.
        q: the same tokens under the other distribution.
        mask: true (or 1) for the positions that count. Masked positions are not read; value and gradient are 0 there,
            as far as these functions go: mask the logits too, if they may be NaN, before ``log_softmax``.
        divergence: a name of ``DIVERGENCES``, or a record.

    Raises:
        UnknownNameError: if there is no such divergence.
        ShapeError: if the shapes do not fit together.
        DetachedError: if gradients are enabled and neither side carries one.
    """
    record = find_divergence(divergence)
    require_gradient(p.logp, p.log_rest, q.logp, q.log_rest)
    coarse_p, coarse_q = _listed(p, q, mask)
    if not (p.is_complete or q.is_complete):
        rest_p, rest_q = (
            torch.where(as_mask(mask), _nearest_rest(x, other), 0.0).unsqueeze(-1)
            for x, other in ((p, q), (q, p))
        )
        coarse_p, coarse_q = torch.cat([coarse_p, rest_p], -1), torch.cat([coarse_q, rest_q], -1)
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
    """An unbiased estimate of D(p || q): the list is summed exactly, the rest is estimated from one drawn token.

        value        sum over the list of p f(u)  +  [y outside] w f(u_y),      u = log p - log q
        gradient     that of the sum              +  [y outside] w (f + f')(u_y) grad log p(y)

    For y ~ p without weights, and for y ~ behaviour with w = p(y) / behaviour(y), value and gradient in p and in q are
    those of the whole divergence in expectation, for every choice of the list (p's likeliest tokens, or a teacher's).
    Only the rest has variance. ``f`` is the generator in ``DIVERGENCES`` ("kl": k3, "reverse_kl": the KL of q from p's
    samples), so the weight of "kl" in the gradient is u. If a token's value were u itself, its weight would be u + 1:
    surrogates with ``ratio * stop_gradient(u)`` on the rest lack the 1, and with it the gradient that moves mass
    between list and rest.

    It is the divergence of each position, given its prefix: off-policy, multiply it by the weight of the prefix.

    Args:
        p: the distribution that is averaged over; ``log_rest`` is not used.
        q: the same tokens under the other distribution.
        drawn: the sampled tokens under both distributions, with their gradients.
        mask: true (or 1) for the positions that count. Masked positions are not read; value and gradient are 0 there.
        weights: of the drawn tokens (``importance_weights`` of level "token"), without a gradient.
        divergence: a name of ``DIVERGENCES`` except "hellinger", or a record without a ``finish`` function.

    Raises:
        UnknownNameError: if there is no such divergence.
        OptionError: for "hellinger", of which one token gives no unbiased estimate.
        ShapeError: if the shapes do not fit together.
        DetachedError: if gradients are enabled and neither side carries one, or if ``weights`` carry one.
    """
    record = find_divergence(divergence)
    if record.finish is not identity:
        raise OptionError(
            "'hellinger' is the root of a mean, which no single token estimates without bias; "
            "give a divergence that is a mean, or tail_bucket_loss"
        )
    require_gradient(p.logp, q.logp, drawn.token_logp, drawn.token_logq)
    head_p, head_q = _listed(p, q, mask)
    outside = as_mask(mask) & ~(p.ids == drawn.tokens.unsqueeze(-1)).any(-1)
    pair = sampled_pair(drawn.token_logp, drawn.token_logq, outside, weights)
    value, grad_p = record.of(pair.log_ratio), record.score(pair.log_ratio)
    tail = with_pair_gradient(value, pair, grad_p, lambda: value - grad_p)
    return contributions(record, head_p, head_q).sum(-1) + tail
