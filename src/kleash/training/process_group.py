"""Collectives used by training: object gathers, sums, a broadcast and a barrier."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class ProcessGroup:
    """The processes of a run: rank 0 of 1 if the run was not launched with several."""

    rank: int = 0
    world_size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes and prints."""
        return self.rank == 0

    def all_gather_object(self, value: T) -> list[T]:
        """The objects of all ranks, in rank order. A collective."""
        if self.world_size == 1:
            return [value]
        all_of_them: list[Any] = [None] * self.world_size
        dist.all_gather_object(all_of_them, value)
        return all_of_them

    def sum_over_ranks(self, value: Mapping[str, float]) -> dict[str, float]:
        """The sum over ranks of each named value, added in rank order. A collective."""
        gathered = self.all_gather_object(dict(value))
        return {name: sum(values[name] for values in gathered) for name in value}

    def broadcast_from_first(self, value: T) -> T:
        """The object of rank 0. A collective."""
        return self.all_gather_object(value)[0]

    def barrier(self) -> None:
        """Wait until all ranks have called it. A collective."""
        self.all_gather_object(None)


def all_reduce_sum(value: Tensor) -> Tensor:
    """The sum of a tensor over ranks. A collective if torch.distributed is initialised."""
    total = value.detach().clone()
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(total)
    return total
