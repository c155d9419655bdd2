"""The public functions that return values per token: they check the arguments and call a backend."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kleash.arguments import validated_types
from kleash.autodiff import uncompiled
from kleash.divergences import Divergence
from kleash.errors import CannotRunError, OptionError
from kleash.linear import autograd
from kleash.linear.checks import (
    as_divergence,
    check_has_data,
    check_model,
    check_on_all_ranks,
    check_temperature,
    check_token_ids,
    check_transforms,
    checked_pair,
    flat_pair,
)
from kleash.linear.chunked import move_tokens
from kleash.linear.head import Head, gathered
from kleash.linear.head_storage import HeadStorage, all_gather_numbers
from kleash.linear.options import LinearOptions
from kleash.linear.pair import HeadInputs
from kleash.linear.products import logits, normalised
from kleash.linear.sharding import process_group, storage_group
from kleash.linear.types import StatisticsAndTop, TokenStatistics, TopTokens


@uncompiled
@validated_types
def linear_kl(
    hidden_p: Float[Tensor, "*tokens dim_p"],
    head_p: Head,
    hidden_q: Float[Tensor, "*tokens dim_q"],
    head_q: Head,
    *,
    temperature: float | Float[Tensor, "*tokens"] = 1.0,
    options: LinearOptions | None = None,
) -> Float[Tensor, "*tokens"]:
    """KL(p || q) in nats per token, where ``p = softmax(head_p(hidden_p) / temperature)``.

        KL(p || q) = sum_x p(x) phi(log p(x) - log q(x)),    phi(u) = expm1(-u) + u

    The average is over the first model, p. The sum is exact over the whole vocabulary; the logits of only a few
    tokens exist at a time. The result is differentiable once in the hidden states, weights and biases that require a
    gradient. If a weight or bias does, the backward pass computes the logits again; ``linear_kl_loss``, which takes
    the weights of the tokens, does not. If only hidden states do, their gradient is computed with the value.
    ``impl="reference"`` supports derivatives of every order, forward mode and the transforms of ``torch.func``; the
    other implementations refuse them. A token whose incoming gradient is 0 adds 0 to every gradient, even if its
    hidden states are NaN.

    All values of ``options.impl`` return the same number; they differ in memory and speed. Logits are float32, or
    float64 if any tensor is float64. The result is never negative, exactly 0 if both models have the same tensors,
    ``inf`` where p gives mass to tokens with probability 0 under q, and NaN for exactly the tokens whose hidden
    states contain NaN.

    Args:
        hidden_p: final hidden states under p, after the last norm.
        head_p: the head that maps them to logits.
        hidden_q: hidden states of the same tokens under q; their dimension may differ.
        head_q: the head for those; its vocabulary is that of head_p.
        temperature: divides the logits of both models; a number, or one for each token (whose values are not checked).
        options: implementation, memory, compilation.

    Returns:
        KL in nats for each token, float32 (or float64).

    Raises:
        ShapeError: if shapes do not match, or a tensor is not floating-point.
        VocabularyMismatchError: if the heads have vocabularies of different sizes.
        OptionError: if the temperature is not a positive number.
        CannotRunError: if tensors are on different devices, an option is unsupported or its dependency missing, or
            a second or forward-mode derivative is taken.
    """
    return linear_divergence(hidden_p, head_p, hidden_q, head_q, temperature=temperature, options=options)


@uncompiled
@validated_types
def linear_divergence(
    hidden_p: Float[Tensor, "*tokens dim_p"],
    head_p: Head,
    hidden_q: Float[Tensor, "*tokens dim_q"],
    head_q: Head,
    *,
    divergence: str | Divergence = "kl",
    temperature: float | Float[Tensor, "*tokens"] = 1.0,
    options: LinearOptions | None = None,
) -> Float[Tensor, "*tokens"]:
    """Any divergence D(p || q) of the table, per token, from hidden states; otherwise as ``linear_kl``.

    Args:
        hidden_p: final hidden states under p, after the last norm.
        head_p: the head that maps them to logits.
        hidden_q: hidden states of the same tokens under q.
        head_q: the head for those.
        divergence: a name of ``DIVERGENCES``, or a record: ``jensen_shannon_record(0.1)``,
            ``skew_kl_record``, ``alpha_record`` or your own.
        temperature: divides the logits of both models.
        options: implementation, memory, compilation.

    Raises:
        UnknownNameError: if there is no such divergence.
        ShapeError, VocabularyMismatchError, OptionError, CannotRunError: as ``linear_kl``.
    """
    record, options = as_divergence(divergence), options or LinearOptions()
    pair = checked_pair((hidden_p, head_p), (hidden_q, head_q), temperature)
    if not autograd.is_reference(pair, options):
        check_transforms("linear_divergence", (hidden_p, head_p), (hidden_q, head_q), temperature)
    with torch.autocast(hidden_p.device.type, enabled=False):
        values = autograd.divergence_values(pair, options, record)
    return values.reshape(hidden_p.shape[:-1])


@uncompiled
@validated_types
def token_statistics(
    hidden_p: Float[Tensor, "*tokens dim_p"],
    head_p: Head,
    hidden_q: Float[Tensor, "*tokens dim_q"],
    head_q: Head,
    tokens: Int[Tensor, "*tokens"],
    *,
    temperature: float | Float[Tensor, "*tokens"] = 1.0,
    options: LinearOptions | None = None,
) -> TokenStatistics:
    """The divergences, entropies, log-probabilities and ranks of each token, in one pass and without a gradient.

    KL(p || q), KL(q || p), Jensen-Shannon, total variation and both entropies over the whole vocabulary; the
    log-probability of the token under both models; the likeliest token of both with its probability; the token's
    rank under q. Definitions and edge cases are those of ``linear_kl``.

    Args:
        hidden_p: final hidden states under p, at the positions that predict the tokens.
        head_p: the head that maps them to logits.
        hidden_q: hidden states of the same positions under q.
        head_q: the head for those.
        tokens: the ids that follow these positions.
        temperature: divides the logits of both models.
        options: implementation, memory, compilation.

    Returns:
        A TokenStatistics of detached tensors with the shape of ``tokens``; float32 (or float64) and int64.

    Raises:
        ShapeError, OptionError, CannotRunError: as ``linear_kl``.
        VocabularyMismatchError: also if an id is outside the vocabulary.
    """
    check_transforms("token_statistics", (hidden_p, head_p), (hidden_q, head_q), temperature, tokens)
    return statistics_of(
        (hidden_p, head_p), (hidden_q, head_q), tokens, temperature, options, top=0
    ).statistics


@uncompiled
@validated_types
def token_statistics_and_top(
    hidden_p: Float[Tensor, "*tokens dim_p"],
    head_p: Head,
    hidden_q: Float[Tensor, "*tokens dim_q"],
    head_q: Head,
    tokens: Int[Tensor, "*tokens"],
    *,
    top: int,
    temperature: float | Float[Tensor, "*tokens"] = 1.0,
    options: LinearOptions | None = None,
) -> StatisticsAndTop:
    """``token_statistics``, and the ``top`` likeliest tokens of both models with their probabilities.

    Both come from the same logits, so that this takes a few percent longer than ``token_statistics`` alone.

    Args:
        hidden_p: final hidden states under p, at the positions that predict the tokens.
        head_p: the head that maps them to logits.
        hidden_q: hidden states of the same positions under q.
        head_q: the head for those.
        tokens: the ids that follow these positions.
        top: how many tokens of each model; at most the vocabulary's size.
        temperature: divides the logits of both models.
        options: implementation, memory, compilation.

    Raises:
        OptionError: if ``top`` is below 1; and as ``token_statistics``.
        CannotRunError, ShapeError, VocabularyMismatchError: as ``token_statistics``.
    """
    if top < 1:
        raise OptionError(f"top is {top}; ask for at least 1 token")
    check_transforms("token_statistics_and_top", (hidden_p, head_p), (hidden_q, head_q), temperature, tokens)
    return statistics_of((hidden_p, head_p), (hidden_q, head_q), tokens, temperature, options, top=top)


def statistics_of(
    p: tuple[Tensor, Head],
    q: tuple[Tensor, Head],
    tokens: Tensor,
    temperature: float | Tensor,
    options: LinearOptions | None,
    *,
    top: int,
) -> StatisticsAndTop:
    """The statistics and the ``top`` likeliest tokens, in the shape of ``tokens``."""
    hidden_p = p[0]
    with torch.no_grad():
        pair = checked_pair(p, q, temperature)
    with torch.no_grad(), torch.autocast(hidden_p.device.type, enabled=False):
        check_on_all_ranks(pair, lambda: check_token_ids(tokens, hidden_p, pair.vocab_size))
        flat = tokens.reshape(-1).to(torch.int64)
        computed = autograd.statistics(pair, options or LinearOptions(), flat, top)
    shaped = TokenStatistics(*(column.reshape(tokens.shape) for column in computed.statistics))
    top_p, top_q = (
        TopTokens(*(x.reshape(*tokens.shape, x.shape[-1]) for x in likeliest))
        for likeliest in (computed.top_p, computed.top_q)
    )
    return StatisticsAndTop(shaped, top_p, top_q)


@validated_types
def log_probabilities(
    hidden: Float[Tensor, "*tokens dim"],
    head: Head,
    *,
    temperature: float | Float[Tensor, "*tokens"] = 1.0,
) -> Float[Tensor, "*tokens vocab"]:
    """Natural log-probabilities of the whole vocabulary: ``log_softmax(head(hidden) / temperature)``.

    The result holds the whole vocabulary for every token, so this is meant for few tokens. Of a head whose rows are on
    several ranks, the logits are exchanged and not the rows, unless a gradient is needed.

    Args:
        hidden: final hidden states, after the last norm.
        head: the head that maps them to logits.
        temperature: divides the logits.

    Returns:
        float32 (or float64, if any tensor is float64).

    Raises:
        ShapeError, OptionError: as ``linear_kl``.
        CannotRunError: as ``linear_kl``; if a gradient is needed of a head with a ``vocabulary_group``.
    """
    tensors = (hidden, head.weight, head.bias)
    trained = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    if head.vocabulary_group is not None:
        if trained:
            raise CannotRunError(
                "log_probabilities of a head that is split over a vocabulary_group has no gradient; call it under "
                "torch.no_grad(), or take linear_kl"
            )
        model = shared_rows_as_logits(hidden, head, temperature)
    elif storage_group(head.weight) is not None and not trained:
        model = stored_rows_as_logits(hidden, head, temperature)
    else:
        head, _ = gathered(head, head)
        check_temperature(temperature, hidden)
        check_model("the model", hidden, head)
        check_has_data(hidden)
        model = flat_pair((hidden, head), (hidden, head), temperature).p
    with torch.autocast(hidden.device.type, enabled=False):
        values = normalised(logits(model))
        return values.reshape(*hidden.shape[:-1], values.shape[-1])


def shared_rows_as_logits(hidden: Tensor, head: Head, temperature: float | Tensor) -> HeadInputs:
    """The logits of the same tokens on all ranks of a ``vocabulary_group``, from the rows of each of them."""
    head, _ = gathered(head, head)
    pair = checked_pair((hidden, head), (hidden, head), temperature)
    ranks = process_group(head.vocabulary_group)
    rows = all_gather_numbers(ranks, hidden.device, [pair.local_vocab_size])[0]
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        columns = HeadStorage(ranks, rows, hidden.device).gather_tokens(logits(pair.p).T.contiguous(), rows).T
    return HeadInputs(hidden=columns, head=Head(None), temperature=1.0, dtype=pair.dtype)


def stored_logits(hidden: Float[Tensor, "*tokens dim"], head: Head) -> Float[Tensor, "*tokens vocab"]:
    """All logits of this rank's tokens, in at least float32 and without a gradient.

    Args:
        hidden: final hidden states, also of no token.
        head: whose rows are on several ranks, which all call this; with a ``vocabulary_group``, with the same tokens.
    """
    is_shared = head.vocabulary_group is not None
    values = logits((shared_rows_as_logits if is_shared else stored_rows_as_logits)(hidden, head, 1.0))
    return values.reshape(*hidden.shape[:-1], values.shape[-1])


def stored_rows_as_logits(hidden: Tensor, head: Head, temperature: float | Tensor) -> HeadInputs:
    """The logits of this rank's tokens, from a head whose rows are stored on several ranks: the tokens move there.

    They move a few at a time, so that no message has more than a quarter of the head's numbers.
    """
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        pair = checked_pair((hidden, head), (hidden, head), temperature)
        storage, size = pair.storage, max(1, hidden.shape[-1] // 4)
        assert storage is not None, "the rows are stored on several ranks"
        counts = storage.all_gather_numbers(pair.tokens)[0]
        size = max(1, size // len(counts))
        parts = [pair.p.hidden.new_zeros((0, pair.vocab_size), dtype=pair.dtype)]
        for start in range(0, max(counts), size):
            some = [max(0, min(size, count - start)) for count in counts]
            moved = move_tokens(pair.select(slice(start, start + size)), some).p
            parts.append(storage.exchange_columns(logits(moved), some))
    return HeadInputs(hidden=torch.cat(parts), head=Head(None), temperature=1.0, dtype=pair.dtype)
