"""The specification: all logits at once, and the divergences of kleash.divergences."""

from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kleash.divergences import Divergence, entropy, jensen_shannon, kl, total_variation
from kleash.divergences.exact import contributions
from kleash.linear.head import Head
from kleash.linear.impl.across import ALONE, Alone
from kleash.linear.impl.pair import OneModel, Pair
from kleash.linear.impl.project import both_normalised, logits
from kleash.linear.impl.results import Formed, Judged, Needed, Objective, asked, combined, formed_dtype
from kleash.linear.options import LinearOptions
from kleash.linear.statistics import TokenStatistics, TokenTerms


def divergence_of_logits(
    record: Divergence,
    zp: Float[Tensor, "tokens vocab"],
    zq: Float[Tensor, "tokens vocab"],
    across: Alone = ALONE,
) -> Float[Tensor, " tokens"]:
    """D(p || q) per token."""
    (total,) = across.added(contributions(record, *both_normalised(zp, zq, across)).sum(-1))
    return record.finish(total)


def statistics_of_logits(
    zp: Float[Tensor, "tokens vocab"],
    zq: Float[Tensor, "tokens vocab"],
    tokens: Int[Tensor, " tokens"],
    across: Alone = ALONE,
) -> TokenStatistics:
    """The statistics of each token."""
    logp, logq = both_normalised(zp, zq, across)
    tops = across.highest(zp.amax(-1, keepdim=True), zq.amax(-1, keepdim=True))
    top1_p, top1_q = across.earliest((zp, zq), (zp.argmax(-1), zq.argmax(-1)), tops)
    (token_zq,) = across.added(across.own(zq, tokens))
    sums = {
        "token_logp": across.own(logp, tokens)[:, 0],
        "token_logq": across.own(logq, tokens)[:, 0],
        "kl_pq": kl(logp, logq),
        "kl_qp": kl(logq, logp),
        "jensen_shannon": jensen_shannon(logp, logq),
        "total_variation": total_variation(logp, logq),
        "entropy_p": entropy(logp),
        "entropy_q": entropy(logq),
        "top1_probability_p": across.own(logp.exp(), top1_p)[:, 0],
        "top1_probability_q": across.own(logq.exp(), top1_q)[:, 0],
        "rank_q": torch.gt(zq, token_zq).sum(-1),
    }
    found = dict(zip(sums, across.added(*sums.values()), strict=True))
    return TokenStatistics(top1_p=top1_p, top1_q=top1_q, **found)


def terms_of_logits(
    zp: Float[Tensor, "tokens vocab"],
    zq: Float[Tensor, "tokens vocab"],
    tokens: Int[Tensor, " tokens"],
    across: Alone = ALONE,
) -> TokenTerms:
    """What an objective is made of."""
    logp, logq = both_normalised(zp, zq, across)
    token_logp, token_logq = (across.own(x, tokens)[:, 0] for x in (logp, logq))
    return TokenTerms(*across.added(token_logp, token_logq, kl(logp, logq), entropy(logp)))


def divergence(pair: Pair, record: Divergence, options: LinearOptions) -> Float[Tensor, " tokens"]:
    """D(p || q) per token, with autograd's gradient."""
    return divergence_of_logits(record, logits(pair.p), logits(pair.q), pair.across)


def token_statistics(pair: Pair, tokens: Int[Tensor, " tokens"], options: LinearOptions) -> TokenStatistics:
    """The statistics of each token."""
    return statistics_of_logits(logits(pair.p), logits(pair.q), tokens, pair.across)


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
    seen = terms_of_logits(logits(pair.p), logits(pair.q), tokens, pair.across)
    loss, coefficients = asked(objective, seen, slice(0, pair.tokens))
    used = torch.stack([c != 0 for c in coefficients]).any(0).nonzero()[:, 0]
    leaves, given = detached(pair)
    with torch.enable_grad():
        read = leaves.at(used)
        terms = terms_of_logits(logits(read.p), logits(read.q), tokens[used], pair.across)
        total = combined(terms, TokenTerms(*(c[used] for c in coefficients))).sum()
        found = derived(total, given, needed)
    return Judged(loss, seen, found)


def detached(pair: Pair) -> tuple[Pair, tuple[Tensor | None, ...]]:
    """The same numbers as leaves of a graph of their own, and those leaves; each in its ``formed_dtype``."""

    def leaf(x: Tensor) -> Tensor:
        return x.detach().to(formed_dtype(x)).requires_grad_()

    def one(model: OneModel) -> OneModel:
        hidden, weight, bias = (x if x is None else leaf(x) for x in model.tensors)
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
