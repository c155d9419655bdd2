"""KL losses from sampled tokens: the value of an estimator with the gradient of the divergence; input checks."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor

from kleash.arguments import validated
from kleash.errors import NotProbabilitiesError
from kleash.estimators import ESTIMATORS, Estimator
from kleash.estimators.sampled import largest_log_ratio
from kleash.estimators.weights import controlled, leave_one_out_weights
from kleash.losses.surrogate import (
    future_kl_of_tokens,
    kl_of_pair,
    mask_and_weights,
    require_gradient,
    sampled_pair,
)
from kleash.masking import as_mask
from kleash.precision import at_least_float32
from kleash.registry import look_up

MAX_ROUNDINGS = 32
"""The tolerance above 0 of a log-probability, in units of machine epsilon."""


@validated
def kl_loss(
    token_logp: Float[Tensor, "*tokens"],
    token_logq: Float[Tensor, "*tokens"],
    mask: Bool[Tensor, "*tokens"] | Integer[Tensor, "*tokens"],
    *,
    estimator: str | Estimator = "k3",
    weights: Float[Tensor, "*tokens"] | None = None,
) -> Float[Tensor, "*tokens"]:
    """A loss per sampled token whose value estimates KL(p || q), in nats, and whose gradient is that of the KL.

        value                      weights * estimator(u),    u = log p(x) - log q(x)
        gradient in token_logp     weights * u                (that of k2, whatever the estimator)
        gradient in token_logq     -weights                   (maximum likelihood on p's samples)

    For ``x ~ p`` both gradients are those of KL(p || q) in expectation, and so they are for samples of a behaviour
    distribution with its importance weights. The estimator determines the value only: backpropagating through k1 would
    train nothing, and through k3 the other direction.

    |  | value | gradient |
    | masked, or of weight 0 | 0 | 0; the inputs (NaN, inf) are not read |
    | u < -80 in float32 (-700 in float64), k3 | k3's tangent at -80 | weights * u |
    | probability 0 under q | inf | inf |

    ``extreme_tokens`` counts the last two cases. The gradient is that of each token's KL along the sampled prefixes;
    ``future_kl_loss`` adds the effect of a token on the KL of later tokens. It has first derivatives only.

    Args:
        token_logp: log-probabilities of the sampled tokens under ``p``, with the gradient. ``p`` is the distribution
            that they were sampled from or, with weights, the one that the weights refer to.
        token_logq: the same tokens under the other distribution, with or without a gradient.
        mask: true (or 1) for the tokens that count; false for tool output and padding.
        estimator: "k1", "abs", "k2", "k3", or a record, such as ``bounded_k3(-5.0)``.
        weights: one per token (``importance_weights``), without a gradient.

    Returns:
        One number per token, in float64 if an input is float64, otherwise in float32.

    Raises:
        DetachedError: if gradients are enabled and neither side carries one, or if ``weights`` carry one.
        ShapeError: if the tensors differ in shape.
        UnknownNameError: if there is no such estimator.

    References:
        Schulman, "Approximating KL Divergence" (2020), http://joschu.net/blog/kl-approx.html
        Tang & Munos, "On a few pitfalls in KL divergence gradient estimation for RL" (2025),
        https://arxiv.org/abs/2506.09477

    >>> token_logp = torch.tensor([-1.0, -2.0], requires_grad=True)
    >>> kleash.kl_loss(token_logp, torch.tensor([-2.0, -2.0]), torch.ones(2).bool()).sum().backward()
    >>> token_logp.grad
    tensor([1., 0.])
    """
    record = look_up(ESTIMATORS, estimator, "estimator")
    pair = sampled_pair(token_logp, token_logq, mask, weights)
    require_gradient(token_logp, token_logq)
    return kl_of_pair(pair, record)


@validated
def future_kl_loss(
    token_logp: Float[Tensor, "*batch time"],
    token_kl: Float[Tensor, "*batch time"],
    mask: Bool[Tensor, "*batch time"] | Integer[Tensor, "*batch time"],
    *,
    weights: Float[Tensor, "*batch time"] | None = None,
) -> Float[Tensor, "*batch time"]:
    """The effect of each token on the KL of later tokens: value 0, with the gradient that ``kl_loss`` lacks.

        value 0,    gradient in token_logp    sum_{j > t} weights_j * token_kl_j

    Added to ``kl_loss``, or to weights times the exact KL with its gradient, it makes the gradient of their sum over a
    response that of the KL between *responses*: on-policy without weights, and off-policy with weights of level
    "prefix" or "sequence". It is not used with weights of level "token", which average over the behaviour's prefixes,
    since these do not depend on the policy.

    Masked tokens have no KL and no gradient; the tokens before them are still credited with later ones. The variance
    grows with the number of later tokens, and is smaller with exact KLs (``controlled_kl_loss``).

    Args:
        token_logp: log-probabilities of the sampled tokens, with the gradient.
        token_kl: an unbiased KL of each token (k1, k3 or the exact one), not weighted; its gradient is not used.
        mask: true (or 1) for the tokens that count.
        weights: the weights of the KL itself.

    Raises:
        DetachedError: if gradients are enabled and ``token_logp`` carries none, or if ``weights`` carry one.
        ShapeError: if the tensors differ in shape, or have no axis of time.

    >>> token_logp = torch.tensor([[-1.0, -2.0, -3.0]], requires_grad=True)
    >>> kleash.future_kl_loss(token_logp, torch.ones(1, 3), torch.ones(1, 3).bool()).sum().backward()
    >>> token_logp.grad
    tensor([[2., 1., 0.]])
    """
    require_gradient(token_logp)
    is_counted, weights = mask_and_weights(mask, weights)
    cost = torch.where(is_counted, at_least_float32(token_kl.detach()), 0.0)
    cost = cost if weights is None else weights * cost
    return future_kl_of_tokens(at_least_float32(token_logp), cost, as_mask(mask))


class ExtremeTokens(NamedTuple):
    """Counts of tokens whose log ratio overflows in ``kl_loss``."""

    continued: Int[Tensor, ""]
    """Tokens that ``p`` made less likely by more than 80 nats (700 in float64): k3's value is its tangent."""
    ruled_out: Int[Tensor, ""]
    """Tokens with probability 0 under ``q``: value and gradient are infinite."""


@validated
def extreme_tokens(
    token_logp: Float[Tensor, "*tokens"],
    token_logq: Float[Tensor, "*tokens"],
    mask: Bool[Tensor, "*tokens"] | Integer[Tensor, "*tokens"],
) -> ExtremeTokens:
    """Count the tokens where k3 is replaced by its tangent (log ratio below -80) or ``q`` is 0; both are normally 0.

    Raises:
        ShapeError: if the tensors differ in shape.
    """
    is_counted = as_mask(mask)
    log_ratio = at_least_float32(token_logp) - at_least_float32(token_logq)
    return ExtremeTokens(
        continued=(is_counted & (log_ratio < -largest_log_ratio(log_ratio.dtype))).sum(),
        ruled_out=(is_counted & (log_ratio == torch.inf)).sum(),
    )


class ControlledLoss(NamedTuple):
    """``U - a (U - C)`` per sequence, with its weight and both sums."""

    per_sequence: Float[Tensor, "batch"]
    """The combination, with the gradient of the KL between responses; 0 for a sequence without tokens."""
    weight: Float[Tensor, "batch"]
    """Each sequence's a, fitted to the other sequences: 0 is the sampled sum alone, 1 the sum of exact KLs alone."""
    sampled: Float[Tensor, "batch"]
    """U: the sum of log ratios; without gradient."""
    exact: Float[Tensor, "batch"]
    """C: the sum of exact per-token KLs; without gradient."""


@validated
def controlled_kl_loss(
    token_logp: Float[Tensor, "batch time"],
    token_logq: Float[Tensor, "batch time"],
    token_kl: Float[Tensor, "batch time"],
    mask: Bool[Tensor, "batch time"] | Integer[Tensor, "batch time"],
    *,
    weights: Float[Tensor, "batch time"] | None = None,
) -> ControlledLoss:
    """A loss whose mean estimates KL(p || q) between responses, in nats, with its gradient: ``U - a (U - C)``.

        U = sum_t weights_t (log p(y_t) - log q(y_t)),    C = sum_t weights_t KL(p || q at y_<t)
        a_i = Cov(U, U - C) / Var(U - C), over the sequences other than i

    U and C have the same mean, and the gradients of their losses have the same mean too: the gradient of the KL between
    responses. For U it is the sampled reward-to-go, for C the gradient of the exact KL plus that of ``future_kl_loss``.
    ``per_sequence`` combines both with the same weight. The weight of a sequence is fitted to the other ones, so it
    biases neither value nor gradient if the sequences were drawn independently. It is 1, not fitted, with fewer than
    three other sequences, if U - C does not vary among them, and if a sum is infinite.

    The weight minimises the variance of the *value*, which is only loosely related to that of the gradient. Aggregate
    as a mean over sequences: ``loss.per_sequence.mean()`` if all have tokens.

    Args:
        token_logp: log-probabilities of the sampled tokens, with the gradient.
        token_logq: the same tokens under the other distribution.
        token_kl: the exact KL(p || q) of the distribution that each token was drawn from, with its gradient.
        mask: true (or 1) for the tokens that count.
        weights: for off-policy samples, of level "prefix" or "sequence", without a gradient.

    Raises:
        DetachedError: if gradients are enabled and ``token_logp`` carries none, or if ``weights`` carry one.
        ShapeError: if the tensors differ in shape, or are not [batch, time].
    """
    pair = sampled_pair(token_logp, token_logq, mask, weights)
    sampled = kl_loss(token_logp, token_logq, mask, estimator="k1", weights=weights)
    sampled = (sampled + future_kl_loss(token_logp, pair.log_ratio, mask, weights=weights)).sum(-1)
    exact = pair.times_weights(torch.where(pair.is_counted, at_least_float32(token_kl), 0.0))
    exact = (exact + future_kl_loss(token_logp, token_kl, mask, weights=weights)).sum(-1)
    weight = leave_one_out_weights(sampled.detach(), exact.detach(), as_mask(mask).any(-1))
    return ControlledLoss(controlled(sampled, exact, weight), weight, sampled.detach(), exact.detach())


@validated
def require_log_probabilities(
    token_logp: Float[Tensor, "*tokens"],
    mask: Bool[Tensor, "*tokens"] | Integer[Tensor, "*tokens"],
    name: str = "token_logp",
) -> None:
    """Raise an error unless the unmasked values can be natural log-probabilities of sampled tokens.

    Invalid are NaN and +inf; positive numbers, where the error distinguishes probabilities (all from 0 to 1) from
    logits and losses; and zeros only, as from a model that did not run. -inf is valid. Masked values are not read, and
    no values are valid. Do not call it in a compiled step, since it reads the values.

    Args:
        token_logp: the values to check.
        mask: true (or 1) for the tokens that count.
        name: their name in the error.

    Raises:
        NotProbabilitiesError: a ValueError, if the values are invalid.
        ShapeError: if the two differ in shape.
    """
    values = token_logp.detach()[as_mask(mask)]
    if values.numel() == 0:
        return
    invalid = values.isnan() | (values == torch.inf)
    if invalid.any():
        first_invalid = values[invalid][0].item()
        raise NotProbabilitiesError(
            f"{name} is {first_invalid} at {int(invalid.sum())} of {len(values)} tokens that count; "
            "mask them, or look at the model that gave them"
        )
    lowest, highest = values.min().item(), values.max().item()
    num_positive = int((values > MAX_ROUNDINGS * torch.finfo(values.dtype).eps).sum())
    if num_positive and lowest >= 0 and highest <= 1:
        raise NotProbabilitiesError(
            f"{name} lies between {lowest:g} and {highest:g}, as probabilities do; give their natural logarithms"
        )
    if num_positive:
        raise NotProbabilitiesError(
            f"{name} is positive, up to {highest:g}, at {num_positive} of {len(values)} tokens that count, and no "
            "log-probability is; give log_softmax of the logits at the token, not the logit or the loss"
        )
    if lowest == highest == 0 and len(values) > 1:
        raise NotProbabilitiesError(
            f"{name} is 0 at all {len(values)} tokens that count, as if nothing had been computed; "
            "give the log-probabilities that the model gave"
        )
