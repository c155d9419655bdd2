"""Masked means, represented by a sum and a count so that parts can be added."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor

from kleash.arguments import validated


@validated
def as_mask(mask: Bool[Tensor, "*tokens"] | Integer[Tensor, "*tokens"]) -> Bool[Tensor, "*tokens"]:
    """Convert a mask to bool from bool or from integers, of which those above 0 count: 1 of a tokenizer, not -100.

    Raises:
        ShapeError: if it contains floating-point numbers.
    """
    return mask > 0  # a copy, which autograd can save also if the mask was made in inference mode


def select_and_call(
    names: tuple[str, str], aggregate: Callable[..., Tensor], *args: Any, **kwargs: Any
) -> Tensor:
    """Call a function that multiplies values by a mask, with the masked values replaced by 0: NaN times 0 is NaN.

    Args:
        names: the name of its parameter for the values, then of that for the mask; a mask of None masks nothing.
        aggregate: the function, of another package.
        args: its arguments.
        kwargs: its arguments by keyword.
    """
    values, mask = names
    bound = inspect.signature(aggregate).bind(*args, **kwargs)
    if bound.arguments[mask] is not None:
        bound.arguments[values] = torch.where(bound.arguments[mask].bool(), bound.arguments[values], 0.0)
    return aggregate(*bound.args, **bound.kwargs)


@dataclass(frozen=True, kw_only=True)
class Mean:
    """A mean as a sum and a count.

    The mean of the means of micro-batches or ranks is not the mean over all tokens; sums and counts can be added. So
    micro-batches, ranks and loggers exchange this record.

    >>> parts = [kleash.Mean(total=torch.tensor(6.0), count=torch.tensor(n)) for n in (1, 2)]
    >>> (parts[0] + parts[1]).value
    tensor(4.)
    """

    total: Float[Tensor, ""]
    """Sum over the positions that count, in the unit of the values."""
    count: Int[Tensor, ""]
    """Number of positions that count."""

    def __add__(self, other: "Mean") -> "Mean":
        """The mean over both parts."""
        return Mean(total=self.total + other.total, count=self.count + other.count)

    @property
    def value(self) -> Float[Tensor, ""]:
        """The mean; NaN for a count of 0."""
        return self.total / self.count

    def share(self, count: Int[Tensor, ""] | int, *, ranks: int = 1) -> Float[Tensor, ""]:
        """The contribution of this part to a mean over ``count`` positions: the loss of one micro-batch.

        Shares and their gradients add up to the mean over the whole batch. Multiplying by ``ranks`` compensates for the
        averaging of gradients over processes (DistributedDataParallel, FSDP).

        Args:
            count: of the whole batch: all micro-batches of all ranks.
            ranks: number of processes whose gradients are averaged.
        """
        return self.total * ranks / count

    @property
    def detached(self) -> "Mean":
        """This mean without its gradient."""
        return Mean(total=self.total.detach(), count=self.count)

    def across_ranks(self, group: "dist.ProcessGroup | None" = None) -> "Mean":
        """The mean over the parts of all processes, without a gradient; unchanged with a single process.

        A collective: every process of the group must call it.
        """
        return Mean(total=sum_over_ranks(self.total, group), count=sum_over_ranks(self.count, group))


def sum_over_ranks(values: Tensor, group: "dist.ProcessGroup | None" = None) -> Tensor:
    """The sum of a tensor over the processes, without a gradient; a copy with a single process. A collective."""
    total = values.detach().clone()
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(total, group=group)
    return total


@validated
def mean_of(
    values: Float[Tensor, "*tokens"], mask: Bool[Tensor, "*tokens"] | Integer[Tensor, "*tokens"]
) -> Mean:
    """Sum and count of ``values`` where ``mask`` is true, summed in at least float32.

    Masked values are selected away, so padding, NaN and inf outside the mask do not affect the value. To keep them out
    of the *gradient* too, mask the inputs that ``values`` were computed from.

    Raises:
        ShapeError: if the two differ in shape.
    """
    is_counted = as_mask(mask)
    dtype = torch.promote_types(values.dtype, torch.float32)
    return Mean(total=torch.where(is_counted, values, 0.0).sum(dtype=dtype), count=is_counted.sum())
