"""The public functions: they check the arguments and call an implementation."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kleash.arguments import validated
from kleash.autodiff import uncompiled
from kleash.divergences import Divergence, find_divergence
from kleash.errors import CannotRunError, OptionError
from kleash.linear import autograd, chunked
from kleash.linear.checks import (
    check_constant,
    check_ids,
    check_transforms,
    checked_pair,
)
from kleash.linear.head import Head
from kleash.linear.products import logits
from kleash.linear.types import (
    LinearLoss,
    LinearOptions,
    StatisticsAndTop,
    TokenStatistics,
    TokenTerms,
    TopTokens,
)
from kleash.precision import normalised
from kleash.registry import require_at_least


@uncompiled
@validated
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
    A token whose incoming gradient is 0 adds 0 to every gradient, even if its hidden states are NaN.
    ``impl="reference"`` is differentiated by autograd instead, with derivatives of every order, forward mode and the
    transforms of ``torch.func``, which the other implementations refuse.

    All values of ``options.impl`` return the same number; they differ in memory and speed. Logits are float32, or
    float64 if any tensor is float64. The result is never negative, exactly 0 if both models have the same tensors,
    ``inf`` where p gives mass to tokens with probability 0 under q, and NaN for exactly the tokens whose hidden
    states contain NaN.

    Args:
        hidden_p: final hidden states under p, after the last norm.
        head_p: the head that maps them to logits.
        hidden_q: hidden states of the same tokens under q; their dimension may differ.
        head_q: the head for those; its vocabulary is that of head_p.
        temperature: divides the logits of both models; a number, or one for each token (NaN if it is not above 0).
        options: implementation, memory, compilation.

    Returns:
        KL in nats for each token, float32 (or float64).

    Raises:
        ShapeError: if shapes do not match, or a tensor is not floating-point.
        VocabularyMismatchError: if the heads have vocabularies of different sizes.
        OptionError: if the temperature is not a positive number.
        CannotRunError: if tensors are on different devices, an option is unsupported or its dependency missing, or
            a second or forward-mode derivative is taken.

    >>> hidden = torch.tensor([[1.0, 0.0, 0.0]])
    >>> head_p, head_q = kleash.Head(torch.eye(3)), kleash.Head(torch.zeros(3, 3))
    >>> kleash.linear_kl(hidden, head_p, hidden, head_q)
    tensor([0.1233])
    """
    return linear_divergence(hidden_p, head_p, hidden_q, head_q, temperature=temperature, options=options)


@uncompiled
@validated
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

    >>> hidden = torch.tensor([[1.0, 0.0, 0.0]])
    >>> head_p, head_q = kleash.Head(torch.eye(3)), kleash.Head(torch.zeros(3, 3))
    >>> kleash.linear_divergence(hidden, head_p, hidden, head_q, divergence="total_variation")
    tensor([0.2428])
    """
    record, options = find_divergence(divergence), options or LinearOptions()
    pair = checked_pair((hidden_p, head_p), (hidden_q, head_q), temperature)
    if not autograd.is_reference(pair, options):
        check_transforms("linear_divergence", (hidden_p, head_p), (hidden_q, head_q), temperature)
    with torch.autocast(hidden_p.device.type, enabled=False):
        values = autograd.divergence_values(pair, options, record)
    return values.reshape(hidden_p.shape[:-1])


@uncompiled
@validated
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

    >>> hidden = torch.tensor([[1.0, 0.0, 0.0]])
    >>> head_p, head_q = kleash.Head(torch.eye(3)), kleash.Head(torch.zeros(3, 3))
    >>> kleash.token_statistics(hidden, head_p, hidden, head_q, torch.tensor([0])).total_variation
    tensor([0.2428])
    """
    return statistics_of(
        (hidden_p, head_p), (hidden_q, head_q), tokens, temperature, options, top=0
    ).statistics


