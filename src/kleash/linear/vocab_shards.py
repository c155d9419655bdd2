"""The collectives of ranks that have the rows of a head between them: a few numbers for each token, never its logits.

The ranks of a ``vocabulary_group`` have the same tokens. Those that store a head (FSDP2, ZeRO-3) have tokens of their
own, which move to the rows first. The row functions call these between their passes over the logits; on a single rank
they return their input. Ranks that took different branches would wait for each other forever, so everything that
decides a branch or a size is exchanged first.
"""

from collections.abc import Iterator, Sequence
from math import isnan
from typing import Any, TypeAlias, cast

import torch
import torch.distributed
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from kleash.errors import CannotRunError
from kleash.precision import at_least_float32

Numbers: TypeAlias = tuple[Tensor, ...]
"""Several numbers for each token, as columns."""
dist: Any = torch.distributed


class VocabShards:
    """The rows of the vocabulary on the ranks of a group, in the order of the ranks; on a single rank, all of them."""

    def __init__(
        self, group: Any, rows: Sequence[int], device: torch.device, *, has_own_tokens: bool = False
    ) -> None:
        """Describe the ranks.

        Args:
            group: the ranks; None for this one alone.
            rows: the number of vocabulary rows of each rank.
            device: of the numbers that are exchanged.
            has_own_tokens: whether each of several ranks has tokens of its own, which move to the rows.
        """
        self.group, self.rows, self.device, self.has_own_tokens = group, tuple(rows), device, has_own_tokens
        self.world_size, self.vocab_size = len(self.rows), sum(self.rows)
        self.rank: int = 0 if group is None else dist.get_rank(group)
        self.offset, self.local_size = sum(self.rows[: self.rank]), self.rows[self.rank]

    @property
    def local_rows(self) -> slice:
        """The rows of the whole vocabulary that this rank has."""
        return slice(self.offset, self.offset + self.local_size)

    def all_reduce_max(self, *numbers: Tensor) -> Numbers:
        """The maximum of each number over several ranks; NaN, which backends treat differently, counts as inf."""
        if self.group is None:
            return numbers
        without_nan = [x.nan_to_num(torch.inf, torch.inf, -torch.inf) for x in numbers]
        return tuple(x.amax(0) for x in self._gather(without_nan))

    def all_reduce_sum(self, *numbers: Tensor) -> Numbers:
        """The sum of each number over the ranks."""
        return numbers if self.group is None else tuple(x.sum(0) for x in self._gather(numbers))

    def _gather(self, numbers: Sequence[Tensor]) -> Iterator[Tensor]:
        """Several numbers for each token, of each rank: one message, whose sums have one order on all ranks."""
        packed = torch.stack([x.reshape(-1) for x in numbers])
        received = packed.new_empty((self.world_size, *packed.shape))
        all_gather_single(received.flatten(0, 1), packed, self.group)
        for place, x in enumerate(numbers):
            yield received[:, place].reshape(self.world_size, *x.shape)

    def gather_local(
        self, x: Float[Tensor, "tokens vocab"], ids: Int[Tensor, " tokens"]
    ) -> Float[Tensor, "tokens 1"]:
        """The entries of the tokens, 0 for a token of another rank: ``all_reduce_sum`` gives them everywhere."""
        if self.group is None:  # a sixth of the time: this is called for every few rows
            return x.gather(-1, ids[:, None])
        local, is_local = self._local_ids(ids)
        return torch.where(is_local, x.gather(-1, local), 0.0) if self.local_size else x.new_zeros(len(x), 1)

    def scatter_add_local_(
        self, x: Float[Tensor, "tokens vocab"], ids: Int[Tensor, " tokens"], source: Float[Tensor, "tokens 1"]
    ) -> Tensor:
        """Add ``source`` to the entries of the tokens that this rank has, in place."""
        local, is_local = self._local_ids(ids)
        return x.scatter_add_(-1, local, torch.where(is_local, source, 0.0)) if self.local_size else x

    def _local_ids(self, ids: Int[Tensor, " tokens"]) -> tuple[Tensor, Tensor]:
        """The ids as rows of this rank, cut to them, and whether they are among them; both [tokens, 1]."""
        local = ids[:, None] - self.offset
        is_local = (local >= 0) & (local < self.local_size)
        return local.clamp(0, max(0, self.local_size - 1)), is_local

    def largest(
        self, values: Float[Tensor, "tokens top"], ids: Int[Tensor, "tokens top"]
    ) -> tuple[Float[Tensor, "tokens top"], Int[Tensor, "tokens top"]]:
        """The largest logits of the whole vocabulary with their ids, from those of each rank's rows.

        Of equal logits, those of the smaller ids come first; NaN is larger than any number.
        """
        top = min(values.shape[-1], self.vocab_size)
        if self.group is None:
            return values, ids
        all_values, all_ids = (
            next(self._gather([x])).movedim(0, 1).flatten(1) for x in (values, ids + self.offset)
        )
        order = torch.sort(all_values, stable=True, dim=-1, descending=True).indices[:, :top]
        return all_values.gather(-1, order), all_ids.gather(-1, order)

    def agreed_sizes(self, chunk: int, block: int, tokens: int) -> tuple[int, int, list[int]]:
        """The most tokens of a rank in a chunk and in a block, and how many tokens each rank moves to the rows.

        Args:
            chunk: tokens in a chunk for which this rank has memory.
            block: tokens in a block for which it has memory.
            tokens: of this rank in the call.

        Raises:
            CannotRunError: if the ranks of a ``vocabulary_group`` have different numbers of tokens.
        """
        if self.group is None:
            return chunk, block, [tokens]
        all_chunks, all_blocks, counts = all_gather_numbers(self.group, self.device, [chunk, block, tokens])
        if self.has_own_tokens:
            return max(1, min(all_chunks) // self.world_size), min(all_blocks), counts
        if len(set(counts)) > 1:
            raise CannotRunError(
                f"the ranks of the vocabulary_group have {counts} tokens to do; give all of them the same tokens, "
                "weights and incoming gradients"
            )
        return min(all_chunks), min(all_blocks), [tokens]

    def largest_number(self, number: int) -> int:
        """The largest of the numbers of ranks with tokens of their own, which may differ."""
        return (
            max(all_gather_numbers(self.group, self.device, [number])[0]) if self.has_own_tokens else number
        )

    def local_part(self, counts: Sequence[int]) -> slice:
        """Where this rank's tokens are among those of all ranks that move."""
        if not self.has_own_tokens:
            return slice(None)
        return slice(sum(counts[: self.rank]), sum(counts[: self.rank + 1]))

    def gather_tokens(self, local: Shaped[Tensor, "tokens *any"], counts: Sequence[int]) -> Tensor:
        """The entries of all tokens that move, in the order of the ranks; ``counts`` says how many each rank has."""
        return gather_tokens(self.group, local, counts) if self.has_own_tokens else local

    def whole_rows(
        self, columns: Float[Tensor, "tokens rows"], counts: Sequence[int]
    ) -> Float[Tensor, "local vocab"]:
        """All columns of this rank's tokens, where each rank has computed those of its rows.

        Args:
            columns: of the tokens of all ranks, if they have their own.
            counts: the tokens of each rank.
        """
        if not self.has_own_tokens:
            return gather_tokens(self.group, columns.T.contiguous(), self.rows).T
        tokens = counts[self.rank]
        received = columns.new_empty(tokens * self.vocab_size)
        sizes = [tokens * rows for rows in self.rows]
        sent = [count * self.local_size for count in counts]
        dist.all_to_all_single(received, columns.contiguous().flatten(), sizes, sent, group=self.group)
        parts = cast("list[Tensor]", cast("Any", received).split(sizes))
        return torch.cat(
            [part.view(tokens, rows) for part, rows in zip(parts, self.rows, strict=True)], dim=-1
        )

    def all_reduce_gradient(self, gradient: Float[Tensor, "tokens dim"]) -> Float[Tensor, "tokens dim"]:
        """The gradient of the hidden states, summed over the ranks: the only exchange of ``[tokens, dim]`` numbers."""
        if self.group is None:
            return gradient
        total = at_least_float32(gradient).contiguous()
        dist.all_reduce(total, group=self.group)
        return total

    def require_equal_factor(self, factor: Tensor) -> None:
        """Check that all ranks multiply their losses by one factor, of which NaN is ignored: it gives a NaN gradient.

        The gradient of the rows is summed over the ranks before it is multiplied, since every rank's tokens change it.

        Raises:
            CannotRunError: if the factors differ.
        """
        (factors,) = self._gather([factor.detach().double()])
        values = cast("list[float]", cast("Any", factors).tolist())
        if len({value for value in values if not isnan(value)}) > 1:
            raise CannotRunError(
                f"the ranks that store the head multiply this loss by {values}; put what differs into the weights, "
                "since the gradient of the head is summed over the ranks before the backward pass"
            )


def gather_tokens(group: Any, local: Shaped[Tensor, "tokens *any"], counts: Sequence[int]) -> Tensor:
    """The entries of all ranks of a group, in their order; ``counts`` says how many each rank has."""
    max_count = max(counts)
    padded = local.new_zeros((max_count, *local.shape[1:]))
    padded[: len(local)] = local
    received = local.new_empty((len(counts) * max_count, *local.shape[1:]))
    all_gather_single(received, padded, group)
    if min(counts) == max_count:
        return received
    return torch.cat([received[max_count * n : max_count * n + count] for n, count in enumerate(counts)])


def all_gather_single(received: Tensor, sent: Tensor, group: Any) -> None:
    """Receive the tensors of all ranks, one after the other, by the name that torch has for it (2.13: a new one)."""
    call: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    call(received, sent, group=group)


def reduce_scatter_single(received: Tensor, sent: Tensor, group: Any) -> None:
    """Receive this rank's part of the sum over the ranks, by the name that torch has for it (2.13: a new one)."""
    call: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    call(received, sent, group=group)


def all_gather_numbers(group: Any, device: torch.device, numbers: Sequence[int]) -> list[list[int]]:
    """For each number, its values on all ranks of the group."""
    local = torch.tensor(list(numbers), dtype=torch.int64, device=device)
    received = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
    dist.all_gather(received, local, group=group)
    return cast("list[list[int]]", cast("Any", torch.stack(received).T).tolist())
