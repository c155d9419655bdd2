"""Checks of arguments beyond their dtypes and shapes, and the ``HeadPair`` that they are turned into."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kleash.autodiff import refuse_transforms
from kleash.errors import CannotRunError, OptionError, ShapeError, VocabularyMismatchError
from kleash.linear.head import Head, full_tensor, local_rows, process_group, ranks_of, storage_group
from kleash.linear.pair import HeadInputs, HeadPair
from kleash.linear.vocab_shards import VocabShards, all_gather_numbers
from kleash.registry import require_above

ALTERNATIVE = "take linear_divergence with impl='reference', or the functions of kleash.divergences"
UNSHARDED = -1
"""The number of rows that stands for a head that is whole on each rank."""
Side = tuple[Tensor, Head]
"""Hidden states and head of one model."""


def checked_pair(p: Side, q: Side, temperature: float | Float[Tensor, "*tokens"]) -> HeadPair:
    """Both models with their tokens flattened, and with the rows of the heads that this rank has.

    Raises:
        ShapeError, VocabularyMismatchError, OptionError, CannotRunError: if the arguments do not fit together.
    """
    if isinstance(temperature, Tensor):  # whose values are checked by flat_pair
        check_constant("a temperature", temperature, "take the functions of kleash.divergences")
    else:
        require_above(0.0, temperature=temperature)
    stored_on = group_of_storage(p[1], q[1])
    groups = [
        process_group(head.vocabulary_group) if stored_on is None else storage_group(head.weight)
        for _, head in (p, q)
    ]
    heads = with_plain_tensors((p[1], q[1]), groups)
    sides = [(p[0], heads[0]), (q[0], heads[1])]
    for name, side in zip("pq", sides, strict=True):
        check_model(name, *side)
    group = common_group(*groups)
    vocab_shards = agreed_shards(group, sides, groups, temperature, has_own_tokens=stored_on is not None)
    if group is not None:
        sides = [
            side if part is not None else local_part(name, *side, vocab_shards)
            for name, side, part in zip("pq", sides, groups, strict=True)
        ]
    check_vocab_sizes(*(head.vocabulary(hidden) for hidden, head in sides))
    if not vocab_shards.vocab_size:
        raise ShapeError("the heads cover no token at all")
    return flat_pair(sides[0], sides[1], temperature, vocab_shards)


def flat_pair(p: Side, q: Side, temperature: float | Tensor, vocab_shards: VocabShards) -> HeadPair:
    """Both models with their tokens flattened, from arguments that have been checked."""
    (hidden_p, head_p), (hidden_q, head_q) = p, q
    dtype = common_dtype((hidden_p, head_p.weight, head_p.bias, hidden_q, head_q.weight, head_q.bias))
    flat_p = hidden_p.reshape(-1, hidden_p.shape[-1])
    flat_q = flat_p if hidden_q is hidden_p else hidden_q.reshape(-1, hidden_q.shape[-1])
    # A copy, since the backward pass reads it again; NaN where a number would be refused, which a GPU would wait for.
    divisor = (
        torch.where((temperature > 0) & temperature.isfinite(), temperature, torch.nan).reshape(-1).to(dtype)
        if isinstance(temperature, Tensor)
        else float(temperature)
    )
    model_p, model_q = (
        HeadInputs(hidden=hidden, head=head, temperature=divisor, dtype=dtype)
        for hidden, head in ((flat_p, head_p), (flat_q, head_q))
    )
    return HeadPair(p=model_p, q=model_q, vocab_shards=vocab_shards)


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


def with_plain_tensors(heads: tuple[Head, Head], groups: Sequence[Any]) -> list[Head]:
    """Both heads without DTensors: of rows on a group of ranks this rank's, of others all; shared ones stay shared."""
    plain: dict[tuple[int, bool], Tensor] = {}

    def converted(x: Tensor | None, group: Any) -> Tensor | None:
        key = id(x), group is None
        if x is not None and key not in plain:
            plain[key] = full_tensor(x) if group is None else local_rows(x, group)
        return plain.get(key)

    return [
        replace(head, weight=converted(head.weight, group), bias=converted(head.bias, group))
        for head, group in zip(heads, groups, strict=True)
    ]


def common_group(group_p: Any, group_q: Any) -> Any:
    """The process group of two heads, either of which may have none; None if neither has one.

    Raises:
        OptionError: if the two are split over different ranks.
    """
    if group_p is None or group_q is None or group_p is group_q:
        return group_q if group_p is None else group_p
    ranks_p, ranks_q = ranks_of(group_p), ranks_of(group_q)
    if ranks_p != ranks_q:
        raise OptionError(
            f"p's head is split over ranks {ranks_p} and q's over {ranks_q}; split both over the same ranks, or leave "
            "a frozen one whole"
        )
    return group_p


