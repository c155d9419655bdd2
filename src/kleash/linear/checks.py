"""What the public doors refuse, and what they make of the rest."""

from collections.abc import Sequence
from dataclasses import replace
from math import isfinite
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kleash.autodiff import refuse_transforms
from kleash.errors import CannotRunError, KleashError, OptionError, ShapeError, VocabularyMismatchError
from kleash.linear.head import Head, gathered
from kleash.linear.impl.pair import HeadInputs, HeadPair
from kleash.linear.impl.vocab_shards import LOCAL_VOCAB, LocalVocab, ShardedVocab
from kleash.linear.sharding import WHOLE, common_group, exchange_specs

INSTEAD = "take linear_divergence with impl='reference', uncompiled, or the functions of kleash.divergences"


def checked_pair(
    p: tuple[Tensor, Head], q: tuple[Tensor, Head], temperature: float | Float[Tensor, "*tokens"]
) -> HeadPair:
    """Both sides with their tokens in a row, if they fit together."""
    (hidden_p, head_p), (hidden_q, head_q) = p, q
    head_p, head_q = gathered(head_p, head_q)
    group = common_group(head_p.vocabulary_group, head_q.vocabulary_group)
    across: LocalVocab = LOCAL_VOCAB
    if group is None:
        check_each((hidden_p, head_p), (hidden_q, head_q), temperature)
    else:
        across = over_ranks(group, (hidden_p, head_p), (hidden_q, head_q), temperature)
        hidden_p, head_p = part("p", hidden_p, head_p, across)
        hidden_q, head_q = part("q", hidden_q, head_q, across)
    check_words(head_p.vocabulary(hidden_p), head_q.vocabulary(hidden_q))
    dtype = common_dtype((hidden_p, head_p.weight, head_p.bias, hidden_q, head_q.weight, head_q.bias))
    flat_p = hidden_p.reshape(-1, hidden_p.shape[-1])
    flat_q = flat_p if hidden_q is hidden_p else hidden_q.reshape(-1, hidden_q.shape[-1])
    divisor = in_a_row(temperature, dtype)
    return HeadPair(
        p=HeadInputs(hidden=flat_p, head=head_p, temperature=divisor, dtype=dtype, across=across),
        q=HeadInputs(hidden=flat_q, head=head_q, temperature=divisor, dtype=dtype, across=across),
    )


def check_each(p: tuple[Tensor, Head], q: tuple[Tensor, Head], temperature: float | Tensor) -> None:
    """Refuse either side by itself, or hidden states that are not of the same tokens."""
    check_temperature(temperature, p[0])
    check_side("p", *p)
    check_side("q", *q)
    check_fit(p[0], q[0])
    check_numbers(p[0])


def over_ranks(
    group: Any, p: tuple[Tensor, Head], q: tuple[Tensor, Head], temperature: float | Tensor
) -> ShardedVocab:
    """The ranks that p's head or q's is split over, if all of them were given what fits together."""
    problem, facts = None, [0, 0, 0, 0, 0]
    try:
        check_each(p, q, temperature)
        tensors = [x for hidden, head in (p, q) for x in (hidden, head.weight, head.bias)]
        needed = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in tensors]
        facts = [
            *(WHOLE if head.vocabulary_group is None else head.vocabulary(hidden) for hidden, head in (p, q)),
            p[0].numel() // max(1, p[0].shape[-1]),
            common_dtype(tensors).itemsize,
            sum(needs << n for n, needs in enumerate(needed)),
        ]
    except KleashError as error:
        problem = error
    return exchange_specs(group, p[0].device, facts, problem)


def part(name: str, hidden: Tensor, head: Head, across: ShardedVocab) -> tuple[Tensor, Head]:
    """A side as it is, or, if it is whole, the words of it that this rank has of the other."""
    if head.vocabulary_group is not None:
        return hidden, head
    check_words_of(name, head.vocabulary(hidden), across)
    trained = (hidden, head.bias) if head.weight is None else (head.weight, head.bias)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in trained):
        raise CannotRunError(
            f"the head of {name} is whole and requires a gradient, of which each rank would form its own "
            f"{across.here} of {across.vocab_size} rows; split it over the vocabulary_group, too, or detach it"
        )
    words = slice(across.offset, across.offset + across.here)
    weight = None if head.weight is None else head.weight[words]
    bias = None if head.bias is None else head.bias[words]
    return hidden[..., words] if weight is None else hidden, replace(head, weight=weight, bias=bias)


