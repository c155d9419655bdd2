"""The gradients of tensors, while they are being added up chunk by chunk."""

import torch
from jaxtyping import Float
from torch import Tensor

from kleash.linear.impl.pair import OneModel, Pair, Where
from kleash.linear.impl.project import into_hidden, into_weight_, narrow
from kleash.linear.impl.results import Needed, formed_dtype
from kleash.linear.impl.skipping import Cutter
from kleash.linear.options import LinearOptions

WHOLE = LinearOptions()


class Sums:
    """The gradients of one model's tensors, while they are being added up."""

    def __init__(
        self,
        model: OneModel,
        needed: Needed,
        options: LinearOptions,
        weight: Tensor | None = None,
        *,
        wide: bool = False,
    ) -> None:
        """Zeros where a gradient is needed; ``weight`` is a sum to go on with; ``wide`` forbids bfloat16."""

        def zeros(tensor: Tensor | None, wanted: bool, dtype: torch.dtype) -> Tensor | None:
            return torch.zeros_like(tensor, dtype=dtype) if wanted and tensor is not None else None

        self.model, self.wanted, self.shared = model, any(needed), weight is not None
        self.narrow = self.wanted and narrow(model) and not wide
        self.hidden = zeros(model.hidden, needed[0], formed_dtype(model.hidden))
        self.weight = zeros(model.head.weight, needed[1], model.dtype) if weight is None else weight
        self.bias = zeros(model.head.bias, needed[2], model.dtype)
        multiplied = model.head.weight is not None and any(needed[:2])
        self.cutter = Cutter(options, model) if options.skip_below and multiplied else None

    def room(self, z: Float[Tensor, "chunk vocab"]) -> Float[Tensor, "chunk vocab"]:
        """Where a chunk's gradient is put: where its logits are, as narrow as may be."""
        if not self.narrow:
            return z
        # Row n of the narrow gradient lies on row n/2 of the logits, which has been read by then.
        return z.view(torch.bfloat16).flatten()[: z.numel()].view(z.shape)

    def add(self, where: Where, gradient: Float[Tensor, "chunk vocab"], hidden: Tensor, tile: int) -> None:
        """Take in the gradient in a chunk's ``hidden W^T + bias``; of its products only what counts."""
        if self.bias is not None:
            self.bias.add_(gradient.sum(0, dtype=self.bias.dtype))
        if self.cutter is not None and self.cutter.add_(where, gradient, hidden, (self.hidden, self.weight)):
            return
        if self.hidden is not None:
            self.hidden[where] = into_hidden(gradient, self.model, tile).to(self.hidden.dtype)
        if self.weight is not None:
            into_weight_(self.weight, gradient, hidden, tile)

    @property
    def done(self) -> tuple[Tensor | None, ...]:
        """The gradients, each in its tensor's ``formed_dtype``."""
        sums = (self.hidden, None if self.shared else self.weight, self.bias)
        pairs = zip(sums, self.model.tensors, strict=True)
        return tuple(None if s is None or x is None else s.to(formed_dtype(x)) for s, x in pairs)


def both_sums(pair: Pair, needed: Needed, options: LinearOptions = WHOLE) -> tuple[Sums, Sums]:
    """For p and for q; one weight that is both heads' is summed once, as p's.

    In float32 then: what the two sides add to it nearly cancels where they nearly agree.
    """
    one = pair.p.head.weight is pair.q.head.weight and needed[1] and needed[4]
    sums_p = Sums(pair.p, needed[:3], options, wide=one)
    return sums_p, Sums(pair.q, needed[3:], options, sums_p.weight if one else None, wide=one)
