"""What a linear function is asked about, made uniform at the public door."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from kleash.linear.head import Head


@dataclass(frozen=True, kw_only=True, eq=False)
class OneModel:
    """The hidden states of some tokens under one model, and its head."""

    hidden: Float[Tensor, "*tokens dim"]
    head: Head
    temperature: float
    dtype: torch.dtype
    """What logits are computed in: float32, or float64 if anything given is float64."""

    @property
    def tensors(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Hidden states, weight, bias: what may require a gradient."""
        return self.hidden, self.head.weight, self.head.bias

    @property
    def vocabulary(self) -> int:
        """How many logits a token has."""
        return self.head.vocabulary(self.hidden)


@dataclass(frozen=True, kw_only=True, eq=False)
class Pair:
    """The same tokens under p and under q."""

    p: OneModel
    q: OneModel

    @property
    def tokens(self) -> int:
        """How many tokens are asked about."""
        return len(self.p.hidden)

    @property
    def one_product(self) -> bool:
        """Whether ``hidden W^T`` is the same on both sides: the same tensors, not merely equal ones."""
        return self.p.hidden is self.q.hidden and self.p.head.weight is self.q.head.weight
