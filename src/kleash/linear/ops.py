"""What a caller that is being compiled sees: one opaque operation for each public function.

Registered with torch as ``kleash::...``, so that ``torch.compile(fullgraph=True)`` takes them as they are and
does not unroll the chunks. Everything an operation is given is a tensor, a number or a name; it is put together,
checked and handed to an implementation when it runs. Eager callers do not come here.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from kleash.divergences import DIVERGENCES
from kleash.errors import CannotRunError
from kleash.linear.checks import INSTEAD, check_ids, common_dtype
from kleash.linear.impl.results import combined, gradient_dtype
from kleash.linear.packing import COMMON, COUNT, SHARED, Given, as_usual, given, named, needed, together
from kleash.linear.statistics import TokenStatistics, TokenTerms

__all__ = [
    "given",
    "linear_divergence",
    "linear_divergence_gradient",
    "named",
    "needed",
    "token_statistics",
    "token_terms",
]


def separate(needs: Sequence[bool], shared: Sequence[bool]) -> list[bool]:
    """Which gradients there are: that of one tensor that is both models' is whole in p's."""
    return [
        needed and not (place >= 3 and shared[place - 3] and needs[place - 3])
        for place, needed in enumerate(needs)
    ]


def answered(gradients: Sequence[Tensor | None], given: Given, needs: Sequence[bool]) -> list[Tensor]:
    """The gradients as an operation may return them: nothing is an empty tensor."""
    kept, there = list(gradients), separate(needs, given[SHARED])
    for place in range(3):
        if needs[place + 3] and not there[place + 3]:
            parts = [g for g in (kept[place], kept[place + 3]) if g is not None]
            kept[place] = parts[0] if len(parts) == 1 else parts[0] + parts[1]
    rows = zip(kept, given[:6], there, strict=True)
    return [g.reshape(x.shape) if n and g is not None else given[0].new_empty(0) for g, x, n in rows]


def returned(
    gradients: Sequence[Tensor], needs: Sequence[bool], shared: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients as autograd wants them."""
    return [g if there else None for g, there in zip(gradients, separate(needs, shared), strict=True)]


