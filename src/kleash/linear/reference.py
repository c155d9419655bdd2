"""The specification: all logits at once, the functions of kleash.divergences in float64, and autograd."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kleash.autodiff import is_transformed
from kleash.divergences import Divergence
from kleash.divergences.functions import contributions
from kleash.linear import rows
from kleash.linear.chunked import Objective, objective_value_and_grad
from kleash.linear.options import LinearOptions
from kleash.linear.pair import HeadInputs, HeadPair, Tensors, gradient_dtype
from kleash.linear.products import logits, normalised
from kleash.linear.types import StatisticsAndTop, TokenStatistics, TokenTerms, TopTokens
from kleash.linear.vocab_shards import LOCAL_VOCAB


def dense_divergence(pair: HeadPair, record: Divergence) -> Float[Tensor, " tokens"]:
    """D(p || q) of each token, differentiable by autograd."""
    logp, logq = (normalised(logits(model).double()) for model in pair)
    return record.finish(contributions(record, logp, logq).sum(-1)).to(pair.dtype)


def dense_terms(pair: HeadPair, tokens: Int[Tensor, " tokens"]) -> TokenTerms:
    """The terms of each token, differentiable by autograd."""
    logp, logq = (normalised(logits(model).double()) for model in pair)
    terms = rows.local_terms(logp, logq, tokens, LOCAL_VOCAB)
    return TokenTerms(*(x[:, 0].to(pair.dtype) for x in terms))


def values(pair: HeadPair, options: LinearOptions, record: Divergence) -> Float[Tensor, " tokens"]:
    """D(p || q) of each token, differentiable by autograd.

    Tokens whose logits are not finite get a gradient of NaN if their incoming gradient is not 0.
    """
    pair = in_logit_dtype(pair)
    differentiated = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in pair.tensors)
    if not differentiated or any(is_transformed(x) for x in pair.tensors):
        return dense_divergence(pair, record)
    bad = has_nan_gradient(pair)
    if not bad.any():
        return dense_divergence(pair, record)
    good, rest = (chosen.nonzero()[:, 0] for chosen in (~bad, bad))
    with torch.no_grad():
        bad_values = dense_divergence(pair.select(rest), record)
    computed = dense_divergence(pair.select(good), record)
    computed = torch.cat([computed, cast("Any", _NaNGradient).apply(bad_values, rest, *pair.tensors)])
    return computed.index_select(0, torch.cat([good, rest]).argsort())


def value_and_grad(
    pair: HeadPair,
    options: LinearOptions,
    record: Divergence,
    weights: Float[Tensor, " tokens"],
    needed: tuple[bool, ...],
) -> tuple[Float[Tensor, " tokens"], Tensors]:
    """The divergence of each token of a weight other than 0, and the gradient of the weighted sum."""
    leaves, read = detached_leaves(pair), weights != 0
    per_token = torch.zeros_like(weights, dtype=pair.dtype)
    with torch.enable_grad():
        computed = values(leaves.select(read.nonzero()[:, 0]), options, record)
        total = (computed * weights[read].to(computed.dtype)).sum()
        gradients = gradients_of(total, leaves, pair, needed)
    per_token[read] = computed.detach()
    return per_token, gradients


def objective(
    pair: HeadPair,
    options: LinearOptions,
    tokens: Int[Tensor, " tokens"],
    function: Objective,
    needed: tuple[bool, ...],
) -> tuple[Float[Tensor, ""], TokenTerms, Tensors]:
    """The sum of the objective's losses, the terms of each token, and the gradients of the sum."""
    with torch.no_grad():
        terms = dense_terms(pair, tokens)
    loss, coefficients = objective_value_and_grad(function, terms, slice(0, pair.tokens))
    used = torch.stack([c != 0 for c in coefficients]).any(0).nonzero()[:, 0]
    leaves = detached_leaves(pair)
    with torch.enable_grad():
        used_terms = dense_terms(leaves.select(used), tokens[used])
        total = rows.weighted_terms(used_terms, TokenTerms(*(c[used] for c in coefficients))).sum()
        gradients = gradients_of(total, leaves, pair, needed)
    return loss, terms, gradients


