"""The interface of the backends: what one is given, what it returns, and the methods that it has."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Generic, NamedTuple, Protocol, TypeAlias, TypeVar, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kleash.autodiff import refuse_transforms
from kleash.divergences import DIVERGENCES, Divergence
from kleash.errors import ShapeError
from kleash.linear.head import Head
from kleash.linear.head_storage import HeadStorage
from kleash.linear.options import LinearOptions
from kleash.linear.types import StatisticsAndTop, TokenStatistics, TokenTerms
from kleash.linear.vocab_shards import LOCAL_VOCAB, LocalVocab

T = TypeVar("T")
KL, REVERSE_KL = DIVERGENCES["kl"], DIVERGENCES["reverse_kl"]
TokenIndex: TypeAlias = slice | Tensor
"""Which tokens: a slice, or their positions."""
Objective: TypeAlias = Callable[[TokenTerms, slice], Tensor]
"""From the terms of some tokens, and the slice of the flattened tokens that they are, to a loss for each token."""


@dataclass(frozen=True, eq=False)
class PerModel(Generic[T]):
    """One value for each tensor of one model."""

    hidden: T
    weight: T
    bias: T

    def __iter__(self) -> Iterator[T]:
        """Hidden states, weight, bias."""
        return iter((self.hidden, self.weight, self.bias))


@dataclass(frozen=True, eq=False)
class PerTensor(Generic[T]):
    """One value for each of the six tensors of a call: the tensors, whether a gradient is needed, or the gradients."""

    p: PerModel[T]
    q: PerModel[T]

    def __iter__(self) -> Iterator[T]:
        """The values in the order in which autograd and the custom operations take the tensors."""
        return iter((*self.p, *self.q))

    @property
    def swapped(self) -> "PerTensor[T]":
        """The values with p and q exchanged."""
        return PerTensor(self.q, self.p)


def per_tensor(values: Iterable[T]) -> PerTensor[T]:
    """Six values by their names, from the order of iteration."""
    hidden_p, weight_p, bias_p, hidden_q, weight_q, bias_q = values
    return PerTensor(PerModel(hidden_p, weight_p, bias_p), PerModel(hidden_q, weight_q, bias_q))


Needed: TypeAlias = PerTensor[bool]
"""Which gradients are needed."""
Gradients: TypeAlias = PerTensor[Tensor | None]
"""The gradients, each in the ``gradient_dtype`` of its tensor; None where it is not needed. Where one tensor is both
models', one of its two places may hold the gradient of both, and the other None."""
NOTHING_NEEDED: Needed = per_tensor([False] * 6)


@dataclass(frozen=True, kw_only=True, eq=False)
class HeadInputs:
    """The hidden states of some tokens under one model, and the model's head."""

    hidden: Float[Tensor, "*tokens dim"]
    head: Head
    temperature: float | Float[Tensor, "*tokens"]
    dtype: torch.dtype
    """Dtype of the logits: float32, or float64 if any tensor of the call is float64."""
    vocab_shards: LocalVocab = LOCAL_VOCAB
    """The ranks that share the vocabulary."""
    storage: HeadStorage | None = None
    """The ranks that store the head's rows and have other tokens; weight and bias are then this rank's rows."""
    weight_sum: Tensor | None = None
    """A sum, in ``dtype``, that a backend may add the weight's gradient to, and then return as the gradient."""

    @property
    def tensors(self) -> PerModel[Tensor | None]:
        """The tensors that may require a gradient."""
        return PerModel(self.hidden, self.head.weight, self.head.bias)

    @property
    def local_vocab_size(self) -> int:
        """The number of logits of a token on this rank."""
        return self.head.vocabulary(self.hidden)

    def select(self, index: TokenIndex) -> "HeadInputs":
        """The same model on some of the tokens."""
        temperature = self.temperature
        temperature = temperature[index] if isinstance(temperature, Tensor) else temperature
        return replace(self, hidden=self.hidden[index], temperature=temperature)

    def divisor(self, rows: slice) -> float | Float[Tensor, "rows 1"]:
        """The temperature of some tokens, as a number or a column."""
        return self.temperature[rows, None] if isinstance(self.temperature, Tensor) else self.temperature


