"""KL-shaped rewards: the score of a response minus beta times its KL to the reference."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from kleash.arguments import validated
from kleash.errors import OptionError
from kleash.estimators.weights import controlled, detached_where, leave_one_out_weights
from kleash.leash.controller_base import KL_UNITS, Per
from kleash.masking import Mean, as_mask, mean_of
from kleash.precision import at_least_float32
from kleash.registry import require_at_least, require_choice


@validated
def shape_rewards(
    scores: Float[Tensor, "sequences"],
    token_kl: Float[Tensor, "sequences steps"],
    mask: Bool[Tensor, "sequences steps"] | Integer[Tensor, "sequences steps"],
    *,
    beta: float,
) -> Float[Tensor, "sequences steps"]:
    """The reward of each token: ``-beta * KL`` for every unmasked token, plus the score at the last of them.

        reward_t = -beta token_kl_t + [t is the last] score

    Detached, since a reward multiplies the gradient of log p. The expected gradient depends on the KL:

    | token_kl | expected gradient of the rewards to go |
    | k1 | that of score - beta KL between responses |
    | exact D | lacks each token's gradient of D, since D does not depend on the drawn token |
    | exact D, and beta times D with its gradient added to the loss | that of score - beta KL between responses |
    | k1 - a (k1 - D) | lacks a times the gradient of D: add beta a D to the loss (``controlled_kl``) |
    | k2, k3 | wrong: that of k3 lacks the gradient of KL(reference, policy) |

    So an exact KL removes the noise of *later* tokens, and its gradient must be added to the loss.

    Masked rewards are exactly 0, and masked values are not read (NaN). A response without an unmasked token has only
    zeros, without its score. With beta 0 no KL is read; otherwise an infinite KL gives a reward of -inf.

    Args:
        scores: one per response.
        token_kl: KL of the policy from the reference at each token, in nats, not multiplied by beta.
        mask: true (or 1) for the tokens that the policy generated; false for padding and tool output.
        beta: nats of reward paid for one nat of KL, at least 0.

    Returns:
        Rewards in float32, or in float64 if an input is float64.

    Raises:
        OptionError: if beta is negative or not finite.
        ShapeError: if the tensors do not fit together.

    References:
        Ziegler et al., "Fine-Tuning Language Models from Human Preferences" (2019),
        https://arxiv.org/abs/1909.08593

    >>> scores, token_kl = torch.tensor([1.0]), torch.tensor([[0.5, 0.25, 0.25]])
    >>> kleash.shape_rewards(scores, token_kl, torch.ones(1, 3).bool(), beta=0.1)
    tensor([[-0.0500, -0.0250,  0.9750]])
    """
    require_at_least(0.0, beta=beta)
    is_counted = as_mask(mask)
    tokens_left = is_counted.to(torch.int64).flip(-1).cumsum(-1).flip(-1)
    response_scores = at_least_float32(scores.detach()).unsqueeze(-1)
    cost = detached_where(token_kl, is_counted)
    penalty = torch.zeros_like(cost) if beta == 0 else -beta * cost
    return penalty + torch.where(is_counted & (tokens_left == 1), response_scores, 0.0)


@validated
def sequence_rewards(
    scores: Float[Tensor, "sequences"],
    token_kl: Float[Tensor, "sequences steps"],
    mask: Bool[Tensor, "sequences steps"] | Integer[Tensor, "sequences steps"],
    *,
    beta: float,
) -> Float[Tensor, "sequences"]:
    """The reward of each response: ``score - beta * sum of its tokens' KL``; detached.

    For trainers that weight a whole response by one number (RLOO, GRPO). As in ``shape_rewards``, the gradient is
    correct for k1; for the exact KL if beta times its gradient is added to the loss; and for
    ``controlled_kl(...).per_token`` with its weight times that gradient. The *value* is correct for all three.

    The reward of a response without an unmasked token is its score. With beta 0 no KL is read.

    Args:
        scores: one per response.
        token_kl: KL of the policy from the reference at each token, in nats, not multiplied by beta.
        mask: true (or 1) for the tokens that the policy generated.
        beta: nats of reward paid for one nat of KL, at least 0.

    Raises:
        OptionError: if beta is negative or not finite.
        ShapeError: if the tensors do not fit together.
    """
    require_at_least(0.0, beta=beta)
    response_scores = at_least_float32(scores.detach())
    return (
        response_scores
        if beta == 0
        else response_scores - beta * detached_where(token_kl, as_mask(mask)).sum(-1)
    )


class ControlledKL(NamedTuple):
    """Per token ``u - a (u - D)``, detached, with its weight and both sums."""

    per_token: Float[Tensor, "sequences steps"]
    """In nats; 0 where masked. Its sum over a response is U - a (U - C)."""
    weight: Float[Tensor, "sequences"]
    """Each response's a: 0 is the sampled KL alone, 1 the exact one alone."""
    sampled: Float[Tensor, "sequences"]
    """U: the sum of log ratios."""
    exact: Float[Tensor, "sequences"]
    """C: the sum of exact per-token KLs."""


