"""The specification: all logits at once, and the divergences of kleash.divergences."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kleash.autodiff import is_transformed
from kleash.divergences import Divergence, entropy, jensen_shannon, kl, total_variation
from kleash.divergences.functions import contributions
from kleash.linear.impl.pair import HeadInputs, HeadPair
from kleash.linear.impl.project import both_normalised, logits
from kleash.linear.impl.results import (
    Needed,
    Objective,
    ObjectiveResult,
    ValueAndGrad,
    combined,
    gradient_dtype,
    objective_value_and_grad,
)
from kleash.linear.impl.vocab_shards import LOCAL_VOCAB, LocalVocab
from kleash.linear.options import LinearOptions
from kleash.linear.statistics import StatisticsAndTop, TokenStatistics, TokenTerms, TopTokens


def divergence_of_logits(
    record: Divergence,
    zp: Float[Tensor, "tokens vocab"],
    zq: Float[Tensor, "tokens vocab"],
    across: LocalVocab = LOCAL_VOCAB,
) -> Float[Tensor, " tokens"]:
    """D(p || q) per token."""
    (total,) = across.all_reduce_sum(contributions(record, *both_normalised(zp, zq, across)).sum(-1))
    return record.finish(total)


def statistics_of_logits(
    zp: Float[Tensor, "tokens vocab"],
    zq: Float[Tensor, "tokens vocab"],
    tokens: Int[Tensor, " tokens"],
    across: LocalVocab = LOCAL_VOCAB,
) -> TokenStatistics:
    """The statistics of each token."""
    logp, logq = both_normalised(zp, zq, across)
    tops = across.all_reduce_max(zp.amax(-1, keepdim=True), zq.amax(-1, keepdim=True))
    top1_p, top1_q = across.argmax((zp, zq), (zp.argmax(-1), zq.argmax(-1)), tops)
    (token_zq,) = across.all_reduce_sum(across.gather_local(zq, tokens))
    sums = {
        "token_logp": across.gather_local(logp, tokens)[:, 0],
        "token_logq": across.gather_local(logq, tokens)[:, 0],
        "kl_pq": kl(logp, logq),
        "kl_qp": kl(logq, logp),
        "jensen_shannon": jensen_shannon(logp, logq),
        "total_variation": total_variation(logp, logq),
        "entropy_p": entropy(logp),
        "entropy_q": entropy(logq),
        "top1_probability_p": across.gather_local(logp.exp(), top1_p)[:, 0],
        "top1_probability_q": across.gather_local(logq.exp(), top1_q)[:, 0],
        "rank_q": torch.gt(zq, token_zq).sum(-1),
    }
    found = dict(zip(sums, across.all_reduce_sum(*sums.values()), strict=True))
    return TokenStatistics(top1_p=top1_p, top1_q=top1_q, **found)


def terms_of_logits(
    zp: Float[Tensor, "tokens vocab"],
    zq: Float[Tensor, "tokens vocab"],
    tokens: Int[Tensor, " tokens"],
    across: LocalVocab = LOCAL_VOCAB,
) -> TokenTerms:
    """What an objective is made of."""
    logp, logq = both_normalised(zp, zq, across)
    token_logp, token_logq = (across.gather_local(x, tokens)[:, 0] for x in (logp, logq))
    return TokenTerms(*across.all_reduce_sum(token_logp, token_logq, kl(logp, logq), entropy(logp)))


def divergence(pair: HeadPair, record: Divergence, options: LinearOptions) -> Float[Tensor, " tokens"]:
    """D(p || q) per token, with autograd's gradient; of a token that cannot be read, NaN if any comes in for it."""
    pair = widened(pair)
    zp, zq = logits(pair.p), logits(pair.q)
    differentiated = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in pair.tensors)
    if not differentiated or any(is_transformed(x) for x in pair.tensors):
        return divergence_of_logits(record, zp, zq, pair.across)
    bad = unreadable(pair, zp.detach(), zq.detach())
    if not bad.any():
        return divergence_of_logits(record, zp, zq, pair.across)
    good, rest = (rows.nonzero()[:, 0] for rows in (~bad, bad))
    with torch.no_grad():
        unread = divergence_of_logits(record, zp[rest], zq[rest], pair.across)
    read = pair.at(good)
    values = divergence_of_logits(record, logits(read.p), logits(read.q), pair.across)
    values = torch.cat([values, cast("Any", _Unreadable).apply(unread, rest, *pair.tensors)])
    return values.index_select(0, torch.cat([good, rest]).argsort())


def unreadable(
    pair: HeadPair, zp: Float[Tensor, "tokens vocab"], zq: Float[Tensor, "tokens vocab"]
) -> Bool[Tensor, " tokens"]:
    """The tokens that leave NaN in the gradient of all they are multiplied with, even where what comes in is 0."""
    tops = pair.across.all_reduce_max(zp.amax(-1, keepdim=True), zq.amax(-1, keepdim=True))
    found = ~torch.cat(tops, -1).isfinite().all(-1)
    for model in (pair.p, pair.q):
        if model.head.weight is not None:
            found |= ~model.hidden.isfinite().all(-1)
        if isinstance(model.temperature, Tensor):
            found |= ~model.temperature.isfinite()
    return found


