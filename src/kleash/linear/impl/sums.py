"""The gradients of the tensors of a call, summed chunk by chunk."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from kleash.linear.impl.base import (
    Gradients,
    HeadInputs,
    HeadPair,
    Needed,
    PerModel,
    PerTensor,
    TokenIndex,
    gradient_dtype,
)
from kleash.linear.impl.project import (
    add_weight_gradient_,
    has_bfloat16_gradient,
    hidden_gradient,
    set_rows_,
)

NOT_SHARED = PerModel(hidden=False, weight=False, bias=False)


class GradientSums:
    """The sums of one model's gradients."""

    def __init__(
        self,
        model: HeadInputs,
        needed: PerModel[bool],
        shared: PerModel[bool] = NOT_SHARED,
        first: "GradientSums | None" = None,
    ) -> None:
        """Start at 0 or at the model's ``weight_sum``; a tensor that is ``shared`` goes on with the ``first`` model's.

        Then the gradient of the weight is that sum itself.
        """
        self.model, self.shared, self.is_first = model, shared, first is None
        self.needed = any(needed)
        # The gradients that two models give to one tensor nearly cancel where the models nearly agree.
        self.is_bfloat16 = self.needed and has_bfloat16_gradient(model) and not any(shared)
        hidden_dtype = model.dtype if shared.hidden else gradient_dtype(model.hidden)
        dtypes = PerModel(hidden=hidden_dtype, weight=model.dtype, bias=model.dtype)
        of_first = PerModel(None, None, None) if first is None else first.sums

        def start(
            tensor: Tensor | None,
            flag: bool,
            dtype: torch.dtype,
            both: bool,
            first_sum: Tensor | None,
            earlier: Tensor | None,
        ) -> Tensor | None:
            if first is not None and both:
                return first_sum
            if not flag or tensor is None:
                return None
            return torch.zeros_like(tensor, dtype=dtype) if earlier is None else earlier

        of_earlier = None, model.weight_sum, None
        rows = zip(model.tensors, needed, dtypes, shared, of_first, of_earlier, strict=True)
        self.sums: PerModel[Tensor | None] = PerModel(*(start(*row) for row in rows))

    def gradient_buffer(self, z: Float[Tensor, "chunk vocab"]) -> Float[Tensor, "chunk vocab"]:
        """Where a chunk's gradient is written: over its logits, in bfloat16 if its products are."""
        if not self.is_bfloat16:
            return z
        # Row n of the bfloat16 gradient lies on row n/2 of the logits, which has been read before it is written.
        return z.view(torch.bfloat16).flatten()[: z.numel()].view(z.shape)

    def add(
        self, index: TokenIndex, gradient: Float[Tensor, "chunk vocab"], hidden: Tensor, tile: int
    ) -> None:
        """Add the gradients that follow from that in a chunk's ``hidden W^T + bias``."""
        sums = self.sums
        if sums.bias is not None:
            sums.bias.add_(gradient.sum(0, dtype=sums.bias.dtype))
        if sums.hidden is not None:
            rows = hidden_gradient(gradient, self.model, tile)
            set_rows_(sums.hidden, index, rows, add=self.shared.hidden)
        if sums.weight is not None:
            add_weight_gradient_(sums.weight, gradient, hidden, tile)

    @property
    def gradients(self) -> PerModel[Tensor | None]:
        """The gradients, each in its tensor's ``gradient_dtype``; a shared one is with the first model only."""
        return PerModel(
            *(
                None
                if total is None or tensor is None or (both and not self.is_first)
                else total
                if total is self.model.weight_sum
                else total.to(gradient_dtype(tensor))
                for total, tensor, both in zip(self.sums, self.model.tensors, self.shared, strict=True)
            )
        )


class GradientSumsPair(NamedTuple):
    """The sums of both models' gradients."""

    p: GradientSums
    q: GradientSums

    @property
    def needed(self) -> tuple[bool, bool]:
        """Whether any gradient of p is needed, and of q."""
        return self.p.needed, self.q.needed

    @property
    def gradients(self) -> Gradients:
        """The gradients of both models."""
        return PerTensor(self.p.gradients, self.q.gradients)


def new_gradient_sums(pair: HeadPair, needed: Needed) -> GradientSumsPair:
    """Sums for both models; where one weight is both heads', or ``is_summed_once`` holds, both add to p's sum."""
    p, q = pair.tensors.p, pair.tensors.q
    shared = PerModel(
        hidden=is_summed_once(p.hidden, q.hidden, needed.p.hidden and needed.q.hidden),
        weight=p.weight is q.weight and needed.p.weight and needed.q.weight,
        bias=is_summed_once(p.bias, q.bias, needed.p.bias and needed.q.bias),
    )
    sums_p = GradientSums(pair.p, needed.p, shared)
    return GradientSumsPair(sums_p, GradientSums(pair.q, needed.q, shared, sums_p))


def is_summed_once(tensor_p: Tensor | None, tensor_q: Tensor | None, needed: bool) -> bool:
    """Whether the two models have one half-precision tensor, whose gradient is summed in float32 and rounded once.

    Where the models nearly agree, their gradients nearly cancel, and rounding each of them would lose the sum.
    """
    if tensor_p is None or tensor_p is not tensor_q:
        return False
    return needed and tensor_p.dtype in (torch.bfloat16, torch.float16)
