"""Means over the positions that count, carried as a sum and a count."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor

from kleash.arguments import validated
from kleash.errors import ShapeError


@validated
def as_mask(mask: Bool[Tensor, "*tokens"] | Integer[Tensor, "*tokens"]) -> Bool[Tensor, "*tokens"]:
    """The mask as bools, whether it came as bools or as the 0 and 1 of a tokenizer.

    Raises:
        ShapeError: if it holds floating-point numbers, which select nothing.
    """
    if mask.dtype == torch.bool:
        return mask
    if mask.is_floating_point() or mask.is_complex():
        raise ShapeError(f"a mask is bool, or 0 and 1 as integers; this one is {mask.dtype}")
    return mask.to(torch.bool)


@dataclass(frozen=True, kw_only=True)
class Mean:
    """A mean that can still be added to: the sum, and how many went into it.

    Means of parts are not the mean of the whole; sums and counts are. So what is passed
    between micro-batches, ranks and loggers is this.
    """

    total: Float[Tensor, ""]
    """Sum over the positions that count, in the unit of what was summed."""
    count: Int[Tensor, ""]
    """How many positions counted."""

    def __add__(self, other: "Mean") -> "Mean":
        """The mean over both parts."""
        return Mean(total=self.total + other.total, count=self.count + other.count)

    @property
    def value(self) -> Float[Tensor, ""]:
        """The mean; NaN over nothing."""
        return self.total / self.count

    def share(self, count: Int[Tensor, ""] | int, *, ranks: int = 1) -> Float[Tensor, ""]:
        """What this part adds to a mean over ``count``: the loss of one micro-batch of many.

        Shares add up to the mean of the whole, and so do their gradients. Where the gradients of ``ranks``
        processes are averaged afterwards (DistributedDataParallel, FSDP), that division is undone here.

        Args:
            count: of the whole batch: every micro-batch of every rank.
            ranks: processes whose gradients are averaged.
        """
        return self.total * ranks / count

    @property
    def detached(self) -> "Mean":
        """The same without the gradient, to be kept."""
        return Mean(total=self.total.detach(), count=self.count)

    def across_ranks(self, group: "dist.ProcessGroup | None" = None) -> "Mean":
        """The mean over every process's part, without a gradient; itself where there is one process.

        A collective: every process of the group has to call it.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return self.detached
        total, count = self.total.detach().clone(), self.count.detach().clone()
        for part in (total, count):
            dist.all_reduce(part, group=group)  # pyright: ignore[reportUnknownMemberType]
        return Mean(total=total, count=count)


@validated
def mean_of(
    values: Float[Tensor, "*tokens"], mask: Bool[Tensor, "*tokens"] | Integer[Tensor, "*tokens"]
) -> Mean:
    """Sum and count of ``values`` where ``mask`` is true.

    Selects, so that what stands outside the mask (padding, NaN, inf) cannot reach the value.
    Keep it out of the *gradient* by masking what ``values`` were computed from.

    Raises:
        ShapeError: if the two differ in shape.
    """
    if values.shape != mask.shape:
        raise ShapeError(f"values are {tuple(values.shape)} and their mask is {tuple(mask.shape)}")
    counts = as_mask(mask)
    return Mean(total=torch.where(counts, values, 0.0).sum(), count=counts.sum())


@validated
def masked_mean(
    values: Float[Tensor, "*tokens"], mask: Bool[Tensor, "*tokens"] | Integer[Tensor, "*tokens"]
) -> Float[Tensor, ""]:
    """The mean of ``values`` where ``mask`` is true; NaN if nowhere is."""
    return mean_of(values, mask).value
