"""What the ranks that share a vocabulary tell each other: a few numbers for each token, nothing of its size.

The row cores call these between their passes over the logits. Where all words are here (``LOCAL_VOCAB``), what would
be exchanged is given back as it is. A branch that one rank takes and another does not would leave one of them
waiting for ever, so what decides a branch or a size is agreed upon as well.
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
"""Some numbers for each token, each as a vector or a column."""
dist: Any = torch.distributed
REDONE_BLOCK = 2**16
"""Logits of one model whose rows are done again at once: what that takes is forty times as much."""


class LocalVocab:
    """All words are here: nothing is exchanged."""

    vocab_size = 0
    """How many words the ranks have together; 0 if that is known without them."""

    def all_reduce_max(self, *numbers: Tensor) -> Numbers:
        """Each number's largest over the ranks; NaN counts as inf there."""
        return numbers

    def all_reduce_sum(self, *numbers: Tensor) -> Numbers:
        """Each number's sum over the ranks, of which every rank makes the same."""
        return numbers

    def log_sum_exp(self, *z: Float[Tensor, "tokens vocab"]) -> Numbers:
        """Of each logits, a column; its gradient is that of what all ranks make of it for their own words."""
        return tuple(x.logsumexp(-1, keepdim=True) for x in z)

    def gather_local(
        self, z: Float[Tensor, "tokens vocab"], ids: Int[Tensor, " tokens"]
    ) -> Float[Tensor, "tokens 1"]:
        """The tokens' logits, to be ``all_reduce_sum``: 0 for a token that another rank has."""
        return z.gather(-1, ids[:, None])

    def scatter_add_local_(
        self, z: Float[Tensor, "tokens vocab"], ids: Int[Tensor, " tokens"], by: Float[Tensor, "tokens 1"]
    ) -> Tensor:
        """Add ``by`` to the tokens' own entries."""
        return z.scatter_add_(-1, ids[:, None], by)

    def argmax(
        self, z: Sequence[Tensor], found: Sequence[Tensor], tops: Sequence[Float[Tensor, "tokens 1"]]
    ) -> Numbers:
        """The ids of the likeliest tokens, the first of several, from where ``found`` among those here."""
        return tuple(found)

    def row_parts(self, rare: Bool[Tensor, " rows"], words: int) -> Iterator[Tensor]:
        """Which rows of so many words to do again, if any, a few at a time: that takes much more memory."""
        rows, size = rare.nonzero()[:, 0], max(1, REDONE_BLOCK // words)
        for start in range(0, len(rows), size):
            yield rows[start : start + size]

    def agreed_chunk(self, most: int, tokens: int) -> int:
        """How many of so many tokens to do at a time, where ``most`` would be possible here."""
        return most

    def replicate(self, hidden: Float[Tensor, "tokens dim"]) -> Float[Tensor, "tokens dim"]:
        """Hidden states as they are, whose gradient is the sum of what each rank's words give them."""
        return hidden

    def all_reduce_gradient(self, gradient: Float[Tensor, "tokens dim"]) -> Float[Tensor, "tokens dim"]:
        """The sum of what each rank's words give to the hidden states."""
        return gradient


LOCAL_VOCAB = LocalVocab()


class ShardedVocab(LocalVocab):
    """Each rank of a group has some words, one run after the other in the order of the ranks."""

    def __init__(self, group: Any, rows: Sequence[int], rank: int, device: torch.device) -> None:
        """``rows``: how many words each rank has; ``rank``: which of them this one is."""
        self.group, self.device, self.vocab_size = group, device, sum(rows)
        self.offset, self.here = sum(rows[:rank]), rows[rank]

    def all_reduce_max(self, *numbers: Tensor) -> Numbers:
        """Each number's largest over the ranks; NaN, which backends treat differently, counts as inf."""
        with torch.no_grad():
            known = [x.nan_to_num(torch.inf, torch.inf, -torch.inf) for x in numbers]
            return exchange_packed(known, lambda packed: all_reduce(packed, "MAX", self.group))

    def all_reduce_sum(self, *numbers: Tensor) -> Numbers:
        """Each number's sum over the ranks, of which every rank makes the same: one gradient for all."""
        return cast("Any", _AllReduceSum).apply(self.group, *numbers)

    def log_sum_exp(self, *z: Float[Tensor, "tokens vocab"]) -> Numbers:
        """Of each logits, a column; its gradient is the sum of what the ranks make of it."""
        tops = self.all_reduce_max(*(x.detach().amax(-1, keepdim=True) for x in z))
        tops = [torch.where(top.isfinite(), top, 0.0) for top in tops]
        totals = [(x - top).exp().sum(-1, keepdim=True) for x, top in zip(z, tops, strict=True)]
        totals = cast("Any", _AllReduceForLocal).apply(self.group, *totals)
        return tuple(top + total.log() for top, total in zip(tops, totals, strict=True))

    def gather_local(
        self, z: Float[Tensor, "tokens vocab"], ids: Int[Tensor, " tokens"]
    ) -> Float[Tensor, "tokens 1"]:
        """The tokens' logits; 0 for a token that another rank has."""
        local, mine = self._place(ids)
        return torch.where(mine, z.gather(-1, local), 0.0)

    def scatter_add_local_(
        self, z: Float[Tensor, "tokens vocab"], ids: Int[Tensor, " tokens"], by: Float[Tensor, "tokens 1"]
    ) -> Tensor:
        """Add ``by`` to the entries of the tokens that this rank has."""
        local, mine = self._place(ids)
        return z.scatter_add_(-1, local, torch.where(mine, by, 0.0))

    def _place(self, ids: Int[Tensor, " tokens"]) -> tuple[Tensor, Tensor]:
        local = ids[:, None] - self.offset
        mine = (local >= 0) & (local < self.here)
        return local.clamp(0, self.here - 1), mine

    def argmax(
        self, z: Sequence[Tensor], found: Sequence[Tensor], tops: Sequence[Float[Tensor, "tokens 1"]]
    ) -> Numbers:
        """The ids of the likeliest tokens: the least among the ranks that have one as likely as any."""
        claims: list[Tensor] = []
        for x, index, top in zip(z, found, tops, strict=True):
            best = x.gather(-1, index[:, None])
            claims.append(
                torch.where((best == top) | best.isnan(), -(index[:, None] + self.offset), -self.vocab_size)
            )
        return tuple(
            -claim[:, 0] for claim in exchange_packed(claims, lambda x: all_reduce(x, "MAX", self.group))
        )

    def row_parts(self, rare: Bool[Tensor, " rows"], words: int) -> Iterator[Tensor]:
        """Rows that any rank wants done again, a quarter of a block at a time: that takes more memory."""
        rows = all_reduce(rare.to(torch.uint8), "MAX", self.group).nonzero()[:, 0]
        size = max(1, len(rare) // 4)
        for start in range(0, len(rows), size):
            yield rows[start : start + size]

    def agreed_chunk(self, most: int, tokens: int) -> int:
        """The least of what is possible anywhere.

        Raises:
            CannotRunError: if not all ranks have as many tokens to do.
        """
        given = torch.tensor([most, tokens, -tokens], device=self.device)
        least, fewest, negative = (int(x) for x in all_reduce(given, "MIN", self.group))
        if fewest != -negative:
            raise CannotRunError(
                f"one rank of the vocabulary_group has {fewest} tokens to do and another {-negative}; give all "
                "of them the same tokens, weights and incoming gradients"
            )
        return least

    def replicate(self, hidden: Float[Tensor, "tokens dim"]) -> Float[Tensor, "tokens dim"]:
        """Hidden states as they are, whose gradient is summed over the ranks."""
        return cast("Any", _Replicate).apply(self.group, hidden)

    def all_reduce_gradient(self, gradient: Float[Tensor, "tokens dim"]) -> Float[Tensor, "tokens dim"]:
        """The sum of what each rank's words give to the hidden states: the one thing of their size exchanged."""
        return all_reduce(at_least_float32(gradient), "SUM", self.group)


def all_reduce(numbers: Tensor, how: str, group: Any) -> Tensor:
    """The numbers reduced over the ranks, in place where they are in one piece."""
    numbers = numbers.contiguous()
    dist.all_reduce(numbers, op=getattr(dist.ReduceOp, how), group=group)
    return numbers


def exchange_packed(numbers: Sequence[Tensor], exchange: Callable[[Tensor], Tensor]) -> Numbers:
    """Several numbers for each token in one message."""
    dtype = numbers[0].dtype
    packed = exchange(torch.stack([x.reshape(-1).to(dtype) for x in numbers]))
    return tuple(new.reshape(x.shape).to(x.dtype) for x, new in zip(numbers, packed, strict=True))


def refuse_create_graph() -> None:
    """Raise in a backward pass of which a second derivative is wanted."""
    if torch.is_grad_enabled():
        raise CannotRunError(
            "what a vocabulary_group exchanges can be differentiated once; leave create_graph off, or give whole heads"
        )


class _AllReduceSum(torch.autograd.Function):
    """A sum of which every rank goes on to make the same."""

    @staticmethod
    def forward(ctx: Any, group: Any, *numbers: Tensor) -> Numbers:  # pyright: ignore[reportIncompatibleMethodOverride]
        return exchange_packed(numbers, lambda packed: all_reduce(packed, "SUM", group))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        refuse_create_graph()
        return None, *gradients


class _AllReduceForLocal(torch.autograd.Function):
    """A sum that every rank goes on to use for its own words."""

    @staticmethod
    def forward(ctx: Any, group: Any, *numbers: Tensor) -> Numbers:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.group = group
        return exchange_packed(numbers, lambda packed: all_reduce(packed, "SUM", group))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        refuse_create_graph()
        return None, *exchange_packed(gradients, lambda packed: all_reduce(packed, "SUM", ctx.group))


class _Replicate(torch.autograd.Function):
    """Hidden states that every rank multiplies by its own words."""

    @staticmethod
    def forward(ctx: Any, group: Any, hidden: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        refuse_create_graph()
        return None, all_reduce(gradient.clone(), "SUM", ctx.group)
