"""The gradients of tensors, while they are being added up chunk by chunk."""

import torch
from jaxtyping import Float
from torch import Tensor

from kleash.linear.impl.pair import HeadInputs, HeadPair, Where
from kleash.linear.impl.project import add_rows_, into_hidden, into_weight_, narrow
from kleash.linear.impl.results import Needed, gradient_dtype, summed_in_p
from kleash.linear.impl.skipping import Cutter
from kleash.linear.options import LinearOptions

WHOLE = LinearOptions()


class GradientSums:
    """The gradients of one model's tensors, while they are being added up."""

    def __init__(
        self,
        model: HeadInputs,
        needed: Needed,
        options: LinearOptions,
        shared: tuple[bool, ...] = (False,) * 3,
        first: "GradientSums | None" = None,
    ) -> None:
        """Zeros where a gradient is needed; of what is ``shared``, the sums of the ``first`` model to go on with."""

        def zeros(place: int, dtype: torch.dtype) -> Tensor | None:
            tensor = model.tensors[place]
            return torch.zeros_like(tensor, dtype=dtype) if needed[place] and tensor is not None else None

        self.model, self.wanted, self.shared, self.first = model, any(needed), shared, first is None
        # What both models give to one tensor nearly cancels where they nearly agree.
        self.narrow = self.wanted and narrow(model) and not any(shared)
        dtypes = model.dtype if shared[0] else gradient_dtype(model.hidden), model.dtype, model.dtype
        self.hidden, self.weight, self.bias = (
            first.sums[place] if first is not None and shared[place] else zeros(place, dtypes[place])
            for place in range(3)
        )
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
        if self.cutter is not None and self.cutter.add_(
            where, gradient, hidden, (self.hidden, self.weight), shared=self.shared[0]
        ):
            return
        if self.hidden is not None:
            add_rows_(self.hidden, where, into_hidden(gradient, self.model, tile), shared=self.shared[0])
        if self.weight is not None:
            into_weight_(self.weight, gradient, hidden, tile)

    @property
    def sums(self) -> tuple[Tensor | None, ...]:
        """Those of hidden states, weight and bias."""
        return self.hidden, self.weight, self.bias

    @property
    def done(self) -> tuple[Tensor | None, ...]:
        """The gradients, each in its tensor's ``gradient_dtype``; what is shared is with the first model."""
        kept = (s if self.first or not both else None for s, both in zip(self.sums, self.shared, strict=True))
        pairs = zip(kept, self.model.tensors, strict=True)
        return tuple(None if s is None or x is None else s.to(gradient_dtype(x)) for s, x in pairs)


def both_sums(
    pair: HeadPair, needed: Needed, options: LinearOptions = WHOLE
) -> tuple[GradientSums, GradientSums]:
    """For p and for q; one weight that is both heads' is summed once, as p's, and so is what is ``summed_in_p``."""
    one = pair.p.head.weight is pair.q.head.weight and needed[1] and needed[4]
    hidden, bias = (summed_in_p(place, pair.tensors, needed) for place in (0, 2))
    shared = hidden, one, bias
    sums_p = GradientSums(pair.p, needed[:3], options, shared)
    return sums_p, GradientSums(pair.q, needed[3:], options, shared, sums_p)