@dataclass(frozen=True, kw_only=True, eq=False)
class HeadPair:
    """The same tokens under p and under q."""

    p: HeadInputs
    q: HeadInputs

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return len(self.p.hidden)

    @property
    def vocab_shards(self) -> LocalVocab:
        """The ranks that share the vocabulary of both models."""
        return self.p.vocab_shards

    @property
    def is_sharded(self) -> bool:
        """Whether the vocabulary is spread over several ranks."""
        return self.vocab_shards is not LOCAL_VOCAB

    @property
    def storage(self) -> HeadStorage | None:
        """The ranks that store the rows of a head and have other tokens; None if this rank has both heads."""
        return self.p.storage or self.q.storage

    @property
    def vocab_size(self) -> int:
        """The size of the whole vocabulary, over all ranks."""
        if self.storage is not None:
            return self.storage.vocab_size
        return self.vocab_shards.vocab_size or self.local_vocab_size

    @property
    def local_vocab_size(self) -> int:
        """The number of logits of a token on this rank."""
        return self.p.local_vocab_size

    @property
    def tensors(self) -> PerTensor[Tensor | None]:
        """The tensors that may require a gradient."""
        return PerTensor(self.p.tensors, self.q.tensors)

    @property
    def swapped(self) -> "HeadPair":
        """The pair with p and q exchanged."""
        return HeadPair(p=self.q, q=self.p)

    @property
    def has_shared_product(self) -> bool:
        """Whether ``hidden W^T`` is the same for both models: the same tensor objects."""
        return self.p.hidden is self.q.hidden and self.p.head.weight is self.q.head.weight

    @property
    def has_shared_head(self) -> bool:
        """Whether the logits differ by ``(hidden_q - hidden_p) W^T``, times a factor for each token."""
        p, q = self.p.head, self.q.head
        linear = p.softcap is None and q.softcap is None and p.scale == q.scale
        return linear and p.weight is not None and p.weight is q.weight and p.bias is q.bias

    def select(self, index: TokenIndex) -> "HeadPair":
        """The same two models on some of the tokens; hidden states of both models stay one tensor."""
        p, q = self.p.select(index), self.q.select(index)
        return HeadPair(p=p, q=replace(q, hidden=p.hidden) if self.p.hidden is self.q.hidden else q)


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """A call, as a backend is given it."""

    pair: HeadPair
    options: LinearOptions
    divergence: Divergence = field(default=KL)
    """The divergence of ``values`` and ``value_and_grad``; the other methods do not read it."""

    @property
    def swapped(self) -> "Request":
        """For reverse KL, the call that computes the same number: KL with p and q exchanged."""
        assert self.divergence == REVERSE_KL
        return Request(pair=self.pair.swapped, options=self.options, divergence=KL)


class ValueAndGrad(NamedTuple):
    """A divergence and its gradient."""

    per_token: Float[Tensor, " tokens"]
    """The divergence of each token; 0 for a token that was not read."""
    gradients: Gradients
    """The gradients of the weighted sum."""


class ObjectiveResult(NamedTuple):
    """The loss, terms and gradients of an objective."""

    loss: Float[Tensor, ""]
    """The sum of the objective's losses."""
    terms: TokenTerms
    gradients: Gradients
    """The gradients of the loss."""


@dataclass(kw_only=True, eq=False)
class SavedForward:
    """The gradients of the last tokens' values in ``hidden W^T + bias``, from a forward pass for the backward pass."""

    start: int
    """The first of these tokens."""
    last: HeadPair
    """The two models on these tokens."""
    gradients: tuple[Tensor | None, Tensor | None]
    """For p and for q, ``[tokens, vocab]``; None where no gradient is needed."""
    tile_rows: int
    """``ChunkPlan.tile_rows`` of the forward pass."""