class _Unreadable(torch.autograd.Function):
    """Values whose gradient is NaN where any comes in for them, and 0 where none does."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, values: Tensor, rows: Tensor, *tensors: Tensor | None
    ) -> Tensor:
        ctx.rows, ctx.shapes = rows, [None if x is None else x.shape for x in tensors]
        return values.clone()

    @staticmethod
    def backward(ctx: Any, weight: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        counted = weight != 0
        gradients: list[Tensor | None] = []
        for place, (shape, needs) in enumerate(zip(ctx.shapes, ctx.needs_input_grad[2:], strict=True)):
            gradient = weight.new_zeros(shape) if needs else None
            if gradient is not None and place % 3 == 0:  # hidden states: those of the token itself
                gradient[ctx.rows[counted]] = torch.nan
            elif gradient is not None:
                gradient.masked_fill_(counted.any(), torch.nan)
            gradients.append(gradient)
        return None, None, *gradients


def widened(pair: HeadPair) -> HeadPair:
    """The same in the dtype of the logits: a tensor of both models is converted once, and its gradient rounded once."""
    known: dict[int, Tensor] = {}
    return converted(pair, lambda x: known.setdefault(id(x), x.to(pair.p.dtype)))


def converted(pair: HeadPair, convert: Callable[[Tensor], Tensor]) -> HeadPair:
    """The same two models with other tensors."""

    def one(model: HeadInputs) -> HeadInputs:
        hidden, weight, bias = (x if x is None else convert(x) for x in model.tensors)
        assert hidden is not None
        return replace(model, hidden=hidden, head=replace(model.head, weight=weight, bias=bias))

    return HeadPair(p=one(pair.p), q=one(pair.q))


def token_statistics(
    pair: HeadPair, tokens: Int[Tensor, " tokens"], options: LinearOptions
) -> TokenStatistics:
    """The statistics of each token."""
    return statistics_of_logits(logits(pair.p), logits(pair.q), tokens, pair.across)


def statistics_and_top(
    pair: HeadPair, tokens: Int[Tensor, " tokens"], options: LinearOptions, top: int
) -> StatisticsAndTop:
    """The statistics of each token, and both models' likeliest tokens there."""
    zp, zq = logits(pair.p), logits(pair.q)
    found = statistics_of_logits(zp, zq, tokens, pair.across)
    top_p, top_q = (
        TopTokens(*reversed(z.log_softmax(-1).exp().topk(min(top, z.shape[-1]), -1))) for z in (zp, zq)
    )
    return StatisticsAndTop(found, top_p, top_q)


def gradients(
    pair: HeadPair,
    record: Divergence,
    weights: Float[Tensor, " tokens"],
    needed: Needed,
    options: LinearOptions,
) -> ValueAndGrad:
    """The divergence of each token of a weight other than 0, and the gradient of their weighted sum."""
    leaves, given = detached(pair)
    read = weights != 0
    per_token = torch.zeros_like(weights, dtype=pair.p.dtype)
    with torch.enable_grad():
        values = divergence(leaves.at(read.nonzero()[:, 0]), record, options)
        found = derived((values * weights[read].to(values.dtype)).sum(), given, pair, needed)
    per_token[read] = values.detach()
    return ValueAndGrad(per_token, found)


def evaluate_objective(
    pair: HeadPair,
    tokens: Int[Tensor, " tokens"],
    objective: Objective,
    needed: Needed,
    options: LinearOptions,
) -> ObjectiveResult:
    """The sum of the objective's losses, the terms, and the gradients that are needed."""
    seen = terms_of_logits(logits(pair.p), logits(pair.q), tokens, pair.across)
    loss, coefficients = objective_value_and_grad(objective, seen, slice(0, pair.tokens))
    used = torch.stack([c != 0 for c in coefficients]).any(0).nonzero()[:, 0]
    leaves, given = detached(pair)
    with torch.enable_grad():
        read = leaves.at(used)
        terms = terms_of_logits(logits(read.p), logits(read.q), tokens[used], pair.across)
        total = combined(terms, TokenTerms(*(c[used] for c in coefficients))).sum()
        found = derived(total, given, pair, needed)
    return ObjectiveResult(loss, seen, found)


def detached(pair: HeadPair) -> tuple[HeadPair, tuple[Tensor | None, ...]]:
    """The same numbers as leaves of a graph of their own, in the dtype of the logits, and those leaves."""
    known: dict[int, Tensor] = {}

    def leaf(x: Tensor) -> Tensor:
        return known.setdefault(id(x), x.detach().to(pair.p.dtype, copy=True).requires_grad_())

    leaves = converted(pair, leaf)
    return leaves, leaves.tensors


def derived(
    total: Tensor, given: tuple[Tensor | None, ...], pair: HeadPair, needed: Needed
) -> tuple[Tensor | None, ...]:
    """The gradient of ``total`` in what is needed of the given leaves; of what both models have, all of it is p's."""
    both = [place >= 3 and x is given[place - 3] and needed[place - 3] for place, x in enumerate(given)]
    asked_of = [
        x if needs and not there else None for x, needs, there in zip(given, needed, both, strict=True)
    ]
    leaves = [x for x in asked_of if x is not None]
    if not leaves:
        return (None,) * len(given)
    found = iter(torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True))
    return tuple(
        None if x is None or original is None else next(found).to(gradient_dtype(original))
        for x, original in zip(asked_of, pair.tensors, strict=True)
    )
