"""The custom operations that stand for the public functions inside ``torch.compile``.

Registered with torch as ``kleash::...``, so that a caller compiled with ``fullgraph=True`` sees one operation and not
the loop over chunks. An operation unpacks its arguments, checks them and calls a backend when it runs. Eager callers
do not use these.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from kleash.divergences import DIVERGENCES
from kleash.errors import CannotRunError
from kleash.linear.checks import ALTERNATIVE, check_ids, common_dtype
from kleash.linear.impl.base import NOTHING_NEEDED, per_tensor, weighted_objective, zero_objective
from kleash.linear.packing import (
    COUNT,
    SCHEMA,
    SHARED,
    TENSORS,
    Packed,
    empty_gradients,
    empty_per_token,
    pack_gradients,
    unpack,
    unpack_gradients,
    without_autograd_dispatch,
)
from kleash.linear.types import INTEGER_FIELDS, TokenStatistics, TokenTerms

__all__ = ["linear_divergence", "linear_divergence_gradient", "token_statistics", "token_terms"]


def operation(name: str, more: str, result: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that registers a function as ``kleash::name``; ``more`` extends the common schema."""
    schema = f"({SCHEMA}{more}) -> {result}"

    def register(function: Callable[..., Any]) -> Any:
        custom_op = cast("Any", torch.library.custom_op)
        registered = custom_op(f"kleash::{name}", function, mutates_args=(), schema=schema)
        registered.register_fake(fake)
        return registered

    return register


@operation("linear_divergence", ", str divergence", "Tensor", lambda *x: empty_per_token(x))
def linear_divergence(*x: Any) -> Tensor:
    """The divergence of each token."""
    backend, request = unpack(x[:COUNT], DIVERGENCES[x[COUNT]])
    with without_autograd_dispatch(x):
        return backend.values(request).reshape(x[0].shape[:-1])


@operation(
    "linear_divergence_gradient",
    ", str divergence, Tensor weights, bool[] needed",
    "(Tensor, Tensor, Tensor[])",
    lambda *x: (
        x[0].new_empty((), dtype=common_dtype(x[:TENSORS])),
        empty_per_token(x),
        empty_gradients(x[COUNT + 2], x),
    ),
)
def linear_divergence_gradient(*x: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The weighted sum, the divergence of each token, and the gradients of the sum."""
    name, weights, needed = x[COUNT:]
    backend, request = unpack(x[:COUNT], DIVERGENCES[name])
    with without_autograd_dispatch(x):
        result = backend.value_and_grad(request, weights.reshape(-1), per_tensor(needed))
    factors = torch.where(weights != 0, weights.to(result.per_token.dtype), 0.0)
    values = result.per_token.reshape(weights.shape)
    return (values * factors).sum(), values, pack_gradients(result.gradients, x, needed)


@operation(
    "token_statistics",
    ", Tensor tokens",
    "Tensor[]",
    lambda *x: [
        empty_per_token(x).to(torch.int64 if name in INTEGER_FIELDS else common_dtype(x[:TENSORS]))
        for name in TokenStatistics._fields
    ],
)
def token_statistics(*x: Any) -> list[Tensor]:
    """The fields of TokenStatistics."""
    tokens = x[COUNT]
    backend, request = unpack(x[:COUNT])
    check_ids(tokens, request.pair.vocab_size)
    with without_autograd_dispatch(x):
        statistics = backend.statistics(request, tokens.reshape(-1).to(torch.int64))
    return [column.reshape(tokens.shape) for column in statistics]


@operation(
    "token_terms",
    ", Tensor tokens",
    "(Tensor, Tensor, Tensor, Tensor)",
    lambda *x: tuple(empty_per_token(x) for _ in TokenTerms._fields),
)
def token_terms(*x: Any) -> tuple[Tensor, ...]:
    """The fields of TokenTerms."""
    tokens = x[COUNT]
    backend, request = unpack(x[:COUNT])
    check_ids(tokens, request.pair.vocab_size)
    flat = tokens.reshape(-1).to(torch.int64)
    with without_autograd_dispatch(x):
        result = backend.objective(request, flat, zero_objective, NOTHING_NEEDED)
    return tuple(term.reshape(tokens.shape) for term in result.terms)


@operation(
    "token_terms_gradient",
    ", Tensor tokens, Tensor c_logp, Tensor c_logq, Tensor c_kl, Tensor c_entropy, bool[] needed",
    "Tensor[]",
    lambda *x: empty_gradients(x[COUNT + 5], x),
)
def token_terms_gradient(*x: Any) -> list[Tensor]:
    """The gradients of the sum over all tokens of coefficient times term."""
    tokens, *coefficients, needed = x[COUNT:]
    backend, request = unpack(x[:COUNT])
    objective = weighted_objective(TokenTerms(*(c.reshape(-1) for c in coefficients)))
    ids = tokens.reshape(-1).to(torch.int64)
    with without_autograd_dispatch(x):
        result = backend.objective(request, ids, objective, per_tensor(needed))
    return pack_gradients(result.gradients, x, needed)


def save_inputs(ctx: Any, inputs: Packed, output: Any) -> None:
    """Store an operation's inputs for its backward pass."""
    ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)))
    ctx.inputs = tuple(None if isinstance(x, Tensor) else x for x in inputs)
    ctx.is_tensor = tuple(isinstance(x, Tensor) for x in inputs)