@uncompiled
@validated
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
    require_at_least(1, top=top)
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
    check_transforms("token_statistics", p, q, temperature, tokens)
    with torch.no_grad(), torch.autocast(tokens.device.type, enabled=False):
        pair = checked_pair(p, q, temperature)
        check_ids(tokens, pair.vocab_shards.vocab_size)
        flat = tokens.reshape(-1).to(torch.int64)
        computed = chunked.statistics(pair, options or LinearOptions(), flat, top)
    shaped = TokenStatistics(*(column.reshape(tokens.shape) for column in computed.statistics))
    top_p, top_q = (
        TopTokens(*(x.reshape(*tokens.shape, x.shape[-1]) for x in likeliest))
        for likeliest in (computed.top_p, computed.top_q)
    )
    return StatisticsAndTop(shaped, top_p, top_q)


@uncompiled
@validated
def linear_kl_loss(
    hidden_p: Float[Tensor, "*tokens dim_p"],
    head_p: Head,
    hidden_q: Float[Tensor, "*tokens dim_q"],
    head_q: Head,
    *,
    weights: Float[Tensor, "*tokens"],
    temperature: float | Float[Tensor, "*tokens"] = 1.0,
    options: LinearOptions | None = None,
) -> LinearLoss:
    """The sum of ``weights KL(p || q)`` over all tokens, with its gradient computed in the forward pass.

    This takes four matmuls where ``linear_kl`` with a trained head takes six, since the weights are known while the
    logits are in memory. The gradients are stored until the backward pass, which returns them times the incoming
    gradient; a second backward pass raises. Weight gradients are summed in float32.

    A token of weight 0 is not read: it costs no time, and its hidden states may be NaN. Put a mask into the weights
    (``mask / mask.sum()`` for a mean over the unmasked tokens).

    Args:
        hidden_p: final hidden states under p, after the last norm.
        head_p: the head that maps them to logits.
        hidden_q: hidden states of the same tokens under q.
        head_q: the head for those.
        weights: one factor for each token; constants for the gradient.
        temperature: divides the logits of both models.
        options: implementation, memory, compilation.

    Raises:
        ShapeError, VocabularyMismatchError, OptionError: as ``linear_kl``.
        CannotRunError: as ``linear_kl``; if the weights require a gradient; in a second backward pass.

    >>> hidden = torch.tensor([[1.0, 0.0, 0.0]])
    >>> head_p, head_q = kleash.Head(torch.eye(3)), kleash.Head(torch.zeros(3, 3))
    >>> trained = hidden.clone().requires_grad_()
    >>> kleash.linear_kl_loss(trained, head_p, hidden, head_q, weights=torch.ones(1)).loss.backward()
    >>> trained.grad
    tensor([[ 0.2442, -0.1221, -0.1221]])
    """
    return linear_divergence_loss(
        hidden_p, head_p, hidden_q, head_q, weights=weights, temperature=temperature, options=options
    )


