"""How autograd meets an implementation: when its gradients are formed, and what is kept until they are asked for.

| what requires a gradient | when its gradient is formed | matmuls, both heads read once = 2 |
|---|---|---|
| of a scalar loss: anything | in the forward pass, for the weights given | 4; 3 if no weight requires one |
| of values per token: hidden states only | in the forward pass, scaled row by row in the backward pass | 3 |
| of values per token: a weight or bias too | in the backward pass, from the logits computed again | 6 |
| of the last chunk of these | in the forward pass, and weighed in the backward pass | 4 |

(For each further tensor that requires one, 1 more.)
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kleash.divergences import Divergence
from kleash.errors import CannotRunError
from kleash.linear.impl.pair import HeadPair
from kleash.linear.impl.results import Objective
from kleash.linear.options import LinearOptions
from kleash.linear.statistics import TokenTerms

T = TypeVar("T")


def wanted(pair: HeadPair) -> bool:
    """Whether a gradient may be asked for."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in pair.tensors)


def differentiable(
    engine: Any, pair: HeadPair, record: Divergence, options: LinearOptions
) -> Float[Tensor, " tokens"]:
    """The divergence of each token, with its gradient."""
    return _applied(_PerToken, engine, pair, record, options, *pair.tensors)


def weighted(
    engine: Any, pair: HeadPair, record: Divergence, weights: Float[Tensor, " tokens"], options: LinearOptions
) -> tuple[Tensor, Tensor]:
    """The weighted sum of the divergences, whose gradient is formed at once, and the divergences, detached."""

    def run(needed: tuple[bool, ...]) -> tuple[Any, ...]:
        formed = engine.gradients(pair, record, weights, needed, options)
        shares = torch.where(weights != 0, weights.to(formed.per_token.dtype), 0.0)
        return (formed.per_token * shares).sum(), (formed.per_token,), formed.gradients

    if not wanted(pair):
        with torch.no_grad():
            loss, (per_token,), _ = run((False,) * 6)
        return loss, per_token
    return _applied(_AtOnce, run, *pair.tensors)


def evaluate_objective(
    engine: Any, pair: HeadPair, tokens: Int[Tensor, " tokens"], objective: Objective, options: LinearOptions
) -> tuple[Tensor, TokenTerms]:
    """The sum of the objective's losses, whose gradient is formed at once, and the terms, detached."""

    def run(needed: tuple[bool, ...]) -> tuple[Any, ...]:
        found = engine.evaluate_objective(pair, tokens, objective, needed, options)
        return found.loss, found.terms, found.gradients

    if not wanted(pair):
        with torch.no_grad():
            loss, terms, _ = run((False,) * 6)
        return loss, terms
    loss, *terms = _applied(_AtOnce, run, *pair.tensors)
    return loss, TokenTerms(*terms)


def _applied(function: type[torch.autograd.Function], *given: Any) -> Any:
    return cast("Callable[..., Any]", function.apply)(*given)  # pyright: ignore[reportUnknownMemberType]


def _first_derivative_only(name: str) -> None:
    if torch.is_grad_enabled():
        raise CannotRunError(
            f"{name} can be differentiated once; leave create_graph off, or take linear_kl with impl='reference'"
        )


class _PerToken(torch.autograd.Function):
    """A divergence per token; keeps what it was given, or each token's gradient in the hidden states."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        engine: Any,
        pair: HeadPair,
        record: Divergence,
        options: LinearOptions,
        *tensors: Tensor | None,
    ) -> Tensor:
        needed = ctx.needs_input_grad[4:]
        ctx.save_for_backward(*tensors)
        ctx.engine, ctx.pair, ctx.record, ctx.options, ctx.unit = engine, pair, record, options, None
        if any(needed[1:3]) or any(needed[4:]):
            values, ctx.kept = engine.values_saving_forward(pair, record, needed, options)
            return values
        ones = torch.ones(pair.tokens, dtype=pair.p.dtype, device=pair.p.hidden.device)
        formed = engine.gradients(pair, record, ones, needed, options)
        ctx.unit = formed.gradients
        return formed.per_token

    @staticmethod
    def backward(ctx: Any, weight: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        _first_derivative_only("linear_kl")
        _ = ctx.saved_tensors  # raises if one of them was changed in place since
        if ctx.unit is not None:
            column = weight[:, None]
            return None, None, None, None, *(x if x is None else _scaled(x, column) for x in ctx.unit)
        with torch.autocast(weight.device.type, enabled=False):
            needed = ctx.needs_input_grad[4:]
            # What is kept is used up: a graph that may be asked again computes all logits again, every time alike.
            kept = {} if ctx.kept is None or _asked_again() else {"kept": ctx.kept}
            found = ctx.engine.gradients(ctx.pair, ctx.record, weight, needed, ctx.options, **kept).gradients
        return None, None, None, None, *found


def _asked_again() -> bool:
    """Whether the backward pass under way leaves its graph for another one; True where torch does not say."""
    said = getattr(cast("Any", torch)._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)
    return bool(said())


def _scaled(gradient: Tensor, column: Tensor) -> Tensor:
    """Each token's gradient times what comes in for it; 0 where that is, whatever the gradient holds."""
    return torch.where(column != 0, gradient * column, 0.0).to(gradient.dtype)


class _AtOnce(torch.autograd.Function):
    """A loss that comes with its gradients; gives them away in the backward pass."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, run: Callable[[tuple[bool, ...]], tuple[Any, ...]], *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        loss, others, ctx.gradients = run(ctx.needs_input_grad[1:])
        ctx.mark_non_differentiable(*others)
        ctx.set_materialize_grads(False)
        return loss, *others

    @staticmethod
    def backward(ctx: Any, *weights: Tensor | None) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        _first_derivative_only("the loss")
        if ctx.gradients is None:
            raise CannotRunError(
                "the gradient of this loss was formed once and has been given away; compute the loss again"
            )
        gradients, ctx.gradients = ctx.gradients, None
        weight = weights[0]
        if weight is None:
            return (None,) * (1 + len(gradients))
        if weight.device.type != "cpu" or weight.item() != 1.0:
            for gradient in gradients:
                if gradient is not None:
                    gradient.mul_(weight)
        return None, *gradients
