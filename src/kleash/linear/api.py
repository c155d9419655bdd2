"""The public doors to values: they check what they are given, and choose who computes it."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kleash.arguments import validated_types
from kleash.autodiff import uncompiled_in_transforms
from kleash.divergences import DIVERGENCES, Divergence
from kleash.errors import CannotRunError, OptionError
from kleash.linear import autograd
from kleash.linear.checks import (
    check_ids,
    check_numbers,
    check_side,
    check_temperature,
    check_tokens,
    check_transforms,
    checked_pair,
    common_dtype,
    in_a_row,
)
from kleash.linear.head import Head, gathered
from kleash.linear.impl.buffer import with_buffer
from kleash.linear.impl.choice import implementation
from kleash.linear.impl.pair import HeadInputs
from kleash.linear.impl.project import logits, normalised
from kleash.linear.impl.vocab_shards import LOCAL_VOCAB
from kleash.linear.options import LinearOptions
from kleash.linear.statistics import StatisticsAndTop, TokenStatistics, TopTokens
from kleash.registry import look_up


@uncompiled_in_transforms
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

    The first model is the one averaged over. Exact over the whole vocabulary, of which the logits of
    a few tokens exist at a time. Differentiable once in whatever requires a gradient: hidden states,
    weights, biases. If a weight or bias does, the backward pass computes the logits again (use
    ``linear_kl_loss`` where the weights of the tokens are known beforehand: it does not); if only hidden
    states do, their gradient is formed along with the value. With ``impl="reference"`` it has derivatives of every
    order, forward mode and the transforms of ``torch.func``, all of which the others refuse. A token whose
    incoming gradient is 0 contributes 0, whatever its hidden states hold.

    Every ``options.impl`` means the same number; they differ in memory and speed. Logits are float32
    whatever the dtype of what is given, float64 if any of it is. Never negative; exactly 0 for the
    same tensors on both sides; ``inf`` where p has mass on tokens that q forbids; NaN for a token
    whose hidden states hold NaN, and for no other.

    Args:
        hidden_p: final hidden states under p, after the last norm.
        head_p: the head that makes them logits.
        hidden_q: hidden states of the same tokens under q; their dimension may differ.
        head_q: the head for those; it covers the same tokens as head_p.
        temperature: divides the logits of both; a number, or one for each token (whose values are not checked).
        options: implementation, memory, compilation.

    Returns:
        A number for each token, float32 (or float64).

    Raises:
        ShapeError: if shapes do not fit together, or something is not floating-point.
        VocabularyMismatchError: if the heads cover different numbers of tokens.
        OptionError: if the temperature is not a positive number.
        CannotRunError: if tensors are on different devices, the options ask for what is not there, or
            a second or forward-mode derivative is asked for.
    """
    return linear_divergence(hidden_p, head_p, hidden_q, head_q, temperature=temperature, options=options)


