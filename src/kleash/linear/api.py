"""The public doors: they check what they are given, and choose who computes it."""

from collections.abc import Sequence
from importlib import import_module
from math import isfinite
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kleash.errors import CannotRunError, OptionError, ShapeError, VocabularyMismatchError
from kleash.linear.head import Head, gathered
from kleash.linear.impl.pair import OneModel, Pair
from kleash.linear.impl.project import logits
from kleash.linear.impl.reference import normalised
from kleash.linear.options import LinearOptions
from kleash.linear.statistics import TokenStatistics


def linear_kl(
    hidden_p: Float[Tensor, "*tokens dim_p"],
    head_p: Head,
    hidden_q: Float[Tensor, "*tokens dim_q"],
    head_q: Head,
    *,
    temperature: float = 1.0,
    options: LinearOptions | None = None,
) -> Float[Tensor, "*tokens"]:
    """KL(p || q) in nats per token, where ``p = softmax(head_p(hidden_p) / temperature)``.

        KL(p || q) = sum_x p(x) phi(log p(x) - log q(x)),    phi(u) = expm1(-u) + u

    The first model is the one averaged over. Exact over the whole vocabulary, of which the logits of
    a few tokens exist at a time. Differentiable once in whatever requires a gradient: hidden states,
    weights, biases; the backward pass computes the logits again. A token whose incoming gradient is 0
    contributes 0, whatever its hidden states hold.

    Every ``options.impl`` means the same number; they differ in memory and speed. Logits are float32
    whatever the dtype of what is given, float64 if any of it is. Never negative; exactly 0 for the
    same tensors on both sides; ``inf`` where p has mass on tokens that q forbids; NaN for a token
    whose hidden states hold NaN, and for no other.

    Args:
        hidden_p: final hidden states under p, after the last norm.
        head_p: the head that makes them logits.
        hidden_q: hidden states of the same tokens under q; their dimension may differ.
        head_q: the head for those; it covers the same tokens as head_p.
        temperature: divides the logits of both.
        options: implementation, memory, compilation.

    Returns:
        A number for each token, float32 (or float64).

    Raises:
        ShapeError: if shapes do not fit together, or something is not floating-point.
        VocabularyMismatchError: if the heads cover different numbers of tokens.
        OptionError: if the temperature is not a positive number.
        CannotRunError: if tensors are on different devices, the options ask for what is not there, or
            a second derivative is asked for.
    """
    pair = checked_pair((hidden_p, head_p), (hidden_q, head_q), temperature)
    with torch.autocast(hidden_p.device.type, enabled=False):
        found = implementation(options).linear_kl(pair, options or LinearOptions())
    return found.reshape(hidden_p.shape[:-1])


def token_statistics(
    hidden_p: Float[Tensor, "*tokens dim_p"],
    head_p: Head,
    hidden_q: Float[Tensor, "*tokens dim_q"],
    head_q: Head,
    tokens: Int[Tensor, "*tokens"],
    *,
    temperature: float = 1.0,
    options: LinearOptions | None = None,
) -> TokenStatistics:
    """All that a measurement wants to know about each token, in one pass and without a gradient.

    KL(p || q), KL(q || p), Jensen-Shannon, total variation and both entropies over the whole
    vocabulary; log-probability of the token under both; the likeliest token of both with its
    probability; the token's rank under q. Meaning and edge cases as in ``linear_kl``.

    Args:
        hidden_p: final hidden states under p, at the positions that predict the tokens.
        head_p: the head that makes them logits.
        hidden_q: hidden states of the same positions under q.
        head_q: the head for those.
        tokens: the ids that follow.
        temperature: divides the logits of both.
        options: implementation, memory, compilation.

    Returns:
        A TokenStatistics of detached tensors shaped like ``tokens``; float32 (or float64) and int64.

    Raises:
        ShapeError, OptionError, CannotRunError: as ``linear_kl``.
        VocabularyMismatchError: also if an id is outside the vocabulary.
    """
    with torch.no_grad(), torch.autocast(hidden_p.device.type, enabled=False):
        pair = checked_pair((hidden_p, head_p), (hidden_q, head_q), temperature)
        check_tokens(tokens, hidden_p, pair.p.vocabulary)
        flat = tokens.reshape(-1).to(torch.int64)
        found = implementation(options).token_statistics(pair, flat, options or LinearOptions())
    return TokenStatistics(*(numbers.reshape(tokens.shape) for numbers in found))


