"""KL losses from sampled tokens: the value of an estimator with the gradient of the divergence; input checks."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor
from torch.nn.functional import pad

from kleash.arguments import validated
from kleash.errors import NotProbabilitiesError, ShapeError
from kleash.estimators import ESTIMATORS, Estimator, largest_log_ratio
from kleash.estimators.control_variates import leave_one_out_weights
from kleash.estimators.sampled import log_ratio_and_k3
from kleash.losses.surrogate import (
    mask_and_weights,
    require_gradient,
    require_same_shape,
    sampled_pair,
    with_gradient,
    with_pair_gradient,
)
from kleash.masking import as_mask
from kleash.precision import at_least_float32
from kleash.registry import look_up

MAX_ROUNDINGS = 32
"""The tolerance above 0 of a log-probability, in units of machine epsilon."""


@validated
def kl_loss(
    token_logp: Float[Tensor, "*tokens_p"],
    token_logq: Float[Tensor, "*tokens_q"],
    mask: Bool[Tensor, "*tokens_m"] | Integer[Tensor, "*tokens_m"],
    *,
    estimator: str | Estimator = "k3",
    weights: Float[Tensor, "*tokens_w"] | None = None,
) -> Float[Tensor, "*tokens_p"]:
    """KL(p || q) in nats per sampled token, to be descended on.

        value                      weights * estimator(u),    u = log p(x) - log q(x)
        gradient in token_logp     weights * u                (that of k2, whatever the estimator)
        gradient in token_logq     -weights                   (maximum likelihood on p's samples)

    For ``x ~ p`` both gradients are those of KL(p || q) in expectation, and so they are for samples of a
    behaviour distribution with its importance weights. The estimator decides what is logged, never
    what is trained: plain backpropagation through k1 trains nothing, through k3 the other direction.

    |  | value | gradient |
    | masked, or of weight 0 | 0 | 0; what stands there (NaN, inf) is not read |
    | u < -80 in float32 (-700 in float64), k3 | k3's tangent at -80 | weights * u, as everywhere |
    | q rules the token out | inf | inf: no finite step answers an infinite divergence |

    ``extreme_tokens`` counts the last two. This is the gradient of each token's KL along the sampled
    prefixes; ``future_kl_loss`` adds what a token does to the KL after it. For first derivatives only.

    Args:
        token_logp: log-probabilities of the sampled tokens under what they were sampled from (or, with
            weights, what they stand for), with the gradient.
        token_logq: the same tokens under the other distribution; may carry a gradient, and need not.
        mask: true (or 1) for the tokens that count; tool output and padding do not.
        estimator: "k1", "abs", "k2", "k3", or a record, such as ``bounded_k3(-5.0)``.
        weights: one per token (``importance_weights``), without a gradient.

    Returns:
        One number per token, in float32 or, where the inputs are that, float64.

    Raises:
        DetachedError: if gradients are enabled and neither side carries one, or if ``weights`` carry one.
        ShapeError: if the tensors differ in shape.
        UnknownNameError: if there is no such estimator.

    References:
        Schulman, "Approximating KL Divergence" (2020), http://joschu.net/blog/kl-approx.html
        Tang & Munos, "On a few pitfalls in KL divergence gradient estimation for RL" (2025),
        https://arxiv.org/abs/2506.09477
    """
    record = look_up(ESTIMATORS, estimator, "estimator") if isinstance(estimator, str) else estimator
    pair = sampled_pair(token_logp, token_logq, mask, weights)
    if record is ESTIMATORS["k3"]:
        log_ratio, value = log_ratio_and_k3(*pair[:3])
    else:
        log_ratio = pair.log_ratio
        value = record.of(log_ratio)
    return with_pair_gradient(value, pair, log_ratio, lambda: -pair.counts.to(log_ratio.dtype))


@validated
def future_kl_loss(
    token_logp: Float[Tensor, "*batch_p time_p"],
    token_kl: Float[Tensor, "*batch_k time_k"],
    mask: Bool[Tensor, "*batch_m time_m"] | Integer[Tensor, "*batch_m time_m"],
    *,
    weights: Float[Tensor, "*batch_w time_w"] | None = None,
) -> Float[Tensor, "*batch_p time_p"]:
    """The effect of each token on the KL of later tokens: value 0, with the gradient that ``kl_loss`` lacks.

        value 0,    gradient in token_logp    sum_{j > t} weights_j * token_kl_j

    Added to ``kl_loss``, or to weights times the exact KL with its gradient, it makes the gradient of
    their sum over a response that of the KL between *responses*, on-policy without weights and
    off-policy with weights of level "prefix" or "sequence". With weights of level "token" there is nothing
    to add: those average over the behaviour's prefixes, which training does not move.

    A masked token adds nothing and gets nothing; credit passes over it to the tokens before. The more
    tokens follow, the noisier it is; exact KLs make it less so (``controlled_kl_loss``).

    Args:
        token_logp: log-probabilities of the sampled tokens, with the gradient.
        token_kl: an unbiased KL of each token (k1, k3 or the exact one), not weighted; its gradient is not used.
        mask: true (or 1) for the tokens that count.
        weights: the same that the KL itself is weighted with.

    Raises:
        DetachedError: if gradients are enabled and ``token_logp`` carries none, or if ``weights`` carry one.
        ShapeError: if the tensors differ in shape, or have no axis of time.
    """
    require_same_shape(token_logp=token_logp, token_kl=token_kl, mask=mask, weights=weights)
    if token_logp.ndim == 0:
        raise ShapeError("token_logp is one number; give the tokens of a response on the last axis")
    require_gradient(token_logp)
    counts, weights = mask_and_weights(mask, weights)
    cost = torch.where(counts, at_least_float32(token_kl.detach()), 0.0)
    cost = cost if weights is None else weights * cost
    kl_to_go = cost.flip(-1).cumsum(-1).flip(-1)
    future_kl = torch.where(as_mask(mask), pad(kl_to_go[..., 1:], (0, 1)), 0.0)
    return with_gradient(torch.zeros_like(future_kl), at_least_float32(token_logp), future_kl)


class ExtremeTokens(NamedTuple):
    """Counts of tokens whose log ratio overflows in ``kl_loss``."""

    continued: Int[Tensor, ""]
    """Tokens that ``p`` made less likely by more than 80 nats (700 in float64): k3's value is its tangent."""
    ruled_out: Int[Tensor, ""]
    """Tokens that ``q`` gives no probability at all: value and gradient are infinite."""


@validated
def extreme_tokens(
    token_logp: Float[Tensor, "*tokens_p"],
    token_logq: Float[Tensor, "*tokens_q"],
    mask: Bool[Tensor, "*tokens_m"] | Integer[Tensor, "*tokens_m"],
) -> ExtremeTokens:
    """Count the tokens on which ``kl_loss`` is continued or infinite; in a healthy run both are 0.

    Raises:
        ShapeError: if the tensors differ in shape.
    """
    require_same_shape(token_logp=token_logp, token_logq=token_logq, mask=mask)
    counts = as_mask(mask)
    log_ratio = at_least_float32(token_logp.detach()) - at_least_float32(token_logq.detach())
    return ExtremeTokens(
        continued=(counts & (log_ratio < -largest_log_ratio(log_ratio.dtype))).sum(),
        ruled_out=(counts & (log_ratio == torch.inf)).sum(),
    )


class ControlledLoss(NamedTuple):
    """``U - a (U - C)`` per sequence, with its weight and both sums."""

    per_sequence: Float[Tensor, "batch"]
    """The combination, with the gradient of the KL between responses; 0 for a sequence without tokens."""
    weight: Float[Tensor, "batch"]
    """Each sequence's a, fitted on the others: 0 is the sampled sum alone, 1 the sum of exact KLs alone."""
    sampled: Float[Tensor, "batch"]
    """U: the sum of log ratios; without gradient."""
    exact: Float[Tensor, "batch"]
    """C: the sum of exact per-token KLs; without gradient."""


@validated
def controlled_kl_loss(
    token_logp: Float[Tensor, "batch time"],
    token_logq: Float[Tensor, "batch_q time_q"],
    token_kl: Float[Tensor, "batch_k time_k"],
    mask: Bool[Tensor, "batch_m time_m"] | Integer[Tensor, "batch_m time_m"],
    *,
    weights: Float[Tensor, "batch_w time_w"] | None = None,
) -> ControlledLoss:
    """KL(p || q) between responses in nats, to be descended on: the mean of ``U - a (U - C)``.

        U = sum_t weights_t (log p(y_t) - log q(y_t)),    C = sum_t weights_t KL(p || q at y_<t)
        a_i = Cov(U, U - C) / Var(U - C), over the sequences other than i

    U and C have the same mean, and so have their losses' gradients, each that of the KL between
    responses: U's is the sampled reward-to-go, C's the exact KL's own and ``future_kl_loss`` of it.
    ``per_sequence`` mixes both with the same weight. Because a sequence's weight comes
    from the other ones, neither value nor gradient is biased by fitting it (where the sequences
    were drawn independently). It is 1, not fitted, with fewer than three others, where
    U - C does not vary among them, and where a sum is infinite.

    What is made small is the variance of the *value*: that of the gradient follows it only
    loosely. Aggregate it as a mean over sequences: ``loss.per_sequence.mean()`` where all have tokens.

    Args:
        token_logp: log-probabilities of the sampled tokens, with the gradient.
        token_logq: the same tokens under the other distribution.
        token_kl: the exact KL(p || q) of the whole distribution each token was drawn from, with its gradient.
        mask: true (or 1) for the tokens that count.
        weights: off-policy, of level "prefix" or "sequence", without a gradient.

    Raises:
        DetachedError: if gradients are enabled and ``token_logp`` carries none, or if ``weights`` carry one.
        ShapeError: if the tensors differ in shape, or are not [batch, time].
    """
    require_same_shape(token_logp=token_logp, token_logq=token_logq, token_kl=token_kl, mask=mask)
    if token_logp.ndim != 2:
        raise ShapeError(f"token_logp is {tuple(token_logp.shape)}; give all of them as [batch, time]")
    counts, unmasked_weights = mask_and_weights(mask, weights)
    log_ratio = torch.where(
        counts, at_least_float32(token_logp).detach() - at_least_float32(token_logq).detach(), 0.0
    )
    sampled = kl_loss(token_logp, token_logq, mask, estimator="k1", weights=weights)
    sampled = (sampled + future_kl_loss(token_logp, log_ratio, mask, weights=weights)).sum(-1)
    exact = torch.where(counts, at_least_float32(token_kl), 0.0)
    exact = exact if unmasked_weights is None else unmasked_weights * exact
    exact = (exact + future_kl_loss(token_logp, token_kl, mask, weights=weights)).sum(-1)
    weight = leave_one_out_weights(sampled.detach(), exact.detach(), as_mask(mask).any(-1))
    mixed = torch.where(weight == 1, exact, (1 - weight) * sampled + weight * exact)
    return ControlledLoss(mixed, weight, sampled.detach(), exact.detach())


@validated
def require_log_probabilities(
    token_logp: Float[Tensor, "*tokens_p"],
    mask: Bool[Tensor, "*tokens_m"] | Integer[Tensor, "*tokens_m"],
    name: str = "token_logp",
) -> None:
    """Raise unless the unmasked values can be natural log-probabilities of sampled tokens.

    Caught: NaN and +inf; positive numbers, telling apart probabilities (all from 0 to 1) from logits and
    losses; and zeros throughout, which is what a model that never ran leaves behind. A
    log-probability of -inf is one. What is masked is not read; nothing to read is nothing wrong.
    Reads the values: not for the inside of a compiled step.

    Args:
        token_logp: what is claimed to be log-probabilities.
        mask: true (or 1) for the tokens that count.
        name: what to call them in the error.

    Raises:
        NotProbabilitiesError: a ValueError, if they cannot be.
        ShapeError: if the two differ in shape.
    """
    require_same_shape(**{name: token_logp, "mask": mask})
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
