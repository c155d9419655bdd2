"""Preference losses: the implicit reward of a policy relative to its reference, DPO and f-DPO."""

from collections.abc import Mapping
from math import inf
from types import MappingProxyType
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor
from torch.nn.functional import logsigmoid

from kleash.arguments import validated
from kleash.divergences import DIVERGENCES, Divergence, find_divergence
from kleash.divergences.table import identity
from kleash.errors import OptionError
from kleash.losses.surrogate import require_gradient
from kleash.masking import as_mask
from kleash.precision import at_least_float32
from kleash.registry import require_above

NO_REWARD: Mapping[str, str] = MappingProxyType(
    {
        "total_variation": "its score only tells which of the two is ahead, so many policies share one reward",
        "hellinger": "it is the root of a divergence, which has no score for single responses; "
        "give alpha_record(0.5), four times its square",
    }
)
"""Divergences of the table that imply no reward, with the reason."""


class PreferenceLoss(NamedTuple):
    """A loss per pair, and the implied rewards of both responses."""

    loss: Float[Tensor, "pairs"]
    """In nats, with the gradient."""
    chosen_reward: Float[Tensor, "pairs"]
    """Implied reward of the chosen response, detached; known up to a constant per prompt, so only differences within a
    pair are meaningful."""
    rejected_reward: Float[Tensor, "pairs"]
    """Implied reward of the rejected response, detached."""


@validated
def response_log_ratio(
    token_logp: Float[Tensor, "batch time"],
    token_logq: Float[Tensor, "batch time"],
    mask: Bool[Tensor, "batch time"] | Integer[Tensor, "batch time"],
) -> Float[Tensor, "batch"]:
    """log p(response) - log q(response) in nats: the sum of the log ratios of its tokens.

    Summed in at least float32. Masked values (the prompt, padding, NaN) are not read; the ratio of a response without
    tokens is 0. Its mean is a KL divergence only over responses that were drawn from ``p``, not over a preference data
    set.

    Args:
        token_logp: log-probabilities of the response's tokens under the policy.
        token_logq: the same under the reference.
        mask: true (or 1) for the tokens of the response.

    Raises:
        ShapeError: if the three differ in shape, or are not [batch, time].
        DetachedError: if gradients are enabled and the reference carries one, but not the policy.
    """
    if token_logq.requires_grad:
        require_gradient(token_logp)
    is_counted = as_mask(mask)
    logp, logq = (torch.where(is_counted, at_least_float32(x), 0.0) for x in (token_logp, token_logq))
    return (logp - logq).sum(-1)


@validated
def implicit_reward(
    log_ratio: Float[Tensor, "*responses"], *, beta: float, divergence: str | Divergence = "kl"
) -> Float[Tensor, "*responses"]:
    """The reward for which the policy is optimal, up to a constant per prompt.

        reward(y) = beta score(u) + c(prompt),    u = log p(y) - log q(y)

    The policy that maximises ``E_p reward - beta D(p || q)`` has ``reward = beta g'(p/q) + c``, where
    ``D = E_q g(p/q)``; and ``g' = f + f'`` is the ``score`` of the divergence's record. For the KL it is
    u itself: ``p = q exp(reward / beta) / Z``. If g' is finite as p goes to 0 (chi_squared), the optimal policy may
    give some responses probability 0, and the equation holds for the others.

    Values are not clamped. The scores of "reverse_kl" and "jeffreys" overflow to -inf for u far below 0, and that of
    "chi_squared" to inf for u far above 0 (in float32 from |u| = 88, which sums over long responses reach).

    Args:
        log_ratio: one per response, from ``response_log_ratio``.
        beta: nats of reward paid for one unit of the divergence; finite, above 0.
        divergence: a name of ``DIVERGENCES``, or a record.

    Raises:
        UnknownNameError: if there is no such divergence.
        OptionError: if the divergence implies no reward (its score is not strictly increasing), or ``beta`` is not a
            finite number above 0.

    References:
        Rafailov et al., "Direct Preference Optimization" (2023), https://arxiv.org/abs/2305.18290
        Wang et al., "Beyond Reverse KL" (2023), https://arxiv.org/abs/2309.16240
    """
    require_above(0.0, beta=beta)
    return beta * _record_with_score(divergence).score(at_least_float32(log_ratio))


