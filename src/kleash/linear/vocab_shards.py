"""The collectives of ranks that share a vocabulary: a few numbers for each token, never one for each logit.

The row functions call these between their passes over the logits. On a single rank (``ONE_RANK``) they return their
input. Ranks that took different branches would wait for each other forever, so everything that decides a branch or a
size is reduced over the ranks first.
"""

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed
from jaxtyping import Float, Int
from torch import Tensor

from kleash.errors import CannotRunError
from kleash.linear.head_storage import all_gather_single
from kleash.precision import at_least_float32

Numbers: TypeAlias = tuple[Tensor, ...]
"""Several numbers for each token, as columns."""
dist: Any = torch.distributed


class LocalVocab:
    """The whole vocabulary is on this rank: nothing is exchanged."""

    vocab_size = 0
    """The size of the vocabulary over all ranks; 0 on a single rank, where the logits have it."""

    def all_reduce_max(self, *numbers: Tensor) -> Numbers:
        """The maximum of each number over the ranks; NaN counts as inf."""
        return numbers

    def all_reduce_sum(self, *numbers: Tensor) -> Numbers:
        """The sum of each number over the ranks."""
        return numbers

    def gather_local(
        self, x: Float[Tensor, "tokens vocab"], ids: Int[Tensor, " tokens"]
    ) -> Float[Tensor, "tokens 1"]:
        """The entries of the tokens, 0 for a token of another rank: ``all_reduce_sum`` gives them everywhere."""
        return x.gather(-1, ids[:, None])

    def scatter_add_local_(
        self, x: Float[Tensor, "tokens vocab"], ids: Int[Tensor, " tokens"], source: Float[Tensor, "tokens 1"]
    ) -> Tensor:
        """Add ``source`` to the entries of the tokens, in place."""
        return x.scatter_add_(-1, ids[:, None], source)

    def largest(
        self, values: Float[Tensor, "tokens top"], ids: Int[Tensor, "tokens top"]
    ) -> tuple[Float[Tensor, "tokens top"], Int[Tensor, "tokens top"]]:
        """The largest logits of the whole vocabulary with their ids, from those of each rank's rows."""
        return values, ids

    def agreed_sizes(self, chunk: int, block: int, tokens: int) -> tuple[int, int]:
        """The most tokens in a chunk and in a block, where this rank has memory for these."""
        return chunk, block

    def all_reduce_gradient(self, gradient: Float[Tensor, "tokens dim"]) -> Float[Tensor, "tokens dim"]:
        """The gradient of the hidden states, summed over the ranks."""
        return gradient


LOCAL_VOCAB = LocalVocab()


class ShardedVocab(LocalVocab):
    """Each rank of a group has some rows of the vocabulary, in the order of the ranks, and all have the same tokens."""

    def __init__(self, group: Any, rows: Sequence[int], rank: int, device: torch.device) -> None:
        """``rows``: the number of vocabulary rows of each rank; ``rank``: the rank of this process in the group."""
        self.group, self.device, self.vocab_size = group, device, sum(rows)
        self.offset, self.local_size, self.world_size = sum(rows[:rank]), rows[rank], len(rows)

    def all_reduce_max(self, *numbers: Tensor) -> Numbers:
        """The maximum of each number over the ranks; NaN, which backends treat differently, counts as inf."""
        without_nan = [x.nan_to_num(torch.inf, torch.inf, -torch.inf) for x in numbers]
        return tuple(x.amax(0) for x in self._gather(without_nan))

    def all_reduce_sum(self, *numbers: Tensor) -> Numbers:
        """The sum of each number over the ranks."""
        return tuple(x.sum(0) for x in self._gather(numbers))

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
        """The entries of the tokens; 0 for a token of another rank."""
        local, is_local = self._local_ids(ids)
        return torch.where(is_local, x.gather(-1, local), 0.0) if self.local_size else x.new_zeros(len(x), 1)

    def scatter_add_local_(
        self, x: Float[Tensor, "tokens vocab"], ids: Int[Tensor, " tokens"], source: Float[Tensor, "tokens 1"]
    ) -> Tensor:
        """Add ``source`` to the entries of the tokens that this rank has, in place."""
        local, is_local = self._local_ids(ids)
        return x.scatter_add_(-1, local, torch.where(is_local, source, 0.0)) if self.local_size else x

    def _local_ids(self, ids: Int[Tensor, " tokens"]) -> tuple[Tensor, Tensor]:
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
        all_values, all_ids = (
            torch.empty((self.world_size, *x.shape), dtype=x.dtype, device=x.device)
            for x in (values, ids + self.offset)
        )
        all_gather_single(all_values.flatten(0, 1), values.contiguous(), self.group)
        all_gather_single(all_ids.flatten(0, 1), (ids + self.offset).contiguous(), self.group)
        all_values, all_ids = (x.movedim(0, 1).flatten(1) for x in (all_values, all_ids))
        order = torch.sort(all_values, stable=True, dim=-1, descending=True).indices[:, :top]
        return all_values.gather(-1, order), all_ids.gather(-1, order)

    def agreed_sizes(self, chunk: int, block: int, tokens: int) -> tuple[int, int]:
        """The most tokens in a chunk and in a block for which all ranks have memory.

        Raises:
            CannotRunError: if the ranks have different numbers of tokens.
        """
        local = torch.tensor([chunk, block, tokens, -tokens], device=self.device)
        chunk, block, fewest, negative = (int(x) for x in all_reduce(local, "MIN", self.group))
        if fewest != -negative:
            raise CannotRunError(
                f"one rank of the vocabulary_group has {fewest} tokens to do and another {-negative}; give all "
                "of them the same tokens, weights and incoming gradients"
            )
        return chunk, block

    def all_reduce_gradient(self, gradient: Float[Tensor, "tokens dim"]) -> Float[Tensor, "tokens dim"]:
        """The gradient of the hidden states, summed over the ranks: the only exchange of ``[tokens, dim]`` numbers."""
        return all_reduce(at_least_float32(gradient), "SUM", self.group)


def all_reduce(numbers: Tensor, op: str, group: Any) -> Tensor:
    """The numbers reduced over the ranks, in place if they are contiguous."""
    numbers = numbers.contiguous()
    dist.all_reduce(numbers, op=getattr(dist.ReduceOp, op), group=group)
    return numbers