def saved_inputs(ctx: Any) -> Packed:
    """The inputs that ``save_inputs`` stored."""
    tensors = iter(ctx.saved_tensors)
    return tuple(
        next(tensors) if is_tensor else x for is_tensor, x in zip(ctx.is_tensor, ctx.inputs, strict=True)
    )


def refuse_create_graph() -> None:
    """Raise in a backward pass with ``create_graph``: the result of an operation would be a constant in it."""
    if torch.is_grad_enabled():
        raise CannotRunError(
            f"a compiled linear function can be differentiated once; leave create_graph off, or {ALTERNATIVE}"
        )


def padded(gradients: Sequence[Tensor | None], count: int) -> tuple[Tensor | None, ...]:
    """The gradients, and None for each further input of an operation with ``count`` inputs."""
    return *gradients, *(None for _ in range(count - TENSORS))


def values_backward(ctx: Any, weights: Tensor) -> tuple[Tensor | None, ...]:
    """The gradient of values per token, from the logits computed again."""
    refuse_create_graph()
    x, needed = saved_inputs(ctx), list(ctx.needs_input_grad[:TENSORS])
    gradients = linear_divergence_gradient(*x, weights, needed)[2]
    return padded(unpack_gradients(gradients, needed, x[SHARED]), len(x))


def save_gradients(ctx: Any, inputs: Packed, output: Any) -> None:
    """Store the gradients that were computed with a loss."""
    ctx.save_for_backward(*output[2])
    ctx.count, ctx.shared = len(inputs), inputs[SHARED]


def loss_backward(ctx: Any, weight: Tensor, *unused: Any) -> tuple[Tensor | None, ...]:
    """The stored gradient of a loss, times the incoming gradient."""
    refuse_create_graph()
    gradients = [g * weight for g in ctx.saved_tensors]
    return padded(unpack_gradients(gradients, ctx.needs_input_grad[:TENSORS], ctx.shared), ctx.count)


def terms_backward(ctx: Any, *coefficients: Tensor) -> tuple[Tensor | None, ...]:
    """The gradient of terms per token, from the logits computed again."""
    refuse_create_graph()
    x, needed = saved_inputs(ctx), list(ctx.needs_input_grad[:TENSORS])
    gradients = token_terms_gradient(*x, *coefficients, needed)
    return padded(unpack_gradients(gradients, needed, x[SHARED]), len(x))


for registered, backward, setup_context in (
    (linear_divergence, values_backward, save_inputs),
    (linear_divergence_gradient, loss_backward, save_gradients),
    (token_terms, terms_backward, save_inputs),
):
    registered.register_autograd(backward, setup_context=setup_context)