@uncompiled
@validated
def linear_divergence_loss(
    hidden_p: Float[Tensor, "*tokens dim_p"],
    head_p: Head,
    hidden_q: Float[Tensor, "*tokens dim_q"],
    head_q: Head,
    *,
    weights: Float[Tensor, "*tokens"],
    divergence: str | Divergence = "kl",
    temperature: float | Float[Tensor, "*tokens"] = 1.0,
    options: LinearOptions | None = None,
) -> LinearLoss:
    """The sum of ``weights D(p || q)`` over all tokens for any divergence; otherwise as ``linear_kl_loss``.

    Args:
        hidden_p: final hidden states under p, after the last norm.
        head_p: the head that maps them to logits.
        hidden_q: hidden states of the same tokens under q.
        head_q: the head for those.
        weights: one factor for each token; constants for the gradient.
        divergence: a name of ``DIVERGENCES``, or a record.
        temperature: divides the logits of both models.
        options: implementation, memory, compilation.

    Raises:
        UnknownNameError: if there is no such divergence.
        ShapeError, VocabularyMismatchError, OptionError, CannotRunError: as ``linear_kl_loss``.

    >>> hidden = torch.tensor([[1.0, 0.0, 0.0]])
    >>> head_p, head_q = kleash.Head(torch.eye(3)), kleash.Head(torch.zeros(3, 3))
    >>> weights, name = torch.ones(1), "jensen_shannon"
    >>> kleash.linear_divergence_loss(hidden, head_p, hidden, head_q, weights=weights, divergence=name).loss
    tensor(0.0300)
    """
    record = find_divergence(divergence)
    check_transforms(
        "linear_divergence_loss", (hidden_p, head_p), (hidden_q, head_q), temperature, weights, inside=False
    )
    pair = checked_pair((hidden_p, head_p), (hidden_q, head_q), temperature)
    check_constant("the weights of a loss", weights, "multiply linear_divergence's values by them")
    with torch.autocast(hidden_p.device.type, enabled=False):
        loss, per_token = autograd.weighted_sum(pair, options or LinearOptions(), record, weights.reshape(-1))
    return LinearLoss(loss, per_token.reshape(weights.shape))


@uncompiled
@validated
def linear_objective(
    hidden_p: Float[Tensor, "*tokens dim_p"],
    head_p: Head,
    tokens: Int[Tensor, "*tokens"],
    hidden_q: Float[Tensor, "*tokens dim_q"],
    head_q: Head,
    objective: Callable[[TokenTerms, slice], Tensor],
    *,
    temperature: float | Float[Tensor, "*tokens"] = 1.0,
    options: LinearOptions | None = None,
) -> tuple[Float[Tensor, ""], TokenTerms]:
    """Policy loss, entropy bonus and exact KL of a training step from one pass over the vocabulary.

    ``objective(terms, rows)`` is called for one chunk of tokens after another. ``terms`` are the chunk's
    ``(token_logp, token_logq, kl, entropy)``; ``rows`` is the slice of the flattened tokens, by which the objective
    indexes its other data (``advantages.reshape(-1)[rows]``). It returns a loss for each token. Autograd computes the
    derivative ``c`` of the losses in each term, and the gradient in p's logits is

        c_logp (1_x - p) + c_kl p (u - KL) - c_entropy p (log p + H),    u = log p - log q

    With two products for the logits this takes four matmuls. Gradients reach hidden states, weights and biases, but
    not the other tensors that the objective reads. A token none of whose terms has a derivative adds 0 to the gradient,
    even if its hidden states are NaN: select with ``torch.where``, never multiply by a mask.

    Chunks may end anywhere. A loss in which a token's share depends on the terms of other tokens (for example on a
    sequence's likelihood ratio) cannot be computed in one pass: compute these values first (``token_statistics``, two
    more matmuls) and let the objective index them. Compute the denominator of a mean
    first as well.

    Args:
        hidden_p: final hidden states under p, at the positions that predict the tokens.
        head_p: the head that maps them to logits.
        tokens: the ids that follow these positions; any valid id where there is padding.
        hidden_q: hidden states of the same positions under q.
        head_q: the head for those.
        objective: maps terms and rows to a loss for each of these tokens.
        temperature: divides the logits of both models.
        options: implementation, memory, compilation.

    Returns:
        The sum of all losses, to be backpropagated once, and the terms of all tokens, detached.

    Raises:
        ShapeError: also if the objective does not return one loss for each token.
        VocabularyMismatchError, OptionError, CannotRunError: as ``linear_kl_loss`` and ``token_statistics``.

    >>> hidden = torch.tensor([[1.0, 0.0, 0.0]])
    >>> head_p, head_q = kleash.Head(torch.eye(3)), kleash.Head(torch.zeros(3, 3))
    >>> def objective(terms, rows):
    ...     return 0.1 * terms.kl - terms.token_logp
    >>> loss, terms = kleash.linear_objective(hidden, head_p, torch.tensor([0]), hidden, head_q, objective)
    >>> torch.allclose(loss, (0.1 * terms.kl - terms.token_logp).sum())
    True
    """
    if not callable(objective):
        raise OptionError(f"objective is a {type(objective).__qualname__}; give a function of terms and rows")
    check_transforms(
        "linear_objective", (hidden_p, head_p), (hidden_q, head_q), temperature, tokens, inside=False
    )
    pair = checked_pair((hidden_p, head_p), (hidden_q, head_q), temperature)
    check_ids(tokens, pair.vocab_shards.vocab_size)
    with torch.autocast(hidden_p.device.type, enabled=False):
        flat = tokens.reshape(-1).to(torch.int64)
        loss, terms = autograd.objective_loss(pair, options or LinearOptions(), flat, objective)
    return loss, TokenTerms(*(x.reshape(tokens.shape) for x in terms))


