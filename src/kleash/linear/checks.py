"""Checks of the public functions' arguments, and the ``HeadPair`` that they are turned into."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor

from kleash.autodiff import refuse_transforms
from kleash.divergences import DIVERGENCES, Divergence
from kleash.errors import CannotRunError, KleashError, OptionError, ShapeError, VocabularyMismatchError
from kleash.linear.head import Head, gathered
from kleash.linear.head_storage import HeadStorage
from kleash.linear.pair import HeadInputs, HeadPair
from kleash.linear.sharding import (
    UNSHARDED,
    common_group,
    exchange_specs,
    exchange_storage,
    ranks_of,
    storage_group,
    temperature_bits,
)
from kleash.linear.vocab_shards import LOCAL_VOCAB, LocalVocab, ShardedVocab
from kleash.registry import look_up

ALTERNATIVE = "take linear_divergence with impl='reference', or the functions of kleash.divergences"
NO_SPECS = [0, 0, 0, 0, 0]
"""What a rank with an error sends in place of ``specs_of_rank``."""


def checked_pair(
    p: tuple[Tensor, Head], q: tuple[Tensor, Head], temperature: float | Float[Tensor, "*tokens"]
) -> HeadPair:
    """Both models with their tokens flattened.

    Raises:
        ShapeError, VocabularyMismatchError, OptionError, CannotRunError: if the arguments do not fit together.
    """
    (hidden_p, head_p), (hidden_q, head_q) = p, q
    stored_on = group_of_storage(head_p, head_q)
    if stored_on is not None:
        return stored_pair(stored_on, (hidden_p, head_p), (hidden_q, head_q), temperature)
    head_p, head_q = gathered(head_p, head_q)
    group = common_group(head_p.vocabulary_group, head_q.vocabulary_group)
    vocab_shards: LocalVocab = LOCAL_VOCAB
    if group is None:
        check_each((hidden_p, head_p), (hidden_q, head_q), temperature)
    else:
        vocab_shards = checked_shards(group, (hidden_p, head_p), (hidden_q, head_q), temperature)
        hidden_p, head_p = local_part("p", hidden_p, head_p, vocab_shards)
        hidden_q, head_q = local_part("q", hidden_q, head_q, vocab_shards)
    check_same_vocab_size(head_p.vocabulary(hidden_p), head_q.vocabulary(hidden_q))
    return flat_pair((hidden_p, head_p), (hidden_q, head_q), temperature, vocab_shards)


def flat_pair(
    p: tuple[Tensor, Head],
    q: tuple[Tensor, Head],
    temperature: float | Tensor,
    vocab_shards: LocalVocab = LOCAL_VOCAB,
    storage: HeadStorage | None = None,
) -> HeadPair:
    """Both models with their tokens flattened, from arguments that have been checked."""
    (hidden_p, head_p), (hidden_q, head_q) = p, q
    dtype = common_dtype((hidden_p, head_p.weight, head_p.bias, hidden_q, head_q.weight, head_q.bias))
    flat_p = hidden_p.reshape(-1, hidden_p.shape[-1])
    flat_q = flat_p if hidden_q is hidden_p else hidden_q.reshape(-1, hidden_q.shape[-1])
    divisor = flat_temperature(temperature, dtype)
    model_p, model_q = (
        HeadInputs(hidden=hidden, head=head, temperature=divisor, dtype=dtype)
        for hidden, head in ((flat_p, head_p), (flat_q, head_q))
    )
    return HeadPair(p=model_p, q=model_q, vocab_shards=vocab_shards, storage=storage)


def group_of_storage(head_p: Head, head_q: Head) -> Any:
    """The ranks that store the rows of a head and have tokens of their own (FSDP2, ZeRO-3); None if there are none.

    Tokens cannot move, and heads are gathered whole, if two heads are stored on different ranks, one has a
    ``vocabulary_group`` or no weight, or one that is whole requires a gradient.
    """
    heads = head_p, head_q
    if any(head.vocabulary_group is not None or head.weight is None for head in heads):
        return None
    groups = [storage_group(head.weight) for head in heads]
    if any(group is None and is_trained(head) for group, head in zip(groups, heads, strict=True)):
        return None
    groups = [group for group in groups if group is not None]
    return groups[0] if groups and len({tuple(ranks_of(group)) for group in groups}) == 1 else None


def is_trained(head: Head) -> bool:
    """Whether the weight or the bias of a head gets a gradient."""
    tensors = head.weight, head.bias
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def stored_pair(
    group: Any, p: tuple[Tensor, Head], q: tuple[Tensor, Head], temperature: float | Tensor
) -> HeadPair:
    """``checked_pair`` for heads of which each rank stores some rows, and has only these in the pair."""
    (hidden_p, head_p), (hidden_q, head_q) = p, q
    stored = storage_group(head_p.weight) is not None, storage_group(head_q.weight) is not None
    error, specs = None, [*NO_SPECS, UNSHARDED]
    try:
        head_p, head_q = heads_of_rank(head_p, head_q, stored)
        check_each((hidden_p, head_p), (hidden_q, head_q), temperature, stored)
        number = hidden_p.itemsize + 16 * hidden_q.itemsize
        specs = specs_of_rank((hidden_p, head_p), (hidden_q, head_q), stored, number)
        specs.append(temperature_bits(temperature))
    except KleashError as local_error:
        error = local_error
    storage = exchange_storage(group, hidden_p.device, specs, error)
    vocab_shards = ShardedVocab(storage.group, storage.rows, storage.rank, storage.device)
    local: list[Head] = []
    for hidden, head, is_stored in ((hidden_p, head_p, stored[0]), (hidden_q, head_q, stored[1])):
        if not is_stored:
            check_same_vocab_size(head.vocabulary(hidden), storage.vocab_size)
        local.append(head if is_stored else rows_of_head(head, vocab_shards))
    return flat_pair((hidden_p, local[0]), (hidden_q, local[1]), temperature, vocab_shards, storage)


def rows_of_head(head: Head, vocab_shards: ShardedVocab) -> Head:
    """The rows of a whole head that this rank has of the other, sharded one."""
    rows = slice(vocab_shards.offset, vocab_shards.offset + vocab_shards.local_size)
    weight, bias = (None if x is None else x[rows] for x in (head.weight, head.bias))
    return replace(head, weight=weight, bias=bias)


def specs_of_rank(
    p: tuple[Tensor, Head], q: tuple[Tensor, Head], has_part: tuple[bool, bool], number: int
) -> list[int]:
    """What this rank tells the others of its arguments (``sharding.agreed_specs``).

    Args:
        p: hidden states and this rank's head.
        q: hidden states and this rank's head.
        has_part: whether this rank has only a part of the rows of p's and of q's head.
        number: the first number on which the ranks agree, after the rows.
    """
    tensors = [x for hidden, head in (p, q) for x in (hidden, head.weight, head.bias)]
    needed = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in tensors]
    rows = [
        head.vocabulary(hidden) if is_part else UNSHARDED
        for (hidden, head), is_part in zip((p, q), has_part, strict=True)
    ]
    return [
        *rows,
        number,
        common_dtype(tensors).itemsize,
        sum(flag << bit for bit, flag in enumerate(needed)),
    ]


def heads_of_rank(head_p: Head, head_q: Head, stored: tuple[bool, bool]) -> tuple[Head, Head]:
    """Of stored heads this rank's rows, of others all; tensors that both share stay one tensor.

    Raises:
        CannotRunError: as ``head_of_rank``.
    """
    local_p, local_q = (
        head_of_rank(head) if is_stored else gathered(head, head)[0]
        for head, is_stored in zip((head_p, head_q), stored, strict=True)
    )
    if head_q is head_p:
        return local_p, local_p
    if head_q.weight is head_p.weight:
        bias = local_p.bias if head_q.bias is head_p.bias else local_q.bias
        local_q = replace(local_q, weight=local_p.weight, bias=bias)
    return local_p, local_q


def head_of_rank(head: Head) -> Head:
    """The rows of a stored head that this rank has.

    Raises:
        CannotRunError: if the bias is whole on each rank.
    """
    weight, bias = cast("Any", head.weight), cast("Any", head.bias)
    if bias is not None and storage_group(bias) is None:
        raise CannotRunError(
            "the weight of a head is stored on several ranks and its bias is whole; shard the bias like the weight"
        )
    return replace(head, weight=weight.to_local(), bias=None if bias is None else bias.to_local())


def check_on_all_ranks(pair: HeadPair, check: Callable[[], None]) -> None:
    """Check what differs between ranks that store a head, so that all of them raise if one does.

    Raises:
        KleashError: the error of ``check``.
        CannotRunError: if ``check`` fails on another rank.
    """
    if pair.storage is None:
        check()
        return
    error = None
    try:
        check()
    except KleashError as local_error:
        error = local_error
    pair.storage.raise_together(error)


def check_each(
    p: tuple[Tensor, Head],
    q: tuple[Tensor, Head],
    temperature: float | Tensor,
    has_part: tuple[bool, bool] = (False, False),
) -> None:
    """Check each model, the temperature, and that the hidden states are of the same tokens.

    Args:
        p: hidden states and this rank's head.
        q: hidden states and this rank's head.
        temperature: of the call.
        has_part: whether this rank has only a part of the rows of p's and of q's head, which may be no row.
    """
    check_temperature(temperature, p[0])
    check_model("p", *p, has_part=has_part[0])
    check_model("q", *q, has_part=has_part[1])
    check_same_tokens(p[0], q[0])
    check_has_data(p[0])


def checked_shards(
    group: Any, p: tuple[Tensor, Head], q: tuple[Tensor, Head], temperature: float | Tensor
) -> ShardedVocab:
    """The ranks that share the vocabulary, if the arguments of all of them agree."""
    error, specs = None, NO_SPECS
    has_part = p[1].vocabulary_group is not None, q[1].vocabulary_group is not None
    try:
        check_each(p, q, temperature, has_part)
        specs = specs_of_rank(p, q, has_part, p[0].numel() // max(1, p[0].shape[-1]))
    except KleashError as local_error:
        error = local_error
    return exchange_specs(group, p[0].device, specs, error)


def local_part(name: str, hidden: Tensor, head: Head, vocab_shards: ShardedVocab) -> tuple[Tensor, Head]:
    """A sharded head as it is; of a head that is not sharded, the rows that this rank has of the other head.

    Raises:
        VocabularyMismatchError: if its vocabulary is not that of the sharded head.
        CannotRunError: if it requires a gradient, which each rank would compute for its rows only.
    """
    if head.vocabulary_group is not None:
        return hidden, head
    check_sharded_vocab_size(name, head.vocabulary(hidden), vocab_shards)
    has_trained_logits = head.weight is None and hidden.requires_grad and torch.is_grad_enabled()
    if is_trained(head) or has_trained_logits:
        raise CannotRunError(
            f"the head of {name} is whole and requires a gradient, of which each rank would compute "
            f"{vocab_shards.local_size} of {vocab_shards.vocab_size} rows; split it over the vocabulary_group, too, or "
            "detach it"
        )
    rows = slice(vocab_shards.offset, vocab_shards.offset + vocab_shards.local_size)
    return hidden[..., rows] if head.weight is None else hidden, rows_of_head(head, vocab_shards)


def flat_temperature(temperature: float | Tensor, dtype: torch.dtype) -> float | Tensor:
    """The temperature as a number, or as one number for each token: a copy, since the backward pass reads it again."""
    if not isinstance(temperature, Tensor):
        return float(temperature)
    return temperature.reshape(-1).to(dtype, copy=True)


def check_transforms(
    name: str, p: tuple[Tensor, Head], q: tuple[Tensor, Head], *more: object, inside: bool = True
) -> None:
    """Refuse tensors of forward mode or of ``torch.func``, whose derivatives would silently be 0."""
    (hidden_p, head_p), (hidden_q, head_q) = p, q
    tensors = (hidden_p, head_p.weight, head_p.bias, hidden_q, head_q.weight, head_q.bias, *more)
    refuse_transforms(name, ALTERNATIVE, *(x for x in tensors if isinstance(x, Tensor)), inside=inside)


def common_dtype(tensors: Sequence[Tensor | None]) -> torch.dtype:
    """float64 if any tensor is float64, else float32."""
    wide = any(tensor is not None and tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if wide else torch.float32


def check_temperature(temperature: float | Tensor, hidden: Tensor) -> None:
    """Check the temperature; the values of a tensor are not checked."""
    if not isinstance(temperature, Tensor):
        if not (isfinite(temperature) and temperature > 0):
            raise OptionError(f"a temperature is a positive number, not {temperature}")
        return
    if temperature.shape != hidden.shape[:-1] or not temperature.is_floating_point():
        raise ShapeError(
            f"temperatures are {temperature.dtype} of shape {tuple(temperature.shape)} for tokens of shape "
            f"{tuple(hidden.shape[:-1])}; give a number, or a floating-point one for each token"
        )
    if temperature.device != hidden.device:
        raise CannotRunError(
            f"temperatures are on {temperature.device} and hidden states on {hidden.device}; move one of them"
        )
    if temperature.requires_grad:
        raise CannotRunError("a temperature cannot require a gradient; detach it")


def check_model(name: str, hidden: Tensor, head: Head, *, has_part: bool = False) -> None:
    """Check that hidden states and head have matching shapes, floating-point dtypes and one device.

    The head has a row at least, unless this rank ``has_part`` of its rows only.
    """
    if hidden.dim() == 0:
        raise ShapeError(f"hidden states of {name} are [..., dim], and a single number was given")
    for what, tensor in (("hidden states", hidden), ("weight", head.weight), ("bias", head.bias)):
        if tensor is None:
            continue
        if not tensor.is_floating_point():
            raise ShapeError(f"{what} of {name} are {tensor.dtype}; give floating-point numbers")
        if tensor.device != hidden.device:
            raise CannotRunError(
                f"hidden states of {name} are on {hidden.device} and its {what} on {tensor.device}; move one"
            )
    width = hidden.shape[-1]
    if head.weight is not None and head.weight.shape[1] != width:
        raise ShapeError(
            f"hidden states of {name} have {width} dimensions and its head {head.weight.shape[1]}"
        )
    if head.weight is None and head.bias is not None and len(head.bias) != width:
        raise ShapeError(f"logits of {name} cover {width} tokens and its head's bias {len(head.bias)}")
    if head.vocabulary(hidden) == 0 and not has_part:
        raise ShapeError(f"the head of {name} covers no token at all")


def check_has_data(hidden: Tensor) -> None:
    """Refuse hidden states on the meta device, which have no data."""
    if hidden.device.type == "meta":
        raise CannotRunError("hidden states are on the meta device and have no data; give tensors with data")


def check_same_tokens(hidden_p: Tensor, hidden_q: Tensor) -> None:
    """Check that both models have hidden states of the same tokens on the same device."""
    if hidden_p.shape[:-1] != hidden_q.shape[:-1]:
        raise ShapeError(
            f"hidden states are of {tuple(hidden_p.shape[:-1])} tokens under p and "
            f"{tuple(hidden_q.shape[:-1])} under q; give both models the same tokens"
        )
    if hidden_p.device != hidden_q.device:
        raise CannotRunError(f"p is on {hidden_p.device} and q on {hidden_q.device}; move one of them")


def check_same_vocab_size(vocab_size_p: int, vocab_size_q: int) -> None:
    """Check that both heads have vocabularies of the same size."""
    if vocab_size_p != vocab_size_q:
        raise VocabularyMismatchError(
            f"the head of p covers {vocab_size_p} tokens and that of q {vocab_size_q}; cut the rows that are padding, "
            "or project one onto the other's vocabulary"
        )


def check_sharded_vocab_size(name: str, vocab_size: int, vocab_shards: ShardedVocab) -> None:
    """Check that a head that is not sharded has the vocabulary size of the one that is."""
    if vocab_size != vocab_shards.vocab_size:
        raise VocabularyMismatchError(
            f"the head of {name} is whole and covers {vocab_size} tokens, and the ranks of the other's "
            f"vocabulary_group hold {vocab_shards.vocab_size} rows together; give it the vocabulary_group if it is "
            "split, too"
        )


def check_tokens(tokens: Tensor, hidden: Tensor) -> None:
    """Check that there is one integer id for each hidden state."""
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise ShapeError(f"tokens are {tokens.dtype}; give ids as integers")
    if tokens.shape != hidden.shape[:-1]:
        raise ShapeError(
            f"there are {tuple(tokens.shape)} tokens and {tuple(hidden.shape[:-1])} hidden states"
        )
    if tokens.device != hidden.device:
        raise CannotRunError(
            f"tokens are on {tokens.device} and hidden states on {hidden.device}; move one of them"
        )


def check_ids(tokens: Tensor, vocab_size: int) -> None:
    """Check that all ids are in the vocabulary."""
    if tokens.numel() == 0:
        return
    least, most = int(tokens.min()), int(tokens.max())
    if least < 0 or most >= vocab_size:
        raise VocabularyMismatchError(
            f"token ids run from {least} to {most} and the heads cover {vocab_size}: ids from 0 to {vocab_size - 1}"
        )


def check_token_ids(tokens: Tensor, hidden: Tensor, vocab_size: int) -> None:
    """Check that there is an id for each hidden state, and that all are in the vocabulary."""
    check_tokens(tokens, hidden)
    check_ids(tokens, vocab_size)


def check_weights(weights: Tensor, hidden: Tensor) -> None:
    """Check that there is one floating-point weight for each token, without a gradient."""
    if weights.shape != hidden.shape[:-1] or not weights.is_floating_point():
        raise ShapeError(
            f"weights are {weights.dtype} of shape {tuple(weights.shape)} for tokens of shape "
            f"{tuple(hidden.shape[:-1])}; give a floating-point one for each token"
        )
    if weights.device != hidden.device:
        raise CannotRunError(
            f"weights are on {weights.device} and hidden states on {hidden.device}; move one of them"
        )
    if weights.requires_grad:
        raise CannotRunError(
            "the weights of a loss cannot require a gradient; detach them, or multiply linear_kl's values by them"
        )


def as_divergence(divergence: str | Divergence) -> Divergence:
    """The divergence of a name of ``DIVERGENCES``, or the record itself.

    Raises:
        UnknownNameError: if there is no such divergence.
    """
    return look_up(DIVERGENCES, divergence, "divergence") if isinstance(divergence, str) else divergence
