"""The reference backend: all logits at once, and the functions of kleash.divergences. It is the specification."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kleash.autodiff import is_transformed
from kleash.divergences import Divergence, entropy, jensen_shannon, kl, total_variation
from kleash.divergences.functions import contributions
from kleash.linear.impl.base import (
    Backend,
    Gradients,
    HeadInputs,
    HeadPair,
    Needed,
    Objective,
    ObjectiveResult,
    PerModel,
    Request,
    SavedForward,
    ValueAndGrad,
    gradient_dtype,
    objective_value_and_grad,
    per_tensor,
    weighted_terms,
)
from kleash.linear.impl.project import both_normalised, logits
from kleash.linear.types import StatisticsAndTop, TokenStatistics, TokenTerms, TopTokens
from kleash.linear.vocab_shards import LOCAL_VOCAB, LocalVocab


def divergence_of_logits(
    record: Divergence,
    zp: Float[Tensor, "tokens vocab"],
    zq: Float[Tensor, "tokens vocab"],
    vocab_shards: LocalVocab = LOCAL_VOCAB,
) -> Float[Tensor, " tokens"]:
    """D(p || q) of each row of logits."""
    (total,) = vocab_shards.all_reduce_sum(
        contributions(record, *both_normalised(zp, zq, vocab_shards)).sum(-1)
    )
    return record.finish(total)


def statistics_of_logits(
    zp: Float[Tensor, "tokens vocab"],
    zq: Float[Tensor, "tokens vocab"],
    tokens: Int[Tensor, " tokens"],
    vocab_shards: LocalVocab = LOCAL_VOCAB,
) -> TokenStatistics:
    """The statistics of each row of logits and its token."""
    logp, logq = both_normalised(zp, zq, vocab_shards)
    tops = vocab_shards.all_reduce_max(zp.amax(-1, keepdim=True), zq.amax(-1, keepdim=True))
    top1_p, top1_q = vocab_shards.argmax((zp, zq), (zp.argmax(-1), zq.argmax(-1)), tops)
    (token_zq,) = vocab_shards.all_reduce_sum(vocab_shards.gather_local(zq, tokens))
    local = {
        "token_logp": vocab_shards.gather_local(logp, tokens)[:, 0],
        "token_logq": vocab_shards.gather_local(logq, tokens)[:, 0],
        "kl_pq": kl(logp, logq),
        "kl_qp": kl(logq, logp),
        "jensen_shannon": jensen_shannon(logp, logq),
        "total_variation": total_variation(logp, logq),
        "entropy_p": entropy(logp),
        "entropy_q": entropy(logq),
        "top1_probability_p": vocab_shards.gather_local(logp.exp(), top1_p)[:, 0],
        "top1_probability_q": vocab_shards.gather_local(logq.exp(), top1_q)[:, 0],
        "rank_q": torch.gt(zq, token_zq).sum(-1),
    }
    sums = dict(zip(local, vocab_shards.all_reduce_sum(*local.values()), strict=True))
    return TokenStatistics(top1_p=top1_p, top1_q=top1_q, **sums)


def terms_of_logits(
    zp: Float[Tensor, "tokens vocab"],
    zq: Float[Tensor, "tokens vocab"],
    tokens: Int[Tensor, " tokens"],
    vocab_shards: LocalVocab = LOCAL_VOCAB,
) -> TokenTerms:
    """The terms of each row of logits and its token."""
    logp, logq = both_normalised(zp, zq, vocab_shards)
    token_logp, token_logq = (vocab_shards.gather_local(x, tokens)[:, 0] for x in (logp, logq))
    return TokenTerms(*vocab_shards.all_reduce_sum(token_logp, token_logq, kl(logp, logq), entropy(logp)))


class ReferenceBackend:
    """Computes all logits at once and differentiates by autograd."""

    def unsupported(self, request: Request) -> str | None:
        """None: this backend can do every call."""
        return None

    def values(self, request: Request) -> Float[Tensor, " tokens"]:
        """The divergence of each token, differentiable by autograd.

        Tokens whose logits are not finite get a gradient of NaN if their incoming gradient is not 0.
        """
        return values_of_pair(request.pair, request.divergence)

    def values_saving_forward(
        self, request: Request, needed: Needed
    ) -> tuple[Float[Tensor, " tokens"], None]:
        """The divergence of each token; nothing is saved."""
        return self.values(request), None

    def value_and_grad(
        self,
        request: Request,
        weights: Float[Tensor, " tokens"],
        needed: Needed,
        saved: SavedForward | None = None,
    ) -> ValueAndGrad:
        """The divergence of each token of a weight other than 0, and the gradient of the weighted sum."""
        pair = request.pair
        leaves = detached_leaves(pair)
        read = weights != 0
        per_token = torch.zeros_like(weights, dtype=pair.p.dtype)
        with torch.enable_grad():
            values = values_of_pair(leaves.select(read.nonzero()[:, 0]), request.divergence)
            total = (values * weights[read].to(values.dtype)).sum()
            gradients = gradients_of(total, leaves, pair, needed)
        per_token[read] = values.detach()
        return ValueAndGrad(per_token, gradients)

    def objective(
        self, request: Request, tokens: Int[Tensor, " tokens"], objective: Objective, needed: Needed
    ) -> ObjectiveResult:
        """The sum of the objective's losses, the terms of each token, and the gradients of the sum."""
        pair = request.pair
        terms = terms_of_logits(logits(pair.p), logits(pair.q), tokens, pair.vocab_shards)
        loss, coefficients = objective_value_and_grad(objective, terms, slice(0, pair.tokens))
        used = torch.stack([c != 0 for c in coefficients]).any(0).nonzero()[:, 0]
        leaves = detached_leaves(pair)
        with torch.enable_grad():
            read = leaves.select(used)
            used_terms = terms_of_logits(logits(read.p), logits(read.q), tokens[used], pair.vocab_shards)
            total = weighted_terms(used_terms, TokenTerms(*(c[used] for c in coefficients))).sum()
            gradients = gradients_of(total, leaves, pair, needed)
        return ObjectiveResult(loss, terms, gradients)

    def statistics(self, request: Request, tokens: Int[Tensor, " tokens"]) -> TokenStatistics:
        """The statistics of each token."""
        pair = request.pair
        return statistics_of_logits(logits(pair.p), logits(pair.q), tokens, pair.vocab_shards)

    def statistics_and_top(
        self, request: Request, tokens: Int[Tensor, " tokens"], top: int
    ) -> StatisticsAndTop:
        """The statistics of each token, and the likeliest tokens of both models."""
        pair = request.pair
        zp, zq = logits(pair.p), logits(pair.q)
        statistics = statistics_of_logits(zp, zq, tokens, pair.vocab_shards)
        top_p, top_q = (
            TopTokens(*reversed(z.log_softmax(-1).exp().topk(min(top, z.shape[-1]), -1))) for z in (zp, zq)
        )
        return StatisticsAndTop(statistics, top_p, top_q)


