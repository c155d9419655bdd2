"""Values now and their gradient later: the last chunk's stays where it is until the tokens' weights are known.

Values that are differentiated later need the logits twice, but those of the chunk that was computed last are still
there. They become the gradient of the values themselves, in their own memory, which is part of the budget; once the
weights are known, each row is multiplied by its own, and no product has to be made again.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from kleash.linear.impl.loop import ROW_BLOCK
from kleash.linear.impl.pair import HeadPair, Where
from kleash.linear.impl.sums import GradientSums


class SavedGradient(GradientSums):
    """Stands where a model's sums do, and keeps the gradient of one chunk as it is, in float32."""

    def __init__(self, wanted: bool) -> None:
        """Nothing has been kept yet."""
        self.wanted, self.narrow = wanted, False
        self.gradient: Tensor | None = None

    def add(self, where: Where, gradient: Float[Tensor, "chunk vocab"], hidden: Tensor, tile: int) -> None:
        """Keep it."""
        self.gradient = gradient


@dataclass(kw_only=True, eq=False)
class SavedForward:
    """The gradients of the last tokens' values in both ``hidden W^T + bias``, where they are needed."""

    start: int
    """The first of these tokens."""
    last: HeadPair
    """The two models on them."""
    gradients: tuple[Tensor | None, Tensor | None]
    tile: int
    """Rows of a weight that are upcast together; 0 where the library in C makes the products."""

    def pour_(
        self, weights: Float[Tensor, " tokens"], sums: tuple[GradientSums, GradientSums]
    ) -> Float[Tensor, " tokens"]:
        """Have what was kept taken in, multiplied by the weights; what is left of those is 0 there.

        What a token of weight 0 left behind does not count, nor what its hidden states hold.
        """
        here = slice(self.start, len(weights))
        own, rest = weights[here], weights.clone()
        rest[here] = 0.0
        unused = own == 0
        if not unused.all():
            for model, gradient, total in zip((self.last.p, self.last.q), self.gradients, sums, strict=True):
                if gradient is not None:
                    hidden = model.hidden.masked_fill(unused[:, None], 0.0) if unused.any() else model.hidden
                    total.add(here, scale_rows_(gradient, own, total.room(gradient)), hidden, self.tile)
        self.gradients = None, None
        return rest


def scale_rows_(
    gradient: Float[Tensor, "chunk vocab"],
    weights: Float[Tensor, " chunk"],
    room: Float[Tensor, "chunk vocab"],
) -> Float[Tensor, "chunk vocab"]:
    """Each row times its weight, 0 where that is 0, written into ``room``, which may be where the gradient is."""
    step = max(1, ROW_BLOCK // gradient.shape[1])
    for start in range(0, len(gradient), step):
        some = slice(start, start + step)
        column = weights[some, None]
        room[some] = torch.where(column != 0, gradient[some] * column, 0.0)
    return room