@validated
def log_probabilities(
    hidden: Float[Tensor, "*tokens dim"],
    head: Head,
    *,
    temperature: float | Float[Tensor, "*tokens"] = 1.0,
) -> Float[Tensor, "*tokens vocab"]:
    """Natural log-probabilities of the whole vocabulary: ``log_softmax(head(hidden) / temperature)``.

    The result holds the whole vocabulary for every token, so this is meant for few tokens. Of a head whose rows are on
    several ranks, the logits are exchanged and not the rows.

    Args:
        hidden: final hidden states, after the last norm.
        head: the head that maps them to logits.
        temperature: divides the logits.

    Returns:
        float32 (or float64, if any tensor is float64).

    Raises:
        ShapeError, OptionError: as ``linear_kl``.
        CannotRunError: as ``linear_kl``; if a gradient is needed of a head whose rows are on several ranks.
    """
    with torch.autocast(hidden.device.type, enabled=False):
        return normalised(all_logits(hidden, head, temperature))


@torch.no_grad()
def stored_logits(hidden: Float[Tensor, "*tokens dim"], head: Head) -> Float[Tensor, "*tokens vocab"]:
    """All logits of this rank's tokens, in at least float32 and without a gradient.

    Args:
        hidden: final hidden states, also of no token.
        head: whose rows are on several ranks, which all call this; with a ``vocabulary_group``, with the same tokens.
    """
    with torch.autocast(hidden.device.type, enabled=False):
        return all_logits(hidden, head, 1.0)


def all_logits(hidden: Tensor, head: Head, temperature: float | Tensor) -> Float[Tensor, "*tokens vocab"]:
    """All logits of this rank's tokens, divided by the temperature.

    Tokens move a few at a time, so that no message has more than a quarter of the head's numbers.

    Raises:
        CannotRunError: if a gradient is needed and the rows are on several ranks.
    """
    pair = checked_pair((hidden, head), (hidden, head), temperature)
    vocab_shards = pair.vocab_shards
    if not pair.is_sharded:
        return logits(pair.p).reshape(*hidden.shape[:-1], vocab_shards.vocab_size)
    if pair.requires_gradient:
        raise CannotRunError(
            "log_probabilities of a head whose rows are on several ranks has no gradient; call it under "
            "torch.no_grad(), or take linear_kl"
        )
    size, _, counts = vocab_shards.agreed_sizes(max(1, hidden.shape[-1] // 4), 1, pair.tokens)
    parts = [pair.p.hidden.new_zeros((0, vocab_shards.vocab_size), dtype=pair.dtype)]
    for start in range(0, max(counts), size):
        some = [max(0, min(size, count - start)) for count in counts]
        moved = pair.select(slice(start, start + size)).gathered(some).p
        parts.append(vocab_shards.whole_rows(logits(moved), some))
    return torch.cat(parts).reshape(*hidden.shape[:-1], vocab_shards.vocab_size)
