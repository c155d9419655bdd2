"""Connects the backends to autograd: when a gradient is computed, and what is stored until the backward pass.

| what requires a gradient | when its gradient is computed | matmuls, where one pass over both heads is 2 |
|---|---|---|
| of a scalar loss: anything | in the forward pass, for the tokens' weights | 4; 3 if no head weight requires one |
| of values per token: hidden states only | in the forward pass; scaled row by row in the backward pass | 3 |
| of values per token: a weight or bias too | in the backward pass, from the logits computed again | 6 |
| of the last chunk of these | in the forward pass; scaled in the backward pass | 4 |

(Each further tensor that requires a gradient adds 1.)
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kleash.errors import CannotRunError
from kleash.linear.head_storage import HeadStorage
from kleash.linear.impl.base import (
    NOTHING_NEEDED,
    Backend,
    Gradients,
    HeadPair,
    Needed,
    Objective,
    Request,
    per_tensor,
)
from kleash.linear.types import LinearLoss, TokenTerms


def requires_gradient(pair: HeadPair) -> bool:
    """Whether autograd records the call: any of its tensors requires a gradient, and gradients are enabled."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in pair.tensors)


def differentiable_values(backend: Backend, request: Request) -> Float[Tensor, " tokens"]:
    """The divergence of each token, differentiable once."""
    return _apply(_Values, backend, request, *request.pair.tensors)


def weighted_sum(backend: Backend, request: Request, weights: Float[Tensor, " tokens"]) -> LinearLoss:
    """The weighted sum of the divergences, whose gradient is computed at once, and the divergences, detached."""

    def compute(needed: Needed) -> _LossAndGradients:
        result = backend.value_and_grad(request, weights, needed)
        factors = torch.where(weights != 0, weights.to(result.per_token.dtype), 0.0)
        return _LossAndGradients((result.per_token * factors).sum(), (result.per_token,), result.gradients)

    loss, per_token = _loss_and_outputs(request.pair, compute)
    return LinearLoss(loss, per_token)


def objective_loss(
    backend: Backend, request: Request, tokens: Int[Tensor, " tokens"], objective: Objective
) -> tuple[Tensor, TokenTerms]:
    """The sum of the objective's losses, whose gradient is computed at once, and the terms, detached."""

    def compute(needed: Needed) -> _LossAndGradients:
        result = backend.objective(request, tokens, objective, needed)
        return _LossAndGradients(result.loss, result.terms, result.gradients)

    loss, *terms = _loss_and_outputs(request.pair, compute)
    return loss, TokenTerms(*terms)


class _LossAndGradients(NamedTuple):
    loss: Tensor
    outputs: tuple[Tensor, ...]
    """Further results, which have no gradient."""
    gradients: Gradients


_Compute: TypeAlias = Callable[[Needed], _LossAndGradients]


def _loss_and_outputs(pair: HeadPair, compute: _Compute) -> tuple[Tensor, ...]:
    """The loss, then the outputs; the loss is differentiable if any tensor of the pair requires a gradient.

    ``compute`` runs once, here, with the gradients that are needed; the backward pass only scales them.
    """
    if requires_gradient(pair):
        return _apply(_Loss, compute, pair.storage, *pair.tensors)
    with torch.no_grad():
        result = compute(NOTHING_NEEDED)
    return result.loss, *result.outputs


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    return cast("Callable[..., Any]", function.apply)(*arguments)  # pyright: ignore[reportUnknownMemberType]


def _refuse_second_derivative(name: str) -> None:
    if torch.is_grad_enabled():
        raise CannotRunError(
            f"{name} can be differentiated once; leave create_graph off, or take linear_kl with impl='reference'"
        )


class _Values(torch.autograd.Function):
    """A divergence per token; stores its inputs, or the gradient of each token in the hidden states."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, backend: Backend, request: Request, *tensors: Tensor | None
    ) -> Tensor:
        needed: Needed = per_tensor(ctx.needs_input_grad[2:])
        ctx.save_for_backward(*tensors)
        ctx.backend, ctx.request, ctx.unit_gradients = backend, request, None
        if any((needed.p.weight, needed.p.bias, needed.q.weight, needed.q.bias)):
            values, ctx.saved_forward = backend.values_saving_forward(request, needed)
            return values
        pair = request.pair
        ones = torch.ones(pair.tokens, dtype=pair.p.dtype, device=pair.p.hidden.device)
        result = backend.value_and_grad(request, ones, needed)
        ctx.unit_gradients = result.gradients
        return result.per_token

    @staticmethod
    def backward(ctx: Any, weight: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        _refuse_second_derivative("linear_kl")
        _ = ctx.saved_tensors  # raises if one of them was changed in place since
        if ctx.unit_gradients is not None:
            column = weight[:, None]
            return None, None, *(None if x is None else _scaled(x, column) for x in ctx.unit_gradients)
        with torch.autocast(weight.device.type, enabled=False):
            # What was saved is used up; a graph with another backward pass to come computes all logits each time.
            saved = None if ctx.saved_forward is None or _graph_is_retained() else ctx.saved_forward
            needed: Needed = per_tensor(ctx.needs_input_grad[2:])
            result = ctx.backend.value_and_grad(ctx.request, weight, needed, saved)
        return None, None, *result.gradients


def _graph_is_retained() -> bool:
    """Whether the current backward pass retains its graph for another one; True if torch cannot tell."""
    autograd = cast("Any", torch)._C._autograd
    return bool(getattr(autograd, "_get_current_graph_task_keep_graph", lambda: True)())


def _scaled(gradient: Tensor, column: Tensor) -> Tensor:
    """The gradient times each token's incoming gradient; 0 where that is 0, even if the gradient is NaN."""
    return torch.where(column != 0, gradient * column, 0.0).to(gradient.dtype)


class _Loss(torch.autograd.Function):
    """A loss whose gradients were computed with it; the backward pass returns them without a copy."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, compute: _Compute, storage: HeadStorage | None, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        result = compute(per_tensor(ctx.needs_input_grad[2:]))
        ctx.gradients, ctx.storage = result.gradients, storage
        ctx.mark_non_differentiable(*result.outputs)
        ctx.set_materialize_grads(False)
        return result.loss, *result.outputs

    @staticmethod
    def backward(ctx: Any, *weights: Tensor | None) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        _refuse_second_derivative("the loss")
        if ctx.gradients is None:
            raise CannotRunError(
                "the gradient of this loss was computed once and a backward pass has used it; compute the loss again"
            )
        gradients, ctx.gradients = tuple(ctx.gradients), None
        weight = weights[0]
        if weight is None:
            return (None,) * (2 + len(gradients))
        if ctx.storage is not None:
            ctx.storage.require_equal_factor(weight)
        if weight.device.type != "cpu" or weight.item() != 1.0:
            for gradient in gradients:
                if gradient is not None:
                    gradient.mul_(weight)
        return None, None, *gradients