@validated
def dpo_loss(
    chosen_log_ratio: Float[Tensor, "pairs"],
    rejected_log_ratio: Float[Tensor, "pairs"],
    *,
    beta: float,
    divergence: str | Divergence = "kl",
    label_smoothing: float = 0.0,
) -> PreferenceLoss:
    """The DPO loss in nats per pair: the Bradley-Terry negative log-likelihood of the implicit rewards.

        -(1 - s) log sigmoid(m) - s log sigmoid(-m),    m = reward(chosen) - reward(rejected)

    In the Bradley-Terry model the chosen response wins with probability sigmoid(m); ``s`` is the share of flipped
    labels. With KL and ``s`` 0 the loss is DPO, with ``s`` above 0 cDPO, with another divergence f-DPO. It is log 2 at
    m = 0, grows like |m|, and does not overflow before ``m`` does. For a margin of inf it is 0 (inf with label
    smoothing), for -inf it is inf, and it is NaN if both rewards are the same infinity.

    Args:
        chosen_log_ratio: log p - log q of each chosen response, from ``response_log_ratio``.
        rejected_log_ratio: the same for each rejected response.
        beta: nats of reward paid for one unit of the divergence.
        divergence: the divergence that implies the reward: a name of ``DIVERGENCES``, or a record.
        label_smoothing: the assumed share of wrong labels, from 0 to below 1/2.

    Raises:
        ShapeError: if the log ratios are not two vectors of one length.
        OptionError: if ``label_smoothing`` is outside its range, or as ``implicit_reward``.
        DetachedError: if gradients are enabled and neither log ratio carries one.
        UnknownNameError: if there is no such divergence.

    References:
        Rafailov et al., "Direct Preference Optimization" (2023), https://arxiv.org/abs/2305.18290
        Mitchell, "A note on DPO with noisy preferences & relationship to IPO" (2023),
        https://ericmitchell.ai/cdpo.pdf
    """
    if not 0 <= label_smoothing < 0.5:
        raise OptionError(
            f"label_smoothing is {label_smoothing}; give the share of wrong labels, from 0 to below 0.5"
        )
    require_gradient(chosen_log_ratio, rejected_log_ratio, name="chosen_log_ratio")
    log_ratios = chosen_log_ratio, rejected_log_ratio
    chosen, rejected = (implicit_reward(x.detach(), beta=beta, divergence=divergence) for x in log_ratios)
    # The gradient 0 of an infinite margin would be multiplied by the infinite slope of a score that overflows.
    is_constant = (chosen - rejected == inf) & (label_smoothing == 0)
    margin = torch.sub(
        *(
            implicit_reward(torch.where(is_constant, x.detach(), x), beta=beta, divergence=divergence)
            for x in log_ratios
        )
    )
    loss = -logsigmoid(margin)
    if label_smoothing:  # with 0 smoothing, an infinite margin would give 0 times inf
        loss = (1 - label_smoothing) * loss - label_smoothing * logsigmoid(-margin)
    return PreferenceLoss(loss, chosen, rejected)


def _record_with_score(divergence: str | Divergence) -> Divergence:
    """The record of a divergence that implies a reward.

    Raises:
        OptionError: if it implies none.
    """
    if isinstance(divergence, str) and divergence in NO_REWARD:
        raise OptionError(f"{divergence} implies no reward: {NO_REWARD[divergence]}")
    record = find_divergence(divergence)
    if divergence in DIVERGENCES:
        return record
    if record.finish is not identity:
        raise OptionError(
            "the divergence implies no reward: it is a function of a sum, and only the sum has a score; "
            "give the record of the sum"
        )
    u = torch.linspace(-6, 6, 97, dtype=torch.float64)
    is_flat = ~(record.score(u).diff() > 0)
    if is_flat.any():
        first_flat = u[:-1][is_flat][0].item()
        raise OptionError(
            f"the divergence implies no reward: its score does not rise strictly at a log ratio of {first_flat:g}, "
            "so many policies share one reward; give one whose generator is strictly convex"
        )
    return record