def statistics(
    pair: HeadPair, options: LinearOptions, tokens: Int[Tensor, " tokens"], top: int
) -> StatisticsAndTop:
    """The statistics of each token, and the ``top`` likeliest tokens of both models."""
    zp, zq = (logits(model) for model in pair)
    columns = rows.any_statistics_rows(zp, zq, tokens, LOCAL_VOCAB)
    converted = (x[:, 0] if x.dtype == torch.int64 else x[:, 0].to(pair.dtype) for x in columns)
    top_p, top_q = (
        TopTokens(*reversed(normalised(z.double()).exp().topk(min(top, z.shape[-1]), -1))) for z in (zp, zq)
    )
    top_p, top_q = (TopTokens(x.token_ids, x.probability.to(pair.dtype)) for x in (top_p, top_q))
    return StatisticsAndTop(TokenStatistics(*converted), top_p, top_q)


def has_nan_gradient(pair: HeadPair) -> Bool[Tensor, " tokens"]:
    """Which tokens autograd gives a NaN gradient even for an incoming gradient of 0: something is not finite."""
    bad = torch.zeros(pair.tokens, dtype=torch.bool, device=pair.device)
    for model in pair:
        bad |= ~logits(model).detach().amax(-1).isfinite()
        if model.head.weight is not None:
            bad |= ~model.hidden.isfinite().all(-1)
        if isinstance(model.temperature, Tensor):
            bad |= ~model.temperature.isfinite()
    return bad


class _NaNGradient(torch.autograd.Function):
    """Values whose gradient is NaN where the incoming gradient is not 0, and 0 where it is."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, values: Tensor, tokens: Tensor, *tensors: Tensor | None
    ) -> Tensor:
        ctx.tokens, ctx.shapes = tokens, [None if x is None else x.shape for x in tensors]
        return values.clone()

    @staticmethod
    def backward(ctx: Any, weight: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        used = weight != 0
        gradients = [
            weight.new_zeros(shape) if needed else None
            for shape, needed in zip(ctx.shapes, ctx.needs_input_grad[2:], strict=True)
        ]
        for place, gradient in enumerate(gradients):
            if gradient is not None and place % 3 == 0:
                gradient[ctx.tokens[used]] = torch.nan
            elif gradient is not None:
                gradient.masked_fill_(used.any(), torch.nan)
        return None, None, *gradients


def in_logit_dtype(pair: HeadPair) -> HeadPair:
    """The pair in the dtype of its logits; a tensor of both models is converted once, to round its gradient once."""
    converted: dict[int, Tensor] = {}
    return with_tensors(pair, lambda x: converted.setdefault(id(x), x.to(pair.dtype)))


def detached_leaves(pair: HeadPair) -> HeadPair:
    """The pair with each tensor replaced by a leaf of a new graph, in the dtype of the logits."""
    leaves: dict[int, Tensor] = {}

    def leaf(x: Tensor) -> Tensor:
        return leaves.setdefault(id(x), x.detach().to(pair.dtype, copy=True).requires_grad_())

    return with_tensors(pair, leaf)


def with_tensors(pair: HeadPair, convert: Callable[[Tensor], Tensor]) -> HeadPair:
    """The pair with each of its tensors converted."""

    def with_converted(model: HeadInputs) -> HeadInputs:
        hidden, weight, bias = (x if x is None else convert(x) for x in model.tensors)
        assert hidden is not None
        return replace(model, hidden=hidden, head=replace(model.head, weight=weight, bias=bias))

    return replace(pair, p=with_converted(pair.p), q=with_converted(pair.q))


def gradients_of(total: Tensor, leaves: HeadPair, pair: HeadPair, needed: tuple[bool, ...]) -> Tensors:
    """The gradients of ``total`` in the leaves; for a tensor of both models, p's place has the whole gradient."""
    chosen: dict[int, tuple[int, Tensor]] = {}
    for place, (leaf, is_needed) in enumerate(zip(leaves.tensors, needed, strict=True)):
        if leaf is not None and is_needed:
            chosen.setdefault(id(leaf), (place, leaf))
    gradients: list[Tensor | None] = [None] * len(needed)
    if chosen:
        inputs = [leaf for _, leaf in chosen.values()]
        computed = torch.autograd.grad(total, inputs, allow_unused=True, materialize_grads=True)
        for (place, _), gradient in zip(chosen.values(), computed, strict=True):
            tensor = pair.tensors[place]
            assert tensor is not None
            gradients[place] = gradient.to(gradient_dtype(tensor))
    return tuple(gradients)
