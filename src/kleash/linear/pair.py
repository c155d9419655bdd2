"""A call of a linear function after its checks: the same tokens under p and under q, and its six tensors."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from kleash.linear.head import Head
from kleash.linear.vocab_shards import VocabShards

TokenIndex: TypeAlias = slice | Tensor
"""Which tokens: a slice, or their positions."""
Tensors: TypeAlias = tuple[Tensor | None, ...]
"""Hidden states, weight and bias of p, then of q: the tensors that may require a gradient, or their gradients."""


@dataclass(frozen=True, kw_only=True, eq=False)
class HeadInputs:
    """The hidden states of some tokens under one model, and the rows of its head that this rank has."""

    hidden: Float[Tensor, "*tokens dim"]
    head: Head
    temperature: float | Float[Tensor, "*tokens"]
    dtype: torch.dtype
    """Dtype of the logits: float32, or float64 if any tensor of the call is float64."""

    @property
    def tensors(self) -> Tensors:
        """Hidden states, weight and bias."""
        return self.hidden, self.head.weight, self.head.bias

    def divisor(self, rows: slice) -> float | Float[Tensor, "rows 1"]:
        """The temperature of some tokens, as a number or a column."""
        return self.temperature[rows, None] if isinstance(self.temperature, Tensor) else self.temperature


@dataclass(frozen=True, kw_only=True, eq=False)
class HeadPair:
    """Hidden states and heads of two models, p and q, for some tokens."""

    p: HeadInputs
    q: HeadInputs
    vocab_shards: VocabShards
    """The ranks that have the rows of the vocabulary."""

    def __iter__(self) -> Iterator[HeadInputs]:
        """The model p, then q."""
        return iter((self.p, self.q))

    @property
    def tokens(self) -> int:
        """The number of this rank's tokens."""
        return len(self.p.hidden)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the logits and of the results."""
        return self.p.dtype

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return self.p.hidden.device

    @property
    def is_sharded(self) -> bool:
        """Whether the vocabulary is spread over several ranks."""
        return self.vocab_shards.group is not None

    @property
    def tensors(self) -> Tensors:
        """The six tensors that may require a gradient."""
        return *self.p.tensors, *self.q.tensors

    @property
    def requires_gradient(self) -> bool:
        """Whether autograd records the call: any tensor requires a gradient, and gradients are enabled."""
        return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in self.tensors)

    def select(self, index: TokenIndex) -> "HeadPair":
        """Both models on some of the tokens."""
        return self._with_tokens(lambda x: x[index])

    def gathered(self, counts: Sequence[int]) -> "HeadPair":
        """Both models on the tokens of all ranks, of which each has so many, if theirs move to the rows."""
        return self._with_tokens(partial(self.vocab_shards.gather_tokens, counts=counts))

    def _with_tokens(self, change: Callable[[Tensor], Tensor]) -> "HeadPair":
        """Both models on tokens whose entries ``change`` makes of these; shared hidden states stay one tensor."""
        temperature = self.p.temperature
        temperature = change(temperature) if isinstance(temperature, Tensor) else temperature
        hidden_p = change(self.p.hidden)
        hidden_q = hidden_p if self.q.hidden is self.p.hidden else change(self.q.hidden)
        p, q = (
            replace(model, hidden=hidden, temperature=temperature)
            for model, hidden in zip(self, (hidden_p, hidden_q), strict=True)
        )
        return replace(self, p=p, q=q)


def gradient_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype of a tensor's gradient until the backward pass: the tensor's own, but float32 for float16.

    A scaled loss may bring a gradient into float16's range that is outside of it before; autograd converts it then.
    """
    return torch.float32 if tensor.dtype == torch.float16 else tensor.dtype
