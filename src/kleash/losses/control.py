"""The KL between responses, from two losses with the right gradient that err differently."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from kleash.arguments import validated
from kleash.errors import ShapeError
from kleash.estimators.control_variates import leave_one_out_weights
from kleash.losses.relative_entropy import future_kl_loss, kl_loss
from kleash.losses.surrogate import counted, require_one_shape
from kleash.masking import as_mask
from kleash.precision import at_least_float32


class ControlledLoss(NamedTuple):
    """``U - a (U - C)`` per sequence, and what it is made of."""

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
    require_one_shape(token_logp=token_logp, token_logq=token_logq, token_kl=token_kl, mask=mask)
    if token_logp.ndim != 2:
        raise ShapeError(f"token_logp is {tuple(token_logp.shape)}; give all of them as [batch, time]")
    counts, selected = counted(mask, weights)
    log_ratio = torch.where(
        counts, at_least_float32(token_logp).detach() - at_least_float32(token_logq).detach(), 0.0
    )
    sampled = kl_loss(token_logp, token_logq, mask, estimator="k1", weights=weights)
    sampled = (sampled + future_kl_loss(token_logp, log_ratio, mask, weights=weights)).sum(-1)
    exact = torch.where(counts, at_least_float32(token_kl), 0.0)
    exact = exact if selected is None else selected * exact
    exact = (exact + future_kl_loss(token_logp, token_kl, mask, weights=weights)).sum(-1)
    a = leave_one_out_weights(sampled.detach(), exact.detach(), as_mask(mask).any(-1))
    mixed = torch.where(a == 1, exact, (1 - a) * sampled + a * exact)
    return ControlledLoss(mixed, a, sampled.detach(), exact.detach())