def in_a_row(temperature: float | Tensor, dtype: torch.dtype) -> float | Tensor:
    """A number, or one for each token: a copy, since a backward pass to come reads it again."""
    if not isinstance(temperature, Tensor):
        return float(temperature)
    return temperature.reshape(-1).to(dtype, copy=True)


def check_transforms(
    name: str, p: tuple[Tensor, Head], q: tuple[Tensor, Head], *others: object, inside: bool = True
) -> None:
    """Refuse tensors of forward mode or of ``torch.func``, whose derivatives would be 0 in silence."""
    (hidden_p, head_p), (hidden_q, head_q) = p, q
    tensors = (hidden_p, head_p.weight, head_p.bias, hidden_q, head_q.weight, head_q.bias, *others)
    refuse_transforms(name, INSTEAD, *(x for x in tensors if isinstance(x, Tensor)), inside=inside)


def common_dtype(tensors: Sequence[Tensor | None]) -> torch.dtype:
    """float64 if any of them is, else float32."""
    wide = any(tensor is not None and tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if wide else torch.float32


def check_temperature(temperature: float | Tensor, hidden: Tensor) -> None:
    """Refuse what logits cannot be divided by; the values of a tensor are the caller's."""
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
        raise CannotRunError("a temperature gets no gradient here; detach it")


def check_side(name: str, hidden: Tensor, head: Head) -> None:
    """Refuse hidden states that are not for this head."""
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
    if head.vocabulary(hidden) == 0 and head.vocabulary_group is None:
        raise ShapeError(f"the head of {name} covers no token at all")


def check_numbers(hidden: Tensor) -> None:
    """Refuse hidden states without numbers."""
    if hidden.device.type == "meta":
        raise CannotRunError("hidden states are on the meta device and hold no numbers; give some that do")


def check_fit(hidden_p: Tensor, hidden_q: Tensor) -> None:
    """Refuse two sides that are not about the same tokens."""
    if hidden_p.shape[:-1] != hidden_q.shape[:-1]:
        raise ShapeError(
            f"hidden states are of {tuple(hidden_p.shape[:-1])} tokens under p and "
            f"{tuple(hidden_q.shape[:-1])} under q; give both models the same tokens"
        )
    if hidden_p.device != hidden_q.device:
        raise CannotRunError(f"p is on {hidden_p.device} and q on {hidden_q.device}; move one of them")


def check_words(words_p: int, words_q: int) -> None:
    """Refuse two vocabularies."""
    if words_p != words_q:
        raise VocabularyMismatchError(
            f"the head of p covers {words_p} tokens and that of q {words_q}; cut the rows that are padding, "
            "or project one onto the other's vocabulary"
        )


def check_words_of(name: str, words: int, across: ShardedVocab) -> None:
    """Refuse a whole head that covers another vocabulary than one that is split."""
    if words != across.vocab_size:
        raise VocabularyMismatchError(
            f"the head of {name} is whole and covers {words} tokens, and the ranks of the other's vocabulary_group "
            f"hold {across.vocab_size} rows together; give it the vocabulary_group if it is split, too"
        )


def check_tokens(tokens: Tensor, hidden: Tensor) -> None:
    """Refuse ids that are not one for each hidden state."""
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


def check_ids(tokens: Tensor, words: int) -> None:
    """Refuse ids that are not in the vocabulary."""
    if tokens.numel() == 0:
        return
    least, most = int(tokens.min()), int(tokens.max())
    if least < 0 or most >= words:
        raise VocabularyMismatchError(
            f"token ids run from {least} to {most} and the heads cover {words}: ids from 0 to {words - 1}"
        )
