"""The specification: all logits at once in float64, the functions of kleash.divergences, and autograd."""

from collections.abc import Callable
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kleash.divergences import Divergence
from kleash.divergences.functions import contributions
from kleash.linear import rows
from kleash.linear.pair import HeadInputs, HeadPair
from kleash.linear.products import logits
from kleash.linear.types import LinearLoss, TokenTerms
from kleash.precision import normalised


def values(pair: HeadPair, record: Divergence) -> Float[Tensor, " tokens"]:
    """D(p || q) of each token, differentiable by autograd."""
    logp, logq = (normalised(logits(model)) for model in in_float64(pair))
    return record.finish(contributions(record, logp, logq).sum(-1)).to(pair.dtype)


def terms(pair: HeadPair, tokens: Int[Tensor, " tokens"]) -> TokenTerms:
    """The terms of each token, differentiable by autograd."""
    logp, logq = (normalised(logits(model)) for model in in_float64(pair))
    columns = rows.local_terms(logp, logq, tokens, pair.vocab_shards)
    return TokenTerms(*(x[:, 0].to(pair.dtype) for x in columns))


def weighted_sum(pair: HeadPair, record: Divergence, weights: Float[Tensor, " tokens"]) -> LinearLoss:
    """The weighted sum of the divergences of the tokens of a weight other than 0, and the divergences, detached."""
    read = (weights != 0).nonzero()[:, 0]
    computed = values(pair.select(read), record)
    per_token = torch.zeros_like(weights, dtype=pair.dtype)
    per_token[read] = computed.detach()
    return LinearLoss((computed * weights[read].to(pair.dtype)).sum(), per_token)


def in_float64(pair: HeadPair) -> HeadPair:
    """The pair in float64; a tensor of both models is converted once, so that its gradient is rounded once.

    Autocast rounds no float64 product, in the backward pass either.
    """
    converted: dict[int, Tensor] = {}

    def convert(x: Tensor) -> Tensor:
        return converted.setdefault(id(x), x.double())

    return replace(pair, p=with_tensors(pair.p, convert), q=with_tensors(pair.q, convert))


def with_tensors(model: HeadInputs, convert: Callable[[Tensor], Tensor]) -> HeadInputs:
    """The model with each of its tensors converted."""
    weight, bias = (None if x is None else convert(x) for x in (model.head.weight, model.head.bias))
    return replace(
        model,
        hidden=convert(model.hidden),
        head=replace(model.head, weight=weight, bias=bias),
        dtype=torch.float64,
    )
