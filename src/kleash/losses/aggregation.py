"""Aggregation of per-token losses to a scalar, with the count that lets micro-batches add up exactly."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor

from kleash.arguments import validated
from kleash.errors import OptionError
from kleash.masking import Mean, as_mask
from kleash.precision import at_least_float32
from kleash.registry import look_up


@dataclass(frozen=True, kw_only=True)
class Aggregation:
    """A way to average tokens: a total and the count that it is divided by."""

    total: Callable[[Tensor, Tensor], Tensor]
    """The total as a function of the values per token (0 where masked) and each sequence's token count (at least 1)."""
    counts_tokens: bool
    """Whether the divisor is the number of tokens; otherwise it is the number of sequences."""
    sums_sequences: bool
    """Whether each sequence enters as the sum over its tokens, as a KL between responses requires."""


AGGREGATIONS: Mapping[str, Aggregation] = MappingProxyType(
    {
        "token_mean": Aggregation(
            total=lambda values, tokens: values.sum(),
            counts_tokens=True,
            sums_sequences=True,
        ),
        "sequence_sum": Aggregation(
            total=lambda values, tokens: values.sum(),
            counts_tokens=False,
            sums_sequences=True,
        ),
        "sequence_mean": Aggregation(
            total=lambda values, tokens: (values.sum(-1) / tokens).sum(),
            counts_tokens=False,
            sums_sequences=False,
        ),
        "constant": Aggregation(
            total=lambda values, tokens: values.sum(),
            counts_tokens=False,
            sums_sequences=True,
        ),
    }
)
"""Name -> record."""


@validated
def aggregate(
    per_token: Float[Tensor, "batch time"],
    mask: Bool[Tensor, "batch time"] | Integer[Tensor, "batch time"],
    how: str = "token_mean",
    *,
    length: int | None = None,
) -> Mean:
    """The mean of ``per_token`` in one of four ways, as a differentiable total, in at least float32, and its divisor.

        token_mean       sum of all tokens / tokens
        sequence_sum     sum of all tokens / sequences
        sequence_mean    sum over sequences of (their sum / their tokens) / sequences
        constant         sum of all tokens / (sequences * length)

    Sequences without an unmasked token, such as rows that fill up a batch, are not counted. Masked values are not read.
    Without unmasked tokens ``.value`` is NaN and its gradient 0.

    ``aggregate(...).value`` is the loss of a whole batch. If the batch is split into micro-batches, divide each by the
    count of the whole batch: ``aggregate(...).share(count)``, where ``count`` is the sum of ``count_of`` over the
    micro-batches. The shares add up to the mean over the batch, gradient included; log their sum.

    Args:
        per_token: the values to average.
        mask: true (or 1) for the tokens that count.
        how: a name of ``AGGREGATIONS``.
        length: the divisor of "constant": the largest length of a response.

    Raises:
        UnknownNameError: if there is no such aggregation.
        OptionError: if "constant" has no length of at least 1, or another aggregation has a length.
        ShapeError: if the two differ in shape, or are not [batch, time].

    References:
        Liu et al., "Understanding R1-Zero-Like Training" (2025), https://arxiv.org/abs/2503.20783
    """
    is_counted = as_mask(mask)
    values = torch.where(is_counted, at_least_float32(per_token), 0.0)
    aggregation = look_up(AGGREGATIONS, how, "aggregation")
    return Mean(
        total=aggregation.total(values, is_counted.sum(-1).clamp(min=1)),
        count=count_of(is_counted, how, length=length),
    )


@validated
def count_of(
    mask: Bool[Tensor, "batch time"] | Integer[Tensor, "batch time"],
    how: str = "token_mean",
    *,
    length: int | None = None,
) -> Int[Tensor, ""]:
    """The divisor of ``aggregate`` for a mask, available before the loss is computed.

    Raises:
        UnknownNameError, OptionError: as ``aggregate``.
    """
    aggregation = look_up(AGGREGATIONS, how, "aggregation")
    if how == "constant" and (length is None or length < 1):
        raise OptionError(f"length is {length}; give the number of tokens that every sequence is divided by")
    if how != "constant" and length is not None:
        raise OptionError(f"length is {length}, which {how!r} does not use; leave it out, or take 'constant'")
    is_counted = as_mask(mask)
    if aggregation.counts_tokens:
        return is_counted.sum()
    return is_counted.any(-1).sum() * (1 if length is None else length)
