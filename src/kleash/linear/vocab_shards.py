"""The collectives of ranks that share a vocabulary: a few numbers for each token, never one for each logit.

The row functions call these between their passes over the logits. On a single rank (``LOCAL_VOCAB``) they return their
input. Ranks that took different branches would wait for each other forever, so everything that decides a branch or a
size is reduced over the ranks first.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, cast

import torch
import torch.distributed
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kleash.errors import CannotRunError
from kleash.precision import at_least_float32

Numbers: TypeAlias = tuple[Tensor, ...]
"""Several numbers for each token, each as a vector or a column."""
dist: Any = torch.distributed
FALLBACK_BLOCK = 2**16
"""Logits of one model that the fallback computes at once; it needs forty times their memory."""


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

    def log_sum_exp(self, *z: Float[Tensor, "tokens vocab"]) -> Numbers:
        """The log-sum-exp of each tensor of logits over the whole vocabulary, as a column."""
        return tuple(x.logsumexp(-1, keepdim=True) for x in z)

    def gather_local(
        self, z: Float[Tensor, "tokens vocab"], ids: Int[Tensor, " tokens"]
    ) -> Float[Tensor, "tokens 1"]:
        """The logits of the tokens, 0 for a token of another rank: ``all_reduce_sum`` gives the logits everywhere."""
        return z.gather(-1, ids[:, None])

    def scatter_add_local_(
        self, z: Float[Tensor, "tokens vocab"], ids: Int[Tensor, " tokens"], source: Float[Tensor, "tokens 1"]
    ) -> Tensor:
        """Add ``source`` to the entries of the tokens, in place."""
        return z.scatter_add_(-1, ids[:, None], source)

    def argmax(
        self, z: Sequence[Tensor], local: Sequence[Tensor], tops: Sequence[Float[Tensor, "tokens 1"]]
    ) -> Numbers:
        """The ids of the largest logits, the first of several, from the ``local`` argmax and the overall maxima."""
        return tuple(local)

    def row_parts(self, selected: Bool[Tensor, " rows"], vocab_size: int) -> Iterator[Tensor]:
        """The indices of the selected rows, in parts small enough for the memory of the fallback."""
        rows, size = selected.nonzero()[:, 0], max(1, FALLBACK_BLOCK // vocab_size)
        for start in range(0, len(rows), size):
            yield rows[start : start + size]

    def agreed_chunk(self, most: int, tokens: int) -> int:
        """The number of tokens in a chunk, where this rank has memory for ``most``."""
        return most

    def replicate(self, hidden: Float[Tensor, "tokens dim"]) -> Float[Tensor, "tokens dim"]:
        """The hidden states, whose gradient is summed over the ranks."""
        return hidden

    def all_reduce_gradient(self, gradient: Float[Tensor, "tokens dim"]) -> Float[Tensor, "tokens dim"]:
        """The gradient of the hidden states, summed over the ranks."""
        return gradient


LOCAL_VOCAB = LocalVocab()


class ShardedVocab(LocalVocab):
    """Each rank of a group has consecutive rows of the vocabulary, in the order of the ranks."""

    def __init__(self, group: Any, rows: Sequence[int], rank: int, device: torch.device) -> None:
        """``rows``: the number of vocabulary rows of each rank; ``rank``: the rank of this process in the group."""
        self.group, self.device, self.vocab_size = group, device, sum(rows)
        self.offset, self.local_size = sum(rows[:rank]), rows[rank]

    def all_reduce_max(self, *numbers: Tensor) -> Numbers:
        """The maximum of each number over the ranks; NaN, which backends treat differently, counts as inf."""
        with torch.no_grad():
            without_nan = [x.nan_to_num(torch.inf, torch.inf, -torch.inf) for x in numbers]
            return exchange_packed(without_nan, lambda packed: all_reduce(packed, "MAX", self.group))

    def all_reduce_sum(self, *numbers: Tensor) -> Numbers:
        """The sum of each number over the ranks. All ranks use it alike, so its gradient is not reduced."""
        return cast("Any", _AllReduceSum).apply(self.group, *numbers)

    def log_sum_exp(self, *z: Float[Tensor, "tokens vocab"]) -> Numbers:
        """The log-sum-exp of each tensor of logits, as a column; its gradient is summed over the ranks."""
        tops = self.all_reduce_max(*(x.detach().amax(-1, keepdim=True) for x in z))
        tops = [torch.where(top.isfinite(), top, 0.0) for top in tops]
        totals = [(x - top).exp().sum(-1, keepdim=True) for x, top in zip(z, tops, strict=True)]
        totals = cast("Any", _AllReduceForLocal).apply(self.group, *totals)
        return tuple(top + total.log() for top, total in zip(tops, totals, strict=True))

    def gather_local(
        self, z: Float[Tensor, "tokens vocab"], ids: Int[Tensor, " tokens"]
    ) -> Float[Tensor, "tokens 1"]:
        """The logits of the tokens; 0 for a token of another rank."""
        local, is_local = self._local_ids(ids)
        return torch.where(is_local, z.gather(-1, local), 0.0)

    def scatter_add_local_(
        self, z: Float[Tensor, "tokens vocab"], ids: Int[Tensor, " tokens"], source: Float[Tensor, "tokens 1"]
    ) -> Tensor:
        """Add ``source`` to the entries of the tokens that this rank has, in place."""
        local, is_local = self._local_ids(ids)
        return z.scatter_add_(-1, local, torch.where(is_local, source, 0.0))

    def _local_ids(self, ids: Int[Tensor, " tokens"]) -> tuple[Tensor, Tensor]:
        local = ids[:, None] - self.offset
        is_local = (local >= 0) & (local < self.local_size)
        return local.clamp(0, self.local_size - 1), is_local

    def argmax(
        self, z: Sequence[Tensor], local: Sequence[Tensor], tops: Sequence[Float[Tensor, "tokens 1"]]
    ) -> Numbers:
        """The ids of the largest logits: the smallest id among the ranks that have the maximum."""
        negative_ids: list[Tensor] = []
        for x, index, top in zip(z, local, tops, strict=True):
            largest = x.gather(-1, index[:, None])
            negative_ids.append(
                torch.where(
                    (largest == top) | largest.isnan(), -(index[:, None] + self.offset), -self.vocab_size
                )
            )
        reduced = exchange_packed(negative_ids, lambda x: all_reduce(x, "MAX", self.group))
        return tuple(-ids[:, 0] for ids in reduced)

    def row_parts(self, selected: Bool[Tensor, " rows"], vocab_size: int) -> Iterator[Tensor]:
        """The indices of the rows that any rank selected, a quarter of the rows at a time."""
        rows = all_reduce(selected.to(torch.uint8), "MAX", self.group).nonzero()[:, 0]
        size = max(1, len(selected) // 4)
        for start in range(0, len(rows), size):
            yield rows[start : start + size]

    def agreed_chunk(self, most: int, tokens: int) -> int:
        """The smallest ``most`` of all ranks.

        Raises:
            CannotRunError: if the ranks have different numbers of tokens.
        """
        local = torch.tensor([most, tokens, -tokens], device=self.device)
        least, fewest, negative = (int(x) for x in all_reduce(local, "MIN", self.group))
        if fewest != -negative:
            raise CannotRunError(
                f"one rank of the vocabulary_group has {fewest} tokens to do and another {-negative}; give all "
                "of them the same tokens, weights and incoming gradients"
            )
        return least

    def replicate(self, hidden: Float[Tensor, "tokens dim"]) -> Float[Tensor, "tokens dim"]:
        """The hidden states, whose gradient is summed over the ranks."""
        return cast("Any", _Replicate).apply(self.group, hidden)

    def all_reduce_gradient(self, gradient: Float[Tensor, "tokens dim"]) -> Float[Tensor, "tokens dim"]:
        """The gradient of the hidden states, summed over the ranks: the only exchange of ``[tokens, dim]`` numbers."""
        return all_reduce(at_least_float32(gradient), "SUM", self.group)


def all_reduce(numbers: Tensor, op: str, group: Any) -> Tensor:
    """The numbers reduced over the ranks, in place if they are contiguous."""
    numbers = numbers.contiguous()
    dist.all_reduce(numbers, op=getattr(dist.ReduceOp, op), group=group)
    return numbers


def exchange_packed(numbers: Sequence[Tensor], exchange: Callable[[Tensor], Tensor]) -> Numbers:
    """Several numbers for each token, exchanged in one message."""
    dtype = numbers[0].dtype
    packed = exchange(torch.stack([x.reshape(-1).to(dtype) for x in numbers]))
    return tuple(new.reshape(x.shape).to(x.dtype) for x, new in zip(numbers, packed, strict=True))


def refuse_create_graph() -> None:
    """Raise in a backward pass with ``create_graph``."""
    if torch.is_grad_enabled():
        raise CannotRunError(
            "the collectives of a vocabulary_group can be differentiated once; leave create_graph off, or give heads "
            "that are not sharded"
        )


class _AllReduceSum(torch.autograd.Function):
    """A sum over the ranks that all of them use alike: the incoming gradient is that of the sum."""

    @staticmethod
    def forward(ctx: Any, group: Any, *numbers: Tensor) -> Numbers:  # pyright: ignore[reportIncompatibleMethodOverride]
        return exchange_packed(numbers, lambda packed: all_reduce(packed, "SUM", group))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        refuse_create_graph()
        return None, *gradients


class _AllReduceForLocal(torch.autograd.Function):
    """A sum over the ranks that each uses for its own rows: the incoming gradients are summed."""

    @staticmethod
    def forward(ctx: Any, group: Any, *numbers: Tensor) -> Numbers:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.group = group
        return exchange_packed(numbers, lambda packed: all_reduce(packed, "SUM", group))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        refuse_create_graph()
        return None, *exchange_packed(gradients, lambda packed: all_reduce(packed, "SUM", ctx.group))


class _Replicate(torch.autograd.Function):
    """Hidden states that each rank multiplies by its own rows: the incoming gradients are summed."""

    @staticmethod
    def forward(ctx: Any, group: Any, hidden: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        refuse_create_graph()
        return None, all_reduce(gradient.clone(), "SUM", ctx.group)
