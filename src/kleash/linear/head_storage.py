"""The collectives of ranks that store the rows of a head between them and each have tokens of their own.

FSDP2 and ZeRO-3 store a head in this way. Ranks with the *same* tokens share a vocabulary instead: ``vocab_shards``.
"""

from collections.abc import Sequence
from itertools import accumulate
from math import isnan
from typing import Any, cast

import torch
import torch.distributed
from jaxtyping import Float
from torch import Tensor

from kleash.errors import CannotRunError, KleashError

dist: Any = torch.distributed
STORING_RANKS = "the ranks that store the head"
"""The ranks of a ``HeadStorage`` in error messages."""


class HeadStorage:
    """The ranks that store consecutive rows of one vocabulary, in the order of the ranks."""

    def __init__(self, group: Any, rows: Sequence[int], device: torch.device) -> None:
        """``rows``: the number of rows that each rank stores."""
        self.group, self.rows, self.device = group, tuple(rows), device
        self.rank: int = dist.get_rank(group)
        self.world_size = len(self.rows)
        self.offsets = tuple(accumulate(self.rows, initial=0))
        self.vocab_size = self.offsets[-1]

    @property
    def local_rows(self) -> slice:
        """The rows of the whole vocabulary that this rank stores."""
        return slice(self.offsets[self.rank], self.offsets[self.rank + 1])

    def all_gather_numbers(self, *numbers: int) -> list[list[int]]:
        """For each number, its values on all ranks."""
        return all_gather_numbers(self.group, self.device, numbers)

    def gather_tokens(
        self, local: Float[Tensor, "tokens *any"], counts: Sequence[int]
    ) -> Float[Tensor, "all *any"]:
        """The entries of all ranks' tokens, in the order of the ranks; ``counts`` says how many each rank has."""
        max_count = max(counts)
        padded = local.new_zeros((max_count, *local.shape[1:]))
        padded[: len(local)] = local
        received = local.new_empty((self.world_size * max_count, *local.shape[1:]))
        all_gather_single(received, padded, self.group)
        if min(counts) == max_count:
            return received
        return torch.cat([received[max_count * n : max_count * n + count] for n, count in enumerate(counts)])

    def exchange_columns(
        self, columns: Float[Tensor, "all rows"], counts: Sequence[int]
    ) -> Float[Tensor, "tokens vocab"]:
        """The whole rows of this rank's tokens, where each rank has computed its columns of all ranks' tokens."""
        tokens = counts[self.rank]
        received = columns.new_empty(tokens * self.vocab_size)
        dist.all_to_all_single(
            received,
            columns.contiguous().flatten(),
            [tokens * rows for rows in self.rows],
            [count * self.rows[self.rank] for count in counts],
            group=self.group,
        )
        parts = _split(received, [tokens * rows for rows in self.rows])
        return torch.cat(
            [part.view(tokens, rows) for part, rows in zip(parts, self.rows, strict=True)], dim=-1
        )

    def raise_together(self, error: KleashError | None) -> None:
        """Raise if any rank has an error, so that no rank waits for one that has stopped.

        Raises:
            KleashError: ``error``, if there is one.
            CannotRunError: if another rank has one.
        """
        errors = self.all_gather_numbers(int(error is not None))[0]
        raise_together(errors, error, list(dist.get_process_group_ranks(self.group)), STORING_RANKS)

    def require_equal_factor(self, factor: Tensor) -> None:
        """Check that all ranks multiply their losses by one factor, of which NaN is ignored: it gives a NaN gradient.

        The gradient of the rows is summed over the ranks before it is multiplied, since every rank's tokens change it.

        Raises:
            CannotRunError: if the factors differ.
        """
        numbers = factor.detach().reshape(1).double()
        factors = numbers.new_empty(self.world_size)
        all_gather_single(factors, numbers, self.group)
        values = cast("list[float]", cast("Any", factors).tolist())
        if len({value for value in values if not isnan(value)}) > 1:
            raise CannotRunError(
                f"the ranks that store the head multiply this loss by {values}; put what differs into the weights, "
                "since the gradient of the head is summed over the ranks before the backward pass"
            )


def all_gather_single(received: Tensor, sent: Tensor, group: Any) -> None:
    """Receive the tensors of all ranks, one after the other, by the name that torch has for it (2.13: a new one)."""
    call: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    call(received, sent, group=group)


def reduce_scatter_single(received: Tensor, sent: Tensor, group: Any) -> None:
    """Receive this rank's part of the sum over the ranks, by the name that torch has for it (2.13: a new one)."""
    call: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    call(received, sent, group=group)


def _split(values: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    return cast("Any", values).split(list(sizes))


def all_gather_numbers(group: Any, device: torch.device, numbers: Sequence[int]) -> list[list[int]]:
    """For each number, its values on all ranks of the group."""
    local = torch.tensor(list(numbers), dtype=torch.int64, device=device)
    received = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
    dist.all_gather(received, local, group=group)
    return cast("list[list[int]]", cast("Any", torch.stack(received).T).tolist())


def raise_together(
    errors: Sequence[int], error: KleashError | None, ranks: Sequence[int], members: str
) -> None:
    """Raise this rank's error, or name another rank that has one.

    Args:
        errors: 1 for each rank of a group that has an error, else 0.
        error: this rank's.
        ranks: the global ranks of the group.
        members: what the error calls these ranks, such as ``STORING_RANKS``.

    Raises:
        KleashError: ``error``, if there is one.
        CannotRunError: if another rank has one.
    """
    if error is not None:
        raise error
    failed = [rank for rank, flag in zip(ranks, errors, strict=True) if flag]
    if failed:
        raise CannotRunError(
            f"rank {failed[0]} among {members} refuses its arguments; its own error message says why"
        )
