"""The gradient of the chunked KL: the logits are computed again, chunk by chunk."""

from collections.abc import Callable
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor

from kleash.errors import CannotRunError
from kleash.linear.impl.loop import RowCore, blocks, chunks, in_room, plan
from kleash.linear.impl.pair import OneModel, Pair
from kleash.linear.impl.project import into_hidden, pull_back_
from kleash.linear.impl.reference import kl_of_logits
from kleash.linear.impl.rows import gradient_rows
from kleash.linear.options import LinearOptions


def differentiable_kl(
    pair: Pair, options: LinearOptions, value: Callable[[], Tensor]
) -> Float[Tensor, " tokens"]:
    """``value()``, which is the KL of ``pair`` per token, with its gradient."""
    apply = cast("Callable[..., Tensor]", _LinearKL.apply)  # pyright: ignore[reportUnknownMemberType]
    return apply(pair, options, value, *pair.p.tensors, *pair.q.tensors)


class _LinearKL(torch.autograd.Function):
    """KL per token; keeps what it was given, and nothing else, for the backward pass."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, pair: Pair, options: LinearOptions, value: Callable[[], Tensor], *tensors: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.pair, ctx.options = pair, options
        return value()

    @staticmethod
    def backward(ctx: Any, weight: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if torch.is_grad_enabled():
            raise CannotRunError(
                "linear_kl can be differentiated once; leave create_graph off, or take impl='reference'"
            )
        _ = ctx.saved_tensors  # raises if one of them was changed in place since
        with torch.autocast(weight.device.type, enabled=False):
            found = gradients(ctx.pair, ctx.options, weight, ctx.needs_input_grad[3:])
        return None, None, None, *found


class Sums:
    """The gradients of one model's tensors, while they are being added up."""

    def __init__(self, model: OneModel, needed: tuple[bool, ...]) -> None:
        """Zeros where a gradient is needed, float32 or wider."""

        def zeros(tensor: Tensor | None, wanted: bool) -> Tensor | None:
            return torch.zeros_like(tensor, dtype=model.dtype) if wanted and tensor is not None else None

        self.model = model
        hidden, weight, bias = (zeros(*x) for x in zip(model.tensors, needed, strict=True))
        self.hidden, self.weight, self.bias = hidden, weight, bias

    def add(self, start: int, gradient: Float[Tensor, "chunk vocab"], tile: int) -> None:
        """Take in the gradient in a chunk's ``hidden W^T + bias``."""
        here = slice(start, start + len(gradient))
        if self.hidden is not None:
            self.hidden[here] = into_hidden(gradient, self.model, tile)
        if self.weight is not None:
            self.weight.addmm_(gradient.T, self.model.hidden[here].to(self.model.dtype))
        if self.bias is not None:
            self.bias.add_(gradient.sum(0))

    @property
    def done(self) -> tuple[Tensor | None, ...]:
        """The gradients, each in its tensor's dtype."""
        sums = (self.hidden, self.weight, self.bias)
        pairs = zip(sums, self.model.tensors, strict=True)
        return tuple(None if s is None or x is None else s.to(x.dtype) for s, x in pairs)


def gradients(
    pair: Pair, options: LinearOptions, weight: Float[Tensor, " tokens"], needed: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """Of ``sum weight KL``, in p's hidden states, weight and bias, and in q's; summed in float32."""
    cut = plan(pair, options)
    weight = weight.to(pair.p.dtype)
    core = in_room(gradient_rows, pair, cut)
    sums_p, sums_q = Sums(pair.p, needed[:3]), Sums(pair.q, needed[3:])
    for chunk in chunks(pair, cut):
        for here in blocks(pair, chunk, cut.rows):
            zp, zq = chunk.zp[here], chunk.zq[here]
            in_p, in_q = in_logits(core, zp, zq, weight[chunk.start :][here])
            pull_back_(in_p, zp, pair.p)
            pull_back_(in_q, zq, pair.q)
            zp.copy_(in_p)
            zq.copy_(in_q)
        sums_p.add(chunk.start, chunk.zp, cut.tile)
        sums_q.add(chunk.start, chunk.zq, cut.tile)
    return *sums_p.done, *sums_q.done


def in_logits(core: RowCore, zp: Tensor, zq: Tensor, weight: Float[Tensor, " rows"]) -> tuple[Tensor, Tensor]:
    """The gradients of ``weight KL`` in the logits; 0 where the weight is, whatever the logits hold."""
    kl, in_p, in_q = core(zp, zq, weight)
    rare = ~kl.isfinite()
    if rare.any():
        with torch.enable_grad():
            rows = [z[rare].requires_grad_() for z in (zp, zq)]
            in_p[rare], in_q[rare] = torch.autograd.grad(kl_of_logits(*rows), rows, weight[rare])
    unused = weight == 0
    in_p[unused], in_q[unused] = 0.0, 0.0
    return in_p, in_q
