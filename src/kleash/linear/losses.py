"""The public functions that return a loss: a scalar whose gradient is computed in the forward pass."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kleash.arguments import validated_types
from kleash.autodiff import uncompiled
from kleash.divergences import Divergence
from kleash.errors import OptionError
from kleash.linear import autograd
from kleash.linear.checks import (
    as_divergence,
    check_on_all_ranks,
    check_token_ids,
    check_transforms,
    check_weights,
    checked_pair,
)
from kleash.linear.head import Head
from kleash.linear.options import LinearOptions
from kleash.linear.types import LinearLoss, TokenTerms


@uncompiled
@validated_types
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
    """
    return linear_divergence_loss(
        hidden_p, head_p, hidden_q, head_q, weights=weights, temperature=temperature, options=options
    )


@uncompiled
@validated_types
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
    """
    record = as_divergence(divergence)
    arguments = (hidden_p, head_p), (hidden_q, head_q), temperature, weights
    check_transforms("linear_divergence_loss", *arguments, inside=False)
    pair = checked_pair((hidden_p, head_p), (hidden_q, head_q), temperature)
    check_on_all_ranks(pair, lambda: check_weights(weights, hidden_p))
    with torch.autocast(hidden_p.device.type, enabled=False):
        loss, per_token = autograd.weighted_sum(pair, options or LinearOptions(), record, weights.reshape(-1))
    return LinearLoss(loss, per_token.reshape(weights.shape))


@uncompiled
@validated_types
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
    more matmuls) and let the objective index them. The same holds for the denominator of a mean.

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
    """
    if not callable(objective):
        raise OptionError(f"objective is a {type(objective).__qualname__}; give a function of terms and rows")
    arguments = (hidden_p, head_p), (hidden_q, head_q), temperature, tokens
    check_transforms("linear_objective", *arguments, inside=False)
    pair = checked_pair((hidden_p, head_p), (hidden_q, head_q), temperature)
    check_on_all_ranks(pair, lambda: check_token_ids(tokens, hidden_p, pair.vocab_size))
    with torch.autocast(hidden_p.device.type, enabled=False):
        flat = tokens.reshape(-1).to(torch.int64)
        loss, terms = autograd.objective_loss(pair, options or LinearOptions(), flat, objective)
    return loss, TokenTerms(*(x.reshape(tokens.shape) for x in terms))
