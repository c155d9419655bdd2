"""The specification: all logits at once, and the divergences of kleash.divergences."""

from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kleash.divergences import Divergence, entropy, jensen_shannon, kl, total_variation
from kleash.divergences import divergence as exact_divergence
from kleash.linear.head import Head
from kleash.linear.impl.pair import OneModel, Pair
from kleash.linear.impl.project import logits, normalised
from kleash.linear.impl.results import Formed, Judged, Needed, Objective, asked, combined
from kleash.linear.options import LinearOptions
from kleash.linear.statistics import TokenStatistics, TokenTerms


def divergence_of_logits(
    record: Divergence, zp: Float[Tensor, "tokens vocab"], zq: Float[Tensor, "tokens vocab"]
) -> Float[Tensor, " tokens"]:
    """D(p || q) per token."""
    return exact_divergence(record, normalised(zp), normalised(zq))


def statistics_of_logits(
    zp: Float[Tensor, "tokens vocab"], zq: Float[Tensor, "tokens vocab"], tokens: Int[Tensor, " tokens"]
) -> TokenStatistics:
    """The statistics of each token."""
    logp, logq = normalised(zp), normalised(zq)
    column = tokens[:, None]
    top1_p, top1_q = zp.argmax(-1), zq.argmax(-1)
    return TokenStatistics(
        token_logp=logp.gather(-1, column)[:, 0],
        token_logq=logq.gather(-1, column)[:, 0],
        kl_pq=kl(logp, logq),
        kl_qp=kl(logq, logp),
        jensen_shannon=jensen_shannon(logp, logq),
        total_variation=total_variation(logp, logq),
        entropy_p=entropy(logp),
        entropy_q=entropy(logq),
        top1_p=top1_p,
        top1_q=top1_q,
        top1_probability_p=logp.gather(-1, top1_p[:, None])[:, 0].exp(),
        top1_probability_q=logq.gather(-1, top1_q[:, None])[:, 0].exp(),
        rank_q=torch.gt(zq, zq.gather(-1, column)).sum(-1),
    )


def terms_of_logits(
    zp: Float[Tensor, "tokens vocab"], zq: Float[Tensor, "tokens vocab"], tokens: Int[Tensor, " tokens"]
) -> TokenTerms:
    """What an objective is made of."""
    logp, logq, column = normalised(zp), normalised(zq), tokens[:, None]
    token_logp, token_logq = (x.gather(-1, column)[:, 0] for x in (logp, logq))
    return TokenTerms(token_logp=token_logp, token_logq=token_logq, kl=kl(logp, logq), entropy=entropy(logp))


def divergence(pair: Pair, record: Divergence, options: LinearOptions) -> Float[Tensor, " tokens"]:
    """D(p || q) per token, with autograd's gradient."""
    return divergence_of_logits(record, logits(pair.p), logits(pair.q))


def token_statistics(pair: Pair, tokens: Int[Tensor, " tokens"], options: LinearOptions) -> TokenStatistics:
    """The statistics of each token."""
    return statistics_of_logits(logits(pair.p), logits(pair.q), tokens)


def gradients(
    pair: Pair, record: Divergence, weights: Float[Tensor, " tokens"], needed: Needed, options: LinearOptions
) -> Formed:
    """The divergence of each token of a weight other than 0, and the gradient of their weighted sum."""
    leaves, given = detached(pair)
    read = weights != 0
    per_token = torch.zeros_like(weights, dtype=pair.p.dtype)
    with torch.enable_grad():
        values = divergence(leaves.at(read.nonzero()[:, 0]), record, options)
        found = derived((values * weights[read].to(values.dtype)).sum(), given, needed)
    per_token[read] = values.detach()
    return Formed(per_token, found)


def judged(
    pair: Pair, tokens: Int[Tensor, " tokens"], objective: Objective, needed: Needed, options: LinearOptions
) -> Judged:
    """The sum of the objective's losses, the terms, and the gradients that are needed."""
    seen = terms_of_logits(logits(pair.p), logits(pair.q), tokens)
    loss, coefficients = asked(objective, seen, slice(0, pair.tokens))
    used = torch.stack([c != 0 for c in coefficients]).any(0).nonzero()[:, 0]
    leaves, given = detached(pair)
    with torch.enable_grad():
        read = leaves.at(used)
        terms = terms_of_logits(logits(read.p), logits(read.q), tokens[used])
        total = combined(terms, TokenTerms(*(c[used] for c in coefficients))).sum()
        found = derived(total, given, needed)
    return Judged(loss, seen, found)


def detached(pair: Pair) -> tuple[Pair, tuple[Tensor | None, ...]]:
    """The same numbers as leaves of a graph of their own, and those leaves."""

    def one(model: OneModel) -> OneModel:
        hidden, weight, bias = (x if x is None else x.detach().requires_grad_() for x in model.tensors)
        assert hidden is not None
        head = Head(weight, bias, scale=model.head.scale, softcap=model.head.softcap)
        return replace(model, hidden=hidden, head=head)

    leaves = Pair(p=one(pair.p), q=one(pair.q))
    return leaves, leaves.tensors


def derived(total: Tensor, given: tuple[Tensor | None, ...], needed: Needed) -> tuple[Tensor | None, ...]:
    """The gradient of ``total`` in what is needed of the given tensors."""
    wanted = [x for x, needs in zip(given, needed, strict=True) if needs and x is not None]
    if not wanted:
        return (None,) * len(given)
    found = iter(torch.autograd.grad(total, wanted, allow_unused=True, materialize_grads=True))
    return tuple(
        next(found) if needs and x is not None else None for x, needs in zip(given, needed, strict=True)
    )
