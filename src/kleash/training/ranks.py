"""What the processes of a run tell each other: sums, maxima and lists, the same on all of them afterwards."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """The processes of a run; one, where nobody launched more."""

    index: int = 0
    """Which this one is."""
    count: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the process that writes and prints."""
        return self.index == 0

    def told(self, own: T) -> list[T]:
        """What each process brings, in their order. A collective: all have to call it."""
        if self.count == 1:
            return [own]
        all_of_them: list[Any] = [None] * self.count
        dist.all_gather_object(all_of_them, own)
        return all_of_them

    def totals(self, own: Mapping[str, float]) -> dict[str, float]:
        """The sums of all processes, name by name, added in their order. A collective."""
        told = self.told(dict(own))
        return {name: sum(one[name] for one in told) for name in own}

    def most(self, own: Sequence[int]) -> list[int]:
        """The largest of all processes, place by place. A collective."""
        return [max(column) for column in zip(*self.told(list(own)), strict=True)]

    def agreed(self, own: T) -> T:
        """What the first process says. A collective."""
        return self.told(own)[0]

    def wait(self) -> None:
        """Go on once all are here."""
        self.told(None)


def summed(own: Tensor) -> Tensor:
    """The sum of all processes' tensors of this shape. A collective where torch.distributed is initialised."""
    total = own.detach().clone()
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(total)
    return total