def log_probabilities(
    hidden: Float[Tensor, "*tokens dim"], head: Head, *, temperature: float = 1.0
) -> Float[Tensor, "*tokens vocab"]:
    """Natural log-probabilities of the whole vocabulary: ``log_softmax(head(hidden) / temperature)``.

    Holds all of them, so it is meant for few tokens: to draw the next one, to list the likeliest.

    Args:
        hidden: final hidden states, after the last norm.
        head: the head that makes them logits.
        temperature: divides the logits.

    Returns:
        float32 (or float64, if anything given is).

    Raises:
        ShapeError, OptionError, CannotRunError: as ``linear_kl``.
    """
    head = gathered(head)
    check_temperature(temperature)
    check_side("the model", hidden, head)
    dtype = common_dtype((hidden, head.weight, head.bias))
    with torch.autocast(hidden.device.type, enabled=False):
        return normalised(logits(OneModel(hidden=hidden, head=head, temperature=temperature, dtype=dtype)))


def implementation(options: LinearOptions | None) -> Any:
    """The module that was asked for."""
    name = (options or LinearOptions()).impl
    return import_module(f"kleash.linear.impl.{'chunked' if name == 'auto' else name}")


def checked_pair(p: tuple[Tensor, Head], q: tuple[Tensor, Head], temperature: float) -> Pair:
    """Both sides with their tokens in a row, if they fit together."""
    (hidden_p, head_p), (hidden_q, head_q) = p, q
    head_p, head_q = gathered(head_p), gathered(head_q)
    check_temperature(temperature)
    check_side("p", hidden_p, head_p)
    check_side("q", hidden_q, head_q)
    check_fit(hidden_p, head_p, hidden_q, head_q)
    dtype = common_dtype((hidden_p, head_p.weight, head_p.bias, hidden_q, head_q.weight, head_q.bias))
    flat_p = hidden_p.reshape(-1, hidden_p.shape[-1])
    flat_q = flat_p if hidden_q is hidden_p else hidden_q.reshape(-1, hidden_q.shape[-1])
    return Pair(
        p=OneModel(hidden=flat_p, head=head_p, temperature=temperature, dtype=dtype),
        q=OneModel(hidden=flat_q, head=head_q, temperature=temperature, dtype=dtype),
    )


def common_dtype(tensors: Sequence[Tensor | None]) -> torch.dtype:
    """float64 if any of them is, else float32."""
    wide = any(tensor is not None and tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if wide else torch.float32


def check_temperature(temperature: float) -> None:
    """Refuse what logits cannot be divided by."""
    if not (isfinite(temperature) and temperature > 0):
        raise OptionError(f"a temperature is a positive number, not {temperature}")


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
    if head.vocabulary(hidden) == 0:
        raise ShapeError(f"the head of {name} covers no token at all")


def check_fit(hidden_p: Tensor, head_p: Head, hidden_q: Tensor, head_q: Head) -> None:
    """Refuse two sides that are not about the same tokens of the same vocabulary."""
    if hidden_p.shape[:-1] != hidden_q.shape[:-1]:
        raise ShapeError(
            f"hidden states are of {tuple(hidden_p.shape[:-1])} tokens under p and "
            f"{tuple(hidden_q.shape[:-1])} under q; give both models the same tokens"
        )
    words_p, words_q = head_p.vocabulary(hidden_p), head_q.vocabulary(hidden_q)
    if words_p != words_q:
        raise VocabularyMismatchError(
            f"the head of p covers {words_p} tokens and that of q {words_q}; cut the rows that are padding, "
            "or project one onto the other's vocabulary"
        )
    if hidden_p.device != hidden_q.device:
        raise CannotRunError(f"p is on {hidden_p.device} and q on {hidden_q.device}; move one of them")


def check_tokens(tokens: Tensor, hidden: Tensor, words: int) -> None:
    """Refuse ids that are not one for each hidden state, or not in the vocabulary."""
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
    if tokens.numel() == 0:
        return
    least, most = int(tokens.min()), int(tokens.max())
    if least < 0 or most >= words:
        raise VocabularyMismatchError(
            f"token ids run from {least} to {most} and the heads cover {words}: ids from 0 to {words - 1}"
        )
