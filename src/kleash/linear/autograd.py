"""Connects the implementations to autograd: when a gradient is computed, and what is stored until the backward pass.

| what requires a gradient | when its gradient is computed | matmuls, where one pass over both heads is 2 |
|---|---|---|
| of a scalar loss: anything | in the forward pass, for the tokens' weights | 4; 3 if no head weight requires one |
| of values per token: hidden states only | in the forward pass; scaled row by row in the backward pass | 3 |
| of values per token: a weight or bias too | in the backward pass, from the logits computed again | 6 |

(Each further tensor that requires a gradient adds 1.)
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kleash.autodiff import apply
from kleash.divergences import Divergence
from kleash.errors import CannotRunError
from kleash.linear import chunked, reference
from kleash.linear.pair import HeadPair, Tensors
from kleash.linear.types import LinearLoss, LinearOptions, TokenTerms
from kleash.linear.vocab_shards import VocabShards

Needed: TypeAlias = tuple[bool, ...]
"""Which of the six tensors need a gradient."""
NONE_NEEDED: Needed = (False,) * 6
LossAndGradients: TypeAlias = tuple[Tensor, tuple[Tensor, ...], Tensors]
"""A loss, further results without a gradient, and the gradients of the loss in the six tensors."""


def is_reference(pair: HeadPair, options: LinearOptions) -> bool:
    """Whether a call is computed by ``reference``, which needs all rows of both heads."""
    return options.impl == "reference" and not pair.is_sharded


def divergence_values(pair: HeadPair, options: LinearOptions, record: Divergence) -> Float[Tensor, " tokens"]:
    """The divergence of each token, differentiable once, or by autograd's own functions in the reference."""
    if is_reference(pair, options):
        return reference.values(pair, record)
    if pair.requires_gradient:
        return apply(_Values, pair, options, record, *pair.tensors)
    return _values_and_unit_gradients(pair, options, record, NONE_NEEDED)[0]


def _values_and_unit_gradients(
    pair: HeadPair, options: LinearOptions, record: Divergence, needed: Needed
) -> tuple[Tensor, Tensors]:
    """The divergence of each token, and the gradients of their sum that are needed."""
    ones = torch.ones(pair.tokens, dtype=pair.dtype, device=pair.device)
    return chunked.value_and_grad(pair, options, record, ones, needed)


def weighted_sum(
    pair: HeadPair, options: LinearOptions, record: Divergence, weights: Float[Tensor, " tokens"]
) -> LinearLoss:
    """The weighted sum of the divergences, whose gradient is computed at once, and the divergences, detached."""
    if is_reference(pair, options):
        return reference.weighted_sum(pair, record, weights)

    def compute(needed: Needed) -> LossAndGradients:
        per_token, gradients = chunked.value_and_grad(pair, options, record, weights, needed)
        return (per_token * weights.to(per_token.dtype)).sum(), (per_token,), gradients

    loss, per_token = _loss_and_outputs(pair, compute)
    return LinearLoss(loss, per_token)


def objective_loss(
    pair: HeadPair, options: LinearOptions, tokens: Int[Tensor, " tokens"], objective: chunked.Objective
) -> tuple[Tensor, TokenTerms]:
    """The sum of the objective's losses, whose gradient is computed at once, and the terms, detached."""
    if is_reference(pair, options):
        terms = reference.terms(pair, tokens)
        losses = chunked.losses_of(objective, terms, slice(0, pair.tokens))
        return losses.sum(), TokenTerms(*(x.detach() for x in terms))

    def compute(needed: Needed) -> LossAndGradients:
        return chunked.objective(pair, options, tokens, objective, needed)

    loss, *terms = _loss_and_outputs(pair, compute)
    return loss, TokenTerms(*terms)


def _loss_and_outputs(pair: HeadPair, compute: Callable[[Needed], LossAndGradients]) -> tuple[Tensor, ...]:
    """The loss, then the outputs; the loss is differentiable if any tensor of the pair requires a gradient.

    ``compute`` runs once, here, with the gradients that are needed; the backward pass only scales them.
    """
    if pair.requires_gradient:
        return apply(_Loss, compute, pair.vocab_shards, *pair.tensors)
    with torch.no_grad():
        loss, outputs, _ = compute(NONE_NEEDED)
    return loss, *outputs


def _refuse_second_derivative(name: str) -> None:
    """Raise CannotRunError in a backward pass that is itself differentiated."""
    if torch.is_grad_enabled():
        raise CannotRunError(
            f"{name} can be differentiated once; leave create_graph off, or take linear_kl with impl='reference'"
        )


class _Values(torch.autograd.Function):
    """A divergence per token; stores its inputs, or the gradient of each token in the hidden states.

    The first three arguments are no tensors, and have no gradient. The six tensors are those of ``HeadPair.tensors``:
    if only hidden states (places 0 and 3) need a gradient, it is computed with the values.
    """

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any, pair: HeadPair, options: LinearOptions, record: Divergence, *tensors: Tensor | None
    ) -> Tensor:
        needed = ctx.needs_input_grad[3:]
        # Those of inference mode cannot be changed in place, and not be saved.
        ctx.save_for_backward(*(None if x is None or x.is_inference() else x for x in tensors))
        ctx.call = pair, options, record
        ctx.is_computed = not any(needed[place] for place in (1, 2, 4, 5))
        values, ctx.unit_gradients = _values_and_unit_gradients(
            pair, options, record, needed if ctx.is_computed else NONE_NEEDED
        )
        return values

    @staticmethod
    def backward(ctx: Any, weight: Tensor) -> tuple[Any, ...]:  # pyrefly: ignore[bad-override]
        _refuse_second_derivative("linear_kl")
        _ = ctx.saved_tensors  # raises if one of them was changed in place since
        if ctx.is_computed:
            column = weight[:, None]
            return None, None, None, *(None if x is None else _scaled(x, column) for x in ctx.unit_gradients)
        with torch.autocast(weight.device.type, enabled=False):
            pair, options, record = ctx.call
            _, gradients = chunked.value_and_grad(pair, options, record, weight, ctx.needs_input_grad[3:])
        return None, None, None, *gradients


def _scaled(gradient: Tensor, column: Tensor) -> Tensor:
    """The gradient times each token's incoming gradient; 0 where that is 0, even if the gradient is NaN."""
    return torch.where(column != 0, gradient * column, 0.0).to(gradient.dtype)


class _Loss(torch.autograd.Function):
    """A loss whose gradients were computed with it; the backward pass returns them without a copy."""

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any,
        compute: Callable[[Needed], LossAndGradients],
        vocab_shards: VocabShards,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, ...]:
        loss, outputs, ctx.gradients = compute(ctx.needs_input_grad[2:])
        ctx.vocab_shards = vocab_shards
        ctx.mark_non_differentiable(*outputs)
        ctx.set_materialize_grads(False)
        return loss, *outputs

    @staticmethod
    def backward(ctx: Any, *weights: Tensor | None) -> tuple[Any, ...]:
        _refuse_second_derivative("the loss")
        if ctx.gradients is None:
            raise CannotRunError(
                "the gradient of this loss was computed once and a backward pass has used it; compute the loss again"
            )
        gradients, ctx.gradients = ctx.gradients, None
        weight = weights[0]
        if weight is None:
            return (None,) * (2 + len(gradients))
        if ctx.vocab_shards.has_own_tokens:
            ctx.vocab_shards.require_equal_factor(weight)
        if weight.device.type != "cpu" or weight.item() != 1.0:
            for gradient in gradients:
                if gradient is not None:
                    gradient.mul_(weight)
        return None, None, *gradients
