"""What a linear function is asked about, made uniform at the public door."""

from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from kleash.linear.head import Head
from kleash.linear.impl.vocab_shards import LOCAL_VOCAB, LocalVocab

Where: TypeAlias = slice | Tensor
"""Which tokens: a run of them, or their positions."""
Tensors: TypeAlias = tuple[Tensor, Tensor | None, Tensor | None]
"""Hidden states, weight, bias."""


@dataclass(frozen=True, kw_only=True, eq=False)
class HeadInputs:
    """The hidden states of some tokens under one model, and its head."""

    hidden: Float[Tensor, "*tokens dim"]
    head: Head
    temperature: float | Float[Tensor, "*tokens"]
    dtype: torch.dtype
    """What logits are computed in: float32, or float64 if anything given is float64."""
    across: LocalVocab = LOCAL_VOCAB
    """The ranks that the words are spread over."""

    @property
    def tensors(self) -> Tensors:
        """Hidden states, weight, bias: what may require a gradient."""
        return self.hidden, self.head.weight, self.head.bias

    @property
    def vocabulary(self) -> int:
        """How many logits a token has here."""
        return self.head.vocabulary(self.hidden)

    def at(self, where: Where) -> "HeadInputs":
        """The same model on some of the tokens."""
        return replace(self, hidden=self.hidden[where], temperature=at(self.temperature, where))

    def divisor(self, where: slice) -> float | Float[Tensor, "rows 1"]:
        """The temperature of some tokens, as logits are divided by it."""
        return self.temperature[where, None] if isinstance(self.temperature, Tensor) else self.temperature


@dataclass(frozen=True, kw_only=True, eq=False)
class HeadPair:
    """The same tokens under p and under q."""

    p: HeadInputs
    q: HeadInputs

    @property
    def tokens(self) -> int:
        """How many tokens are asked about."""
        return len(self.p.hidden)

    @property
    def across(self) -> LocalVocab:
        """The ranks that the words of both are spread over."""
        return self.p.across

    @property
    def words(self) -> int:
        """How many words there are, on all ranks together."""
        return self.across.vocab_size or self.p.vocabulary

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Hidden states, weight and bias of p, and of q."""
        return *self.p.tensors, *self.q.tensors

    @property
    def swapped(self) -> "HeadPair":
        """q in p's place."""
        return HeadPair(p=self.q, q=self.p)

    @property
    def one_product(self) -> bool:
        """Whether ``hidden W^T`` is the same on both sides: the same tensors, not merely equal ones."""
        return self.p.hidden is self.q.hidden and self.p.head.weight is self.q.head.weight

    @property
    def one_head(self) -> bool:
        """Whether the logits differ by ``(hidden_q - hidden_p) W^T`` times a number for each token."""
        p, q = self.p.head, self.q.head
        linear = p.softcap is None and q.softcap is None and p.scale == q.scale
        return linear and p.weight is not None and p.weight is q.weight and p.bias is q.bias

    def at(self, where: Where) -> "HeadPair":
        """The same two models on some of the tokens."""
        p, q = self.p.at(where), self.q.at(where)
        return HeadPair(p=p, q=replace(q, hidden=p.hidden) if self.p.hidden is self.q.hidden else q)


def at(temperature: float | Tensor, where: Where) -> float | Tensor:
    """The temperature of some of the tokens."""
    return temperature[where] if isinstance(temperature, Tensor) else temperature