REFERENCE: Backend = ReferenceBackend()


def values_of_pair(pair: HeadPair, record: Divergence) -> Float[Tensor, " tokens"]:
    """D(p || q) per token, differentiable; see ``ReferenceBackend.values``."""
    pair = in_logit_dtype(pair)
    zp, zq = logits(pair.p), logits(pair.q)
    differentiated = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in pair.tensors)
    if not differentiated or any(is_transformed(x) for x in pair.tensors):
        return divergence_of_logits(record, zp, zq, pair.vocab_shards)
    bad = has_nan_gradient(pair, zp.detach(), zq.detach())
    if not bad.any():
        return divergence_of_logits(record, zp, zq, pair.vocab_shards)
    good, rest = (rows.nonzero()[:, 0] for rows in (~bad, bad))
    with torch.no_grad():
        bad_values = divergence_of_logits(record, zp[rest], zq[rest], pair.vocab_shards)
    read = pair.select(good)
    values = divergence_of_logits(record, logits(read.p), logits(read.q), pair.vocab_shards)
    values = torch.cat([values, cast("Any", _NaNGradient).apply(bad_values, rest, *pair.tensors)])
    return values.index_select(0, torch.cat([good, rest]).argsort())


def has_nan_gradient(
    pair: HeadPair, zp: Float[Tensor, "tokens vocab"], zq: Float[Tensor, "tokens vocab"]
) -> Bool[Tensor, " tokens"]:
    """Which tokens autograd gives a NaN gradient even for an incoming gradient of 0: something is not finite."""
    tops = pair.vocab_shards.all_reduce_max(zp.amax(-1, keepdim=True), zq.amax(-1, keepdim=True))
    bad = ~torch.cat(tops, -1).isfinite().all(-1)
    for model in (pair.p, pair.q):
        if model.head.weight is not None:
            bad |= ~model.hidden.isfinite().all(-1)
        if isinstance(model.temperature, Tensor):
            bad |= ~model.temperature.isfinite()
    return bad