def agreed_shards(
    group: Any,
    sides: Sequence[Side],
    groups: Sequence[Any],
    temperature: float | Tensor,
    *,
    has_own_tokens: bool,
) -> VocabShards:
    """The vocabulary on the ranks of a group, once it is known that what they must have in common is.

    Args:
        group: the ranks; None for this process alone.
        sides: hidden states of p and of q with this rank's head.
        groups: the group of p's head and of q's; None for one that is whole.
        temperature: of the call.
        has_own_tokens: whether the ranks have different tokens.

    Raises:
        VocabularyMismatchError: if the rows of the two heads are divided in different ways.
        CannotRunError: if the ranks have other arguments.
    """
    (hidden_p, head_p), (hidden_q, _) = sides
    if group is None:
        return VocabShards(None, [head_p.vocabulary(hidden_p)], hidden_p.device)
    tensors = [x for hidden, head in sides for x in (hidden, head.weight, head.bias)]
    needed = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in tensors]
    common = {
        "bytes a number of the hidden states": hidden_p.itemsize + 16 * hidden_q.itemsize,
        "bytes a logit": common_dtype(tensors).itemsize,
        "tensors that require a gradient": sum(flag << bit for bit, flag in enumerate(needed)),
        "temperature": -1 if isinstance(temperature, Tensor) else hash(temperature),
    }
    rows = [
        UNSHARDED if part is None else head.vocabulary(hidden)
        for (hidden, head), part in zip(sides, groups, strict=True)
    ]
    rows_p, rows_q, *compared = all_gather_numbers(group, hidden_p.device, [*rows, *common.values()])
    for name, numbers in zip(common, compared, strict=True):
        if len(set(numbers)) > 1:
            raise CannotRunError(
                f"the ranks that have the rows of a head disagree on the {name}; give all of them the same"
            )
    sharded = [numbers for numbers in (rows_p, rows_q) if set(numbers) != {UNSHARDED}]
    if sharded[0] != sharded[-1]:
        raise VocabularyMismatchError(
            f"the ranks have {rows_p} rows of p's head and {rows_q} of q's, where {UNSHARDED} is a head that is "
            "whole; split both after the same tokens"
        )
    return VocabShards(group, sharded[0], hidden_p.device, has_own_tokens=has_own_tokens)


def local_part(name: str, hidden: Tensor, head: Head, vocab_shards: VocabShards) -> Side:
    """Of a head that is whole, the rows that this rank has of the other head.

    Raises:
        VocabularyMismatchError: if its vocabulary is not that of the other head.
        CannotRunError: if it requires a gradient, which each rank would compute for its rows only.
    """
    check_vocab_sizes(head.vocabulary(hidden), vocab_shards.vocab_size)
    has_trained_logits = head.weight is None and hidden.requires_grad and torch.is_grad_enabled()
    if is_trained(head) or has_trained_logits:
        raise CannotRunError(
            f"the head of {name} is whole and requires a gradient, of which each rank would compute "
            f"{vocab_shards.local_size} of {vocab_shards.vocab_size} rows; split it over the vocabulary_group, too, or "
            "detach it"
        )
    rows = vocab_shards.local_rows
    weight, bias = (None if x is None else x[rows] for x in (head.weight, head.bias))
    return hidden[..., rows] if weight is None else hidden, replace(head, weight=weight, bias=bias)


def check_transforms(name: str, p: Side, q: Side, *more: object, inside: bool = True) -> None:
    """Refuse tensors of forward mode or of ``torch.func``, whose derivatives would silently be 0."""
    (hidden_p, head_p), (hidden_q, head_q) = p, q
    tensors = (hidden_p, head_p.weight, head_p.bias, hidden_q, head_q.weight, head_q.bias, *more)
    refuse_transforms(name, ALTERNATIVE, *(x for x in tensors if isinstance(x, Tensor)), inside=inside)


def common_dtype(tensors: Sequence[Tensor | None]) -> torch.dtype:
    """float64 if any tensor is float64, else float32."""
    wide = any(tensor is not None and tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if wide else torch.float32


def check_constant(name: str, tensor: Tensor, alternative: str) -> None:
    """Refuse a tensor that requires a gradient where none is computed, with what gives one."""
    if tensor.requires_grad:
        raise CannotRunError(f"{name} cannot require a gradient; detach it, or {alternative}")


def check_model(name: str, hidden: Tensor, head: Head) -> None:
    """Check that hidden states are of this rank and on a device with float64, and that a head there takes them."""
    if hasattr(hidden, "placements"):
        raise CannotRunError(
            f"hidden states of {name} are a DTensor; give this rank's by to_local(), or with a vocabulary_group all by "
            "full_tensor()"
        )
    width = hidden.shape[-1]
    if hidden.device.type == "mps":
        raise CannotRunError(
            "mps has no float64, in which kleash sums; compute on the CPU, and train with use_cpu=True"
        )
    # torch.mm(..., out=...) writes nothing, and raises no error, if one factor is on meta, as offloaded weights are.
    devices = {str(x.device) for x in (hidden, head.weight, head.bias) if x is not None}
    if len(devices) > 1:
        raise CannotRunError(
            f"hidden states of {name} and its head are on {' and '.join(sorted(devices))}; move one of them"
        )
    if head.weight is not None and head.weight.shape[1] != width:
        raise ShapeError(
            f"hidden states of {name} have {width} dimensions and its head {head.weight.shape[1]}"
        )
    if head.weight is None and head.bias is not None and len(head.bias) != width:
        raise ShapeError(f"logits of {name} cover {width} tokens and its head's bias {len(head.bias)}")


def check_vocab_sizes(vocab_size_p: int, vocab_size_q: int) -> None:
    """Check that both heads have vocabularies of the same size."""
    if vocab_size_p != vocab_size_q:
        raise VocabularyMismatchError(
            f"one head covers {vocab_size_p} tokens and the other {vocab_size_q}; cut the rows that are padding, or "
            "project one onto the other's vocabulary"
        )


def check_ids(tokens: Tensor, vocab_size: int) -> None:
    """Check that all ids are in the vocabulary."""
    least, most = (int(end) for end in tokens.aminmax()) if tokens.numel() else (0, 0)
    if least < 0 or most >= vocab_size:
        raise VocabularyMismatchError(
            f"token ids run from {least} to {most} and the heads cover {vocab_size}; give ids from 0 to "
            f"{vocab_size - 1}, also where a token is masked"
        )