@validated
def controlled_kl(
    log_ratio: Float[Tensor, "sequences steps"],
    token_kl: Float[Tensor, "sequences steps"],
    mask: Bool[Tensor, "sequences steps"] | Integer[Tensor, "sequences steps"],
    *,
    weight: float | None = None,
) -> ControlledKL:
    """The KL of responses as a reward, with the exact per-token KL as a control variate.

        sum over the response = U - a (U - C),    U = sum_t u_t,    C = sum_t D_t

    U and C have the same mean, so the value is unbiased for every a. As a detached reward it lacks a times the
    gradients of D. Add them to the policy's loss, per response:

        beta * weight * sum_t D_t, with the gradient of D

    Without ``weight``, the a of each response is fitted to the *other* responses of the batch, as in
    ``controlled_kl_loss``. This biases neither the value nor the gradient, also together with a leave-one-out baseline,
    since U - C has mean 0 for every weight that does not depend on it. The weight is 1, not fitted, with fewer than
    three other responses, if U - C does not vary among them, and if a sum is infinite.

    Args:
        log_ratio: log policy - log reference of the sampled tokens (k1).
        token_kl: the exact KL of the distribution that each token was drawn from.
        mask: true (or 1) for the tokens that the policy generated.
        weight: one a for all, chosen before these responses were drawn, such as ``.weight.mean()`` of the last batch.

    Raises:
        OptionError: if ``weight`` is not finite.
        ShapeError: if the three differ in shape, or are not [sequences, steps].
    """
    is_counted = as_mask(mask)
    u, d = detached_where(log_ratio, is_counted), detached_where(token_kl, is_counted)
    sampled, exact = u.sum(-1), d.sum(-1)
    if weight is None:
        a = leave_one_out_weights(sampled, exact, is_counted.any(-1))
    elif math.isfinite(weight):
        a = torch.full_like(sampled, weight)
    else:
        raise OptionError(f"weight is {weight}; give a finite number, or leave it out to have it fitted")
    return ControlledKL(controlled(u, d, a.unsqueeze(-1)), a, sampled, exact)


@validated
def measured_kl(
    token_kl: Float[Tensor, "sequences steps"],
    mask: Bool[Tensor, "sequences steps"] | Integer[Tensor, "sequences steps"],
    *,
    per: Per = "sequence",
) -> Mean:
    """The KL for a controller, as a ``Mean``: the mean over responses of their sums, or the mean over tokens.

    Add the ``Mean``s of micro-batches, reduce the sum by ``.across_ranks()``, and pass ``.value`` and, for
    ``per="sequence"``, ``int(mean.count)`` to ``controller.after``. Without the reduction the betas of the ranks would
    differ. A response without an unmasked token is not counted.

    Args:
        token_kl: in nats: the exact KL or an unbiased estimate (k1, k3); it may differ from the KL in the reward.
        mask: true (or 1) for the tokens that the policy generated.
        per: the controller's ``per``.

    Raises:
        OptionError: if ``per`` is unknown.
        ShapeError: if the two differ in shape, or are not [sequences, steps].
    """
    require_choice(KL_UNITS, per=per)
    tokens = mean_of(at_least_float32(token_kl.detach()), mask)
    return tokens if per == "token" else Mean(total=tokens.total, count=as_mask(mask).any(-1).sum())


def best_of_n_bound(n: int) -> float:
    """The upper bound log n - (n - 1) / n nats of the KL of best-of-n, exact if rewards never tie.

    It is often quoted as the KL itself. The two are equal only if no single response is likely and no two responses
    have the same reward; over finitely many outcomes the KL is at most -log of the smallest probability.

    Raises:
        OptionError: if ``n`` is below 1.

    References:
        Beirami et al., "Theoretical Guarantees on the Best-of-n Alignment Policy" (2024),
        https://arxiv.org/abs/2401.01879
    """
    require_at_least(1, n=n)
    return math.log(n) - (n - 1) / n