class _NaNGradient(torch.autograd.Function):
    """Values whose gradient is NaN where the incoming gradient is not 0, and 0 where it is."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, values: Tensor, rows: Tensor, *tensors: Tensor | None
    ) -> Tensor:
        ctx.rows, ctx.shapes = rows, [None if x is None else x.shape for x in tensors]
        return values.clone()

    @staticmethod
    def backward(ctx: Any, weight: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        used = weight != 0
        zeros: Gradients = per_tensor(
            weight.new_zeros(shape) if needed else None
            for shape, needed in zip(ctx.shapes, ctx.needs_input_grad[2:], strict=True)
        )
        for model in (zeros.p, zeros.q):
            if model.hidden is not None:
                model.hidden[ctx.rows[used]] = torch.nan
            for gradient in (model.weight, model.bias):
                if gradient is not None:
                    gradient.masked_fill_(used.any(), torch.nan)
        return None, None, *zeros


def in_logit_dtype(pair: HeadPair) -> HeadPair:
    """The pair in the dtype of its logits; a tensor of both models is converted once, to round its gradient once."""
    converted: dict[int, Tensor] = {}
    return with_tensors(pair, lambda x: converted.setdefault(id(x), x.to(pair.p.dtype)))


def with_tensors(pair: HeadPair, convert: Callable[[Tensor], Tensor]) -> HeadPair:
    """The pair with each of its tensors converted."""

    def with_converted(model: HeadInputs) -> HeadInputs:
        hidden, weight, bias = (x if x is None else convert(x) for x in model.tensors)
        assert hidden is not None
        return replace(model, hidden=hidden, head=replace(model.head, weight=weight, bias=bias))

    return HeadPair(p=with_converted(pair.p), q=with_converted(pair.q))


def detached_leaves(pair: HeadPair) -> HeadPair:
    """The pair with each tensor replaced by a leaf of a new graph, in the dtype of the logits."""
    leaves: dict[int, Tensor] = {}

    def leaf(x: Tensor) -> Tensor:
        return leaves.setdefault(id(x), x.detach().to(pair.p.dtype, copy=True).requires_grad_())

    return with_tensors(pair, leaf)


def gradients_of(total: Tensor, leaves: HeadPair, pair: HeadPair, needed: Needed) -> Gradients:
    """The gradients of ``total`` in the leaves; for a tensor of both models, p's place has the whole gradient."""

    def inputs(model: HeadInputs, flags: PerModel[bool]) -> list[Tensor | None]:
        return [x if flag else None for x, flag in zip(model.tensors, flags, strict=True)]

    inputs_p = inputs(leaves.p, needed.p)
    inputs_q = [
        None if x is not None and x is in_p else x
        for x, in_p in zip(inputs(leaves.q, needed.q), inputs_p, strict=True)
    ]
    flat = [*inputs_p, *inputs_q]
    present = [x for x in flat if x is not None]
    computed: list[Tensor] = []
    if present:
        computed = list(torch.autograd.grad(total, present, allow_unused=True, materialize_grads=True))
    remaining = iter(computed)
    return per_tensor(
        None if x is None or original is None else next(remaining).to(gradient_dtype(original))
        for x, original in zip(flat, pair.tensors, strict=True)
    )
