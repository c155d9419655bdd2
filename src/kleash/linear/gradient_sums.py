"""The gradients of the tensors of a call, summed chunk by chunk."""

import torch
from jaxtyping import Float
from torch import Tensor

from kleash.linear.pair import HeadPair, Tensors, TokenIndex, gradient_dtype
from kleash.linear.products import add_weight_gradient_, has_bfloat16_gradient, hidden_gradient


class GradientSums:
    """A sum for each tensor that needs a gradient: one for a tensor of both models, whose two parts nearly cancel.

    Sums of weights and biases, and of hidden states that both models share, have the dtype of the logits; they are
    rounded once, at the end.
    """

    def __init__(self, pair: HeadPair, needed: tuple[bool, ...]) -> None:
        """``needed``: which of the six tensors need a gradient."""
        self.tensors, self.needed, self.vocab_shards = pair.tensors, needed, pair.vocab_shards
        self.needs = any(needed[:3]), any(needed[3:])
        self.sums: dict[int, Tensor] = {}
        for place, (tensor, is_needed) in enumerate(zip(self.tensors, needed, strict=True)):
            if tensor is not None and is_needed:
                is_own_hidden = place % 3 == 0 and not self.is_shared(place)
                dtype = gradient_dtype(tensor) if is_own_hidden else pair.dtype
                self.sums.setdefault(id(tensor), torch.zeros_like(tensor, dtype=dtype))

    def is_shared(self, place: int) -> bool:
        """Whether the tensor at one of the six places is both models'."""
        return self.tensors[place] is self.tensors[(place + 3) % 6]

    def sum_at(self, place: int) -> Tensor | None:
        """The sum of the tensor at one of the six places; None if it needs no gradient."""
        return self.sums.get(id(self.tensors[place])) if self.needed[place] else None

    def buffers(self, chunk: HeadPair, *logits: Float[Tensor, "chunk vocab"]) -> tuple[Tensor | None, ...]:
        """Where the gradients in a chunk's logits of p and q are written; None where not needed.

        They are written over the logits, unless they are multiplied in another dtype.
        """
        dtypes = [
            torch.bfloat16
            if has_bfloat16_gradient(model)
            and not any(self.is_shared(n) for n in range(first, first + 3) if self.needed[n])
            else chunk.dtype
            for first, model in zip((0, 3), chunk, strict=True)
        ]
        return tuple(
            (z if dtype == z.dtype else torch.empty_like(z, dtype=dtype)) if is_needed else None
            for z, dtype, is_needed in zip(logits, dtypes, self.needs, strict=True)
        )

    def add(
        self,
        chunk: HeadPair,
        index: TokenIndex,
        local: slice,
        gradients: tuple[Float[Tensor, "chunk vocab"] | None, ...],
        tiles: tuple[int, int],
    ) -> None:
        """Add what follows from the gradients in a chunk's ``hidden W^T + bias``.

        Args:
            chunk: the tokens of the chunk, on several ranks perhaps of all of them.
            index: which of this rank's tokens are in it.
            local: where these stand in the chunk.
            gradients: of p and of q; None where not needed.
            tiles: rows of the two weights that are multiplied together.
        """
        for first, model, gradient, tile in zip((0, 3), chunk, gradients, tiles, strict=True):
            if gradient is None:
                continue
            of_hidden, of_weight, of_bias = (self.sum_at(first + n) for n in range(3))
            if of_bias is not None:
                of_bias.add_(gradient.sum(0, dtype=of_bias.dtype))
            if of_weight is not None:
                add_weight_gradient_(of_weight, gradient, model.hidden, tile)
            if of_hidden is not None:
                rows = hidden_gradient(gradient, model, tile)
                if model.head.weight is not None:
                    rows = self.vocab_shards.all_reduce_gradient(rows)
                rows = rows[local].to(of_hidden.dtype)
                # hidden states of both models have the sum of two gradients
                of_hidden[index] = of_hidden[index] + rows if self.is_shared(first) else rows

    @property
    def gradients(self) -> Tensors:
        """The gradients in the ``gradient_dtype`` of their tensors; of a tensor of both models, in p's place only."""
        return tuple(
            None
            if tensor is None
            or total is None
            or (place >= 3 and self.is_shared(place) and self.needed[place - 3])
            else total.to(gradient_dtype(tensor))
            for place, (tensor, total) in enumerate(
                zip(self.tensors, map(self.sum_at, range(len(self.tensors))), strict=True)
            )
        )