def operation(name: str, more: str, result: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """Register a function as ``kleash::name``."""
    schema = f"({COMMON}{more}) -> {result}"

    def register(function: Callable[..., Any]) -> Any:
        make = cast("Any", torch.library.custom_op)
        made = make(f"kleash::{name}", function, mutates_args=(), schema=schema)
        made.register_fake(fake)
        return made

    return register


def per_token(*x: Any) -> Tensor:
    """An empty number for each token."""
    return x[0].new_empty(x[0].shape[:-1], dtype=common_dtype(x[:6]))


def for_each(needs: Sequence[bool], x: Sequence[Any]) -> list[Tensor]:
    """Empty gradients."""
    return [
        torch.empty_like(t, dtype=gradient_dtype(t)) if n else x[0].new_empty(0)
        for t, n in zip(x[:6], separate(needs, x[SHARED]), strict=True)
    ]


@operation("linear_divergence", ", str divergence", "Tensor", lambda *x: per_token(*x))
def linear_divergence(*x: Any) -> Tensor:
    """Values per token."""
    record = DIVERGENCES[x[COUNT]]
    pair, options, engine = together(x[:COUNT], record)
    with as_usual(x):
        return engine.divergence(pair, record, options).reshape(x[0].shape[:-1])


@operation(
    "linear_divergence_gradient",
    ", str divergence, Tensor weights, bool[] needed",
    "(Tensor, Tensor, Tensor[])",
    lambda *x: (x[0].new_empty((), dtype=common_dtype(x[:6])), per_token(*x), for_each(x[COUNT + 2], x)),
)
def linear_divergence_gradient(*x: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The weighted sum, values per token, and the gradients of the sum."""
    name, weights, needs = x[COUNT:]
    record = DIVERGENCES[name]
    pair, options, engine = together(x[:COUNT], record)
    with as_usual(x):
        formed = engine.gradients(pair, record, weights.reshape(-1), tuple(needs), options)
    shares = torch.where(weights != 0, weights.to(formed.per_token.dtype), 0.0)
    values = formed.per_token.reshape(weights.shape)
    return (values * shares).sum(), values, answered(formed.gradients, x, needs)


@operation(
    "token_statistics",
    ", Tensor tokens",
    "Tensor[]",
    lambda *x: [
        per_token(*x).to(torch.int64 if name in ("top1_p", "top1_q", "rank_q") else common_dtype(x[:6]))
        for name in TokenStatistics._fields
    ],
)
def token_statistics(*x: Any) -> list[Tensor]:
    """The fields of TokenStatistics."""
    tokens = x[COUNT]
    pair, options, engine = together(x[:COUNT])
    check_ids(tokens, pair.words)
    with as_usual(x):
        found = engine.token_statistics(pair, tokens.reshape(-1).to(torch.int64), options)
    return [numbers.reshape(tokens.shape) for numbers in found]


def nothing(terms: TokenTerms, rows: slice) -> Tensor:
    """An objective that wants nothing."""
    return torch.zeros_like(terms.kl)


@operation(
    "token_terms",
    ", Tensor tokens",
    "(Tensor, Tensor, Tensor, Tensor)",
    lambda *x: tuple(per_token(*x) for _ in range(4)),
)
def token_terms(*x: Any) -> tuple[Tensor, ...]:
    """The fields of TokenTerms."""
    tokens = x[COUNT]
    pair, options, engine = together(x[:COUNT])
    check_ids(tokens, pair.words)
    flat = tokens.reshape(-1).to(torch.int64)
    with as_usual(x):
        found = engine.evaluate_objective(pair, flat, nothing, (False,) * 6, options)
    return tuple(numbers.reshape(tokens.shape) for numbers in found.terms)


@operation(
    "token_terms_gradient",
    ", Tensor tokens, Tensor c_logp, Tensor c_logq, Tensor c_kl, Tensor c_entropy, bool[] needed",
    "Tensor[]",
    lambda *x: for_each(x[COUNT + 5], x),
)
def token_terms_gradient(*x: Any) -> list[Tensor]:
    """The gradients of the sum of the terms times their coefficients."""
    tokens, *coefficients, needs = x[COUNT:]
    pair, options, engine = together(x[:COUNT])
    flat = TokenTerms(*(c.reshape(-1) for c in coefficients))

    def objective(terms: TokenTerms, rows: slice) -> Tensor:
        return combined(terms, TokenTerms(*(c[rows] for c in flat)))

    ids = tokens.reshape(-1).to(torch.int64)
    with as_usual(x):
        found = engine.evaluate_objective(pair, ids, objective, tuple(needs), options)
    return answered(found.gradients, x, needs)


def keep(ctx: Any, inputs: Given, output: Any) -> None:
    """Keep what an operation was given."""
    ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)))
    ctx.inputs = tuple(None if isinstance(x, Tensor) else x for x in inputs)
    ctx.tensors = tuple(isinstance(x, Tensor) for x in inputs)


def kept(ctx: Any) -> Given:
    """What ``keep`` kept."""
    saved = iter(ctx.saved_tensors)
    return tuple(
        next(saved) if is_tensor else x for is_tensor, x in zip(ctx.tensors, ctx.inputs, strict=True)
    )


def refuse_create_graph() -> None:
    """Raise in a backward pass that is to be differentiated again: what an operation returns is a constant then."""
    if torch.is_grad_enabled():
        raise CannotRunError(
            f"a compiled linear function can be differentiated once; leave create_graph off, or {INSTEAD}"
        )


def pull_values(ctx: Any, weights: Tensor) -> tuple[Any, ...]:
    """The gradient of values per token: the logits again."""
    refuse_create_graph()
    x, needs = kept(ctx), list(ctx.needs_input_grad[:6])
    found = linear_divergence_gradient(*x, weights, needs)[2]
    return *returned(found, needs, x[SHARED]), *(None for _ in x[6:])


def keep_gradients(ctx: Any, inputs: Given, output: Any) -> None:
    """Keep the gradients that came with the loss."""
    ctx.save_for_backward(*output[2])
    ctx.count, ctx.shared = len(inputs), inputs[SHARED]


def pull_loss(ctx: Any, weight: Tensor, *others: Any) -> tuple[Any, ...]:
    """The gradient of a loss, which is there already."""
    refuse_create_graph()
    found = [g * weight for g in ctx.saved_tensors]
    return *returned(found, ctx.needs_input_grad[:6], ctx.shared), *(None for _ in range(ctx.count - 6))


def pull_terms(ctx: Any, *coefficients: Tensor) -> tuple[Any, ...]:
    """The gradient of terms per token: the logits again."""
    refuse_create_graph()
    x, needs = kept(ctx), list(ctx.needs_input_grad[:6])
    found = token_terms_gradient(*x, *coefficients, needs)
    return *returned(found, needs, x[SHARED]), *(None for _ in x[6:])


for made, pull, keeps in (
    (linear_divergence, pull_values, keep),
    (linear_divergence_gradient, pull_loss, keep_gradients),
    (token_terms, pull_terms, keep),
):
    made.register_autograd(pull, setup_context=keeps)
