"""The public doors to losses: a scalar whose gradient is formed while its logits are there."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kleash.arguments import validated_types
from kleash.autodiff import uncompiled_in_transforms
from kleash.divergences import Divergence
from kleash.errors import CannotRunError, OptionError, ShapeError
from kleash.linear import autograd
from kleash.linear.api import as_record
from kleash.linear.checks import check_ids, check_tokens, check_transforms, checked_pair
from kleash.linear.head import Head
from kleash.linear.impl.buffer import with_buffer
from kleash.linear.impl.choice import implementation
from kleash.linear.options import LinearOptions
from kleash.linear.statistics import TokenTerms


class LinearLoss(NamedTuple):
    """A loss, and what it is made of."""

    loss: Float[Tensor, ""]
    """The weighted sum; backpropagate it once."""
    per_token: Float[Tensor, "*tokens"]
    """The divergence of each token, detached; 0 where the weight is 0, for such a token was not read."""


@uncompiled_in_transforms
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
    """The sum of ``weights KL(p || q)`` over all tokens, its gradient formed in the forward pass.

    Four matmuls where ``linear_kl`` with a trained head needs six, because the weights are known while the
    logits are there. The gradients wait in memory until the backward pass hands them out, multiplied by
    what the loss was multiplied by; a second backward pass raises. Weight gradients are summed in float32.

    A token of weight 0 is not read: it costs nothing, and its hidden states may be NaN. So a mask goes into
    the weights (``mask / mask.sum()`` for a mean over the tokens that count).

    Args:
        hidden_p: final hidden states under p, after the last norm.
        head_p: the head that makes them logits.
        hidden_q: hidden states of the same tokens under q.
        head_q: the head for those.
        weights: what each token's KL is multiplied by; a constant to the gradient.
        temperature: divides the logits of both.
        options: implementation, memory, compilation.

    Raises:
        ShapeError, VocabularyMismatchError, OptionError: as ``linear_kl``.
        CannotRunError: as ``linear_kl``; if the weights require a gradient; in a second backward pass.
    """
    return linear_divergence_loss(
        hidden_p, head_p, hidden_q, head_q, weights=weights, temperature=temperature, options=options
    )


@uncompiled_in_transforms
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
        head_p: the head that makes them logits.
        hidden_q: hidden states of the same tokens under q.
        head_q: the head for those.
        weights: what each token's divergence is multiplied by; a constant to the gradient.
        divergence: a name of ``DIVERGENCES``, or a record.
        temperature: divides the logits of both.
        options: implementation, memory, compilation.

    Raises:
        UnknownNameError: if there is no such divergence.
        ShapeError, VocabularyMismatchError, OptionError, CannotRunError: as ``linear_kl_loss``.
    """
    if torch.compiler.is_compiling():
        from kleash.linear import ops

        x = ops.given((hidden_p, head_p), (hidden_q, head_q), temperature, options)
        found = ops.linear_divergence_gradient(*x, ops.named(divergence), weights.detach(), ops.needed(x))
        return LinearLoss(found[0], found[1].detach())
    record = as_record(divergence)
    given = (hidden_p, head_p), (hidden_q, head_q), temperature, weights
    check_transforms("linear_divergence_loss", *given, inside=False)
    pair = checked_pair((hidden_p, head_p), (hidden_q, head_q), temperature)
    check_weights(weights, hidden_p)
    options = with_buffer(options or LinearOptions(), pair)
    with torch.autocast(hidden_p.device.type, enabled=False):
        flat = weights.reshape(-1)
        loss, per_token = autograd.weighted(
            implementation(options, pair, record), pair, record, flat, options
        )
    return LinearLoss(loss, per_token.reshape(weights.shape))


@uncompiled_in_transforms
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

    ``objective(terms, rows)`` is called for one chunk of tokens after the other. ``terms`` are their
    ``(token_logp, token_logq, kl, entropy)``, ``rows`` the slice of the flattened tokens that they are:
    index what else the loss needs with it (``advantages.reshape(-1)[rows]``). It returns a loss for each
    token; autograd tells its derivative ``c`` in each term, and the gradient in p's logits is

        c_logp (1_x - p) + c_kl p (u - KL) - c_entropy p (log p + H),    u = log p - log q

    which with two products for the logits makes four matmuls. Gradients reach hidden states, weights and
    biases only, not what else the objective reads. A token none of whose terms have a derivative (select
    with ``torch.where``; never multiply by a mask) adds 0 to the gradient, whatever its hidden states hold.

    Chunks end anywhere. A loss in which a token's share depends on other tokens' terms (a sequence's
    likelihood ratio, say) cannot be made of one pass: take the values first (``token_statistics``, two
    more matmuls) and let the objective index them. Means want their denominator beforehand, too.

    Args:
        hidden_p: final hidden states under p, at the positions that predict the tokens.
        head_p: the head that makes them logits.
        tokens: the ids that follow; any id of the vocabulary where there is only padding.
        hidden_q: hidden states of the same positions under q.
        head_q: the head for those.
        objective: from terms and rows to a loss for each of these tokens.
        temperature: divides the logits of both.
        options: implementation, memory, compilation.

    Returns:
        The sum of all losses, to be backpropagated once, and all terms, detached.

    Raises:
        ShapeError: also if the objective does not return one loss for each token.
        VocabularyMismatchError, OptionError, CannotRunError: as ``linear_kl_loss`` and ``token_statistics``.
    """
    if not callable(objective):
        raise OptionError(f"objective is a {type(objective).__qualname__}; give a function of terms and rows")
    if torch.compiler.is_compiling():
        from kleash.linear import ops

        x = ops.given((hidden_p, head_p), (hidden_q, head_q), temperature, options)
        terms = TokenTerms(*ops.token_terms(*x, tokens))
        losses = objective(TokenTerms(*(t.reshape(-1) for t in terms)), slice(0, tokens.numel()))
        return losses.sum(), TokenTerms(*(t.detach() for t in terms))
    given = (hidden_p, head_p), (hidden_q, head_q), temperature, tokens
    check_transforms("linear_objective", *given, inside=False)
    pair = checked_pair((hidden_p, head_p), (hidden_q, head_q), temperature)
    check_tokens(tokens, hidden_p)
    check_ids(tokens, pair.words)
    options = with_buffer(options or LinearOptions(), pair)
    with torch.autocast(hidden_p.device.type, enabled=False):
        flat = tokens.reshape(-1).to(torch.int64)
        loss, terms = autograd.evaluate_objective(
            implementation(options, pair), pair, flat, objective, options
        )
    return loss, TokenTerms(*(x.reshape(tokens.shape) for x in terms))


def check_weights(weights: Tensor, hidden: Tensor) -> None:
    """Refuse weights that are not one number for each token."""
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
            "the weights of a loss get no gradient; detach them, or weigh linear_kl's values"
        )