@runtime_checkable
class Backend(Protocol):
    """An implementation of the linear functions. All backends return the same numbers, up to rounding."""

    def unsupported(self, request: Request) -> str | None:
        """Why this backend cannot do the call, as the end of "impl='...' "; None if it can."""
        ...

    def values(self, request: Request) -> Float[Tensor, " tokens"]:
        """The divergence of each token."""
        ...

    def values_saving_forward(
        self, request: Request, needed: Needed
    ) -> tuple[Float[Tensor, " tokens"], SavedForward | None]:
        """The divergence of each token, and what ``value_and_grad`` can take over in the backward pass, if anything."""
        ...

    def value_and_grad(
        self,
        request: Request,
        weights: Float[Tensor, " tokens"],
        needed: Needed,
        saved: SavedForward | None = None,
    ) -> ValueAndGrad:
        """The divergence of each token, and the gradient of ``sum weights D``.

        A token of weight 0 is not read, and its value is 0; so is the value of a token whose gradient was ``saved``.
        """
        ...

    def objective(
        self, request: Request, tokens: Int[Tensor, " tokens"], objective: Objective, needed: Needed
    ) -> ObjectiveResult:
        """The sum of the objective's losses, the terms of each token, and the gradients of the sum."""
        ...

    def statistics(self, request: Request, tokens: Int[Tensor, " tokens"]) -> TokenStatistics:
        """The statistics of each token."""
        ...

    def statistics_and_top(
        self, request: Request, tokens: Int[Tensor, " tokens"], top: int
    ) -> StatisticsAndTop:
        """The statistics of each token, and the ``top`` likeliest tokens of both models, from the same logits."""
        ...


def gradient_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype of a tensor's gradient until the backward pass: the tensor's own, but float32 for float16.

    A scaled loss may bring a gradient into float16's range that is outside of it before; autograd converts it then.
    """
    return torch.float32 if tensor.dtype == torch.float16 else tensor.dtype


def objective_value_and_grad(
    objective: Objective, terms: TokenTerms, rows: slice
) -> tuple[Float[Tensor, ""], TokenTerms]:
    """The sum of the objective's losses, and its derivative in each term.

    Raises:
        ShapeError: if the objective does not return one loss for each token.
    """
    with torch.enable_grad():
        leaves = TokenTerms(*(x.clone().requires_grad_() for x in terms))
        losses = objective(leaves, rows)
        if losses.shape != leaves.kl.shape:
            raise ShapeError(
                f"the objective was given {len(leaves.kl)} tokens and returned losses of shape "
                f"{tuple(losses.shape)}; return one for each token"
            )
        refuse_transforms(
            "linear_objective",
            "its losses are differentiated in its terms alone; detach what else they read",
            losses,
        )
        total = losses.sum()
    if not total.requires_grad:
        return total, TokenTerms(*(torch.zeros_like(x) for x in terms))
    return total.detach(), TokenTerms(
        *torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
    )


def weighted_terms(terms: TokenTerms, coefficients: TokenTerms) -> Float[Tensor, " tokens"]:
    """Each token's sum of coefficient times term; a term with coefficient 0 is not read, even if it is NaN."""
    return torch.stack(
        [torch.where(c != 0, x, 0.0) * c for x, c in zip(terms, coefficients, strict=True)]
    ).sum(0)


def zero_objective(terms: TokenTerms, rows: slice) -> Float[Tensor, " tokens"]:
    """A loss of 0 for each token."""
    return torch.zeros_like(terms.kl)


def weighted_objective(coefficients: TokenTerms) -> Objective:
    """The objective ``weighted_terms``, with a coefficient for each term of each token of the call."""
    return lambda terms, rows: weighted_terms(terms, TokenTerms(*(c[rows] for c in coefficients)))