@uncompiled_in_transforms
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
        head_p: the head that makes them logits.
        hidden_q: hidden states of the same tokens under q.
        head_q: the head for those.
        divergence: a name of ``DIVERGENCES``, or a record: ``jensen_shannon_record(0.1)``,
            ``skew_kl_record``, ``alpha_record`` ... or your own.
        temperature: divides the logits of both.
        options: implementation, memory, compilation.

    Raises:
        UnknownNameError: if there is no such divergence.
        ShapeError, VocabularyMismatchError, OptionError, CannotRunError: as ``linear_kl``.
    """
    if torch.compiler.is_compiling():
        from kleash.linear import ops

        x = ops.given((hidden_p, head_p), (hidden_q, head_q), temperature, options)
        return ops.linear_divergence(*x, ops.named(divergence))
    record = as_record(divergence)
    pair = checked_pair((hidden_p, head_p), (hidden_q, head_q), temperature)
    options = with_buffer(options or LinearOptions(), pair)
    if options.impl != "reference" or pair.across is not LOCAL_VOCAB:
        check_transforms("linear_divergence", (hidden_p, head_p), (hidden_q, head_q), temperature)
    engine = implementation(options, pair, record)
    with torch.autocast(hidden_p.device.type, enabled=False):
        if options.impl == "reference" or not autograd.wanted(pair):
            found = engine.divergence(pair, record, options)
        else:
            found = autograd.differentiable(engine, pair, record, options)
    return found.reshape(hidden_p.shape[:-1])


@uncompiled_in_transforms
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
    if torch.compiler.is_compiling():
        from kleash.linear import ops

        x = ops.given((hidden_p, head_p), (hidden_q, head_q), temperature, options)
        return TokenStatistics(
            *ops.token_statistics(*(t.detach() if isinstance(t, Tensor) else t for t in x), tokens)
        )
    check_transforms("token_statistics", (hidden_p, head_p), (hidden_q, head_q), temperature, tokens)
    with torch.no_grad():
        pair = checked_pair((hidden_p, head_p), (hidden_q, head_q), temperature)
    with torch.no_grad(), torch.autocast(hidden_p.device.type, enabled=False):
        check_tokens(tokens, hidden_p)
        check_ids(tokens, pair.words)
        flat = tokens.reshape(-1).to(torch.int64)
        options = with_buffer(options or LinearOptions(), pair)
        found = implementation(options, pair).token_statistics(pair, flat, options)
    return TokenStatistics(*(numbers.reshape(tokens.shape) for numbers in found))


@uncompiled_in_transforms
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

    The logits that the statistics are made of are looked at once more while they are there, so that this costs a few
    hundredths more than ``token_statistics`` alone.

    Args:
        hidden_p: as in ``token_statistics``, and so the others.
        head_p: the head that makes them logits.
        hidden_q: hidden states of the same positions under q.
        head_q: the head for those.
        tokens: the ids that follow.
        top: how many; at most the vocabulary's size are given.
        temperature: divides the logits of both.
        options: implementation, memory, compilation.

    Raises:
        OptionError: if ``top`` is below 1; and as ``token_statistics``.
        CannotRunError: if a head is split over a ``vocabulary_group``; and as ``token_statistics``.
        ShapeError, VocabularyMismatchError: as ``token_statistics``.
    """
    if top < 1:
        raise OptionError(f"top is {top}; ask for at least 1 token")
    check_transforms("token_statistics_and_top", (hidden_p, head_p), (hidden_q, head_q), temperature, tokens)
    with torch.no_grad(), torch.autocast(hidden_p.device.type, enabled=False):
        pair = checked_pair((hidden_p, head_p), (hidden_q, head_q), temperature)
        if pair.across is not LOCAL_VOCAB:
            raise CannotRunError(
                "the likeliest tokens are sought among all words and these heads are split over a vocabulary_group; "
                "give heads of all rows"
            )
        check_tokens(tokens, hidden_p)
        check_ids(tokens, pair.words)
        flat = tokens.reshape(-1).to(torch.int64)
        options = with_buffer(options or LinearOptions(), pair)
        found, *tops = implementation(options, pair).statistics_and_top(pair, flat, options, top)
    shaped = TokenStatistics(*(numbers.reshape(tokens.shape) for numbers in found))
    top_p, top_q = (TopTokens(*(x.reshape(*tokens.shape, x.shape[-1]) for x in one)) for one in tops)
    return StatisticsAndTop(shaped, top_p, top_q)


@validated_types
def log_probabilities(
    hidden: Float[Tensor, "*tokens dim"],
    head: Head,
    *,
    temperature: float | Float[Tensor, "*tokens"] = 1.0,
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
    if head.vocabulary_group is not None:
        raise CannotRunError(
            "log_probabilities holds the whole vocabulary and this head's rows are spread over a vocabulary_group; "
            "give it a head of all rows"
        )
    head, _ = gathered(head, head)
    check_temperature(temperature, hidden)
    check_side("the model", hidden, head)
    check_numbers(hidden)
    dtype = common_dtype((hidden, head.weight, head.bias))
    divisor = in_a_row(temperature, dtype)
    flat = HeadInputs(
        hidden=hidden.reshape(-1, hidden.shape[-1]), head=head, temperature=divisor, dtype=dtype
    )
    with torch.autocast(hidden.device.type, enabled=False):
        return normalised(logits(flat)).reshape(*hidden.shape[:-1], -1)


def as_record(divergence: str | Divergence) -> Divergence:
    """The record of a divergence that may be given by its name."""
    return look_up(DIVERGENCES, divergence, "divergence") if isinstance(divergence, str) else divergence
