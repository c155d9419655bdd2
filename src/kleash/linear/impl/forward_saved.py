"""Saves the gradient of the last chunk's values in the forward pass, for the backward pass to scale.

A backward pass after values needs the logits again, but those of the last chunk are still in memory. They become the
gradient of the values in place, within the memory of the call; once the incoming gradient is known, each row is
multiplied by its token's, and no product is computed again.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from kleash.linear.impl.base import SavedForward, TokenIndex
from kleash.linear.impl.chunk_loop import ROW_BLOCK
from kleash.linear.impl.sums import GradientSums, GradientSumsPair


class SavedGradient(GradientSums):
    """In place of a model's sums: stores the gradient of one chunk, in float32."""

    def __init__(self, needed: bool) -> None:
        """Nothing is stored yet."""
        self.needed, self.is_bfloat16 = needed, False
        self.gradient: Tensor | None = None

    def add(
        self, index: TokenIndex, gradient: Float[Tensor, "chunk vocab"], hidden: Tensor, tile: int
    ) -> None:
        """Store the gradient."""
        self.gradient = gradient


def add_saved_gradient(
    saved: SavedForward, weights: Float[Tensor, " tokens"], sums: GradientSumsPair
) -> Float[Tensor, " tokens"]:
    """Add the saved gradient times the weights to the sums, and return the weights with 0 for the saved tokens.

    A token of weight 0 adds 0, even if its gradient or hidden states are NaN. The saved gradient is used up.
    """
    index = slice(saved.start, len(weights))
    saved_weights, rest = weights[index], weights.clone()
    rest[index] = 0.0
    unused = saved_weights == 0
    if not unused.all():
        for model, gradient, total in zip((saved.last.p, saved.last.q), saved.gradients, sums, strict=True):
            if gradient is not None:
                hidden = model.hidden.masked_fill(unused[:, None], 0.0) if unused.any() else model.hidden
                scaled = scale_rows_(gradient, saved_weights, total.gradient_buffer(gradient))
                total.add(index, scaled, hidden, saved.tile_rows)
    saved.gradients = None, None
    return rest


def scale_rows_(
    gradient: Float[Tensor, "chunk vocab"],
    weights: Float[Tensor, " chunk"],
    out: Float[Tensor, "chunk vocab"],
) -> Float[Tensor, "chunk vocab"]:
    """Each row times its weight, 0 where that is 0, written into ``out``, which may share the gradient's memory."""
    step = max(1, ROW_BLOCK // gradient.shape[1])
    for start in range(0, len(gradient), step):
        rows = slice(start, start + step)
        column = weights[rows, None]
        out[rows] = torch.where(column != 0, gradient[rows] * column, 0.0)
    return out
