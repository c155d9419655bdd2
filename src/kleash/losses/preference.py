"""Preference losses: the implicit reward of a policy relative to its reference, DPO and f-DPO."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor
from torch.nn.functional import logsigmoid

from kleash.arguments import validated
from kleash.divergences import DIVERGENCES, Divergence
from kleash.divergences.table import identity
from kleash.errors import OptionError, ShapeError
from kleash.losses.surrogate import require_gradient
from kleash.masking import as_mask
from kleash.precision import at_least_float32
from kleash.registry import look_up

NO_REWARD: Mapping[str, str] = MappingProxyType(
    {
        "total_variation": "its score only tells which of the two is ahead, so many policies share one reward",
        "hellinger": "it is the root of a divergence, and a root has no score of its own; "
        "give alpha_record(0.5), four times its square",
    }
)
"""The divergences of the table that imply no reward, and why."""


class PreferenceLoss(NamedTuple):
    """A loss per pair, and the two implied rewards that went into it."""

    loss: Float[Tensor, "pairs"]
    """In nats; carries the gradient."""
    chosen_reward: Float[Tensor, "pairs"]
    """Detached; known up to a number per prompt, so only differences within a pair mean something."""
    rejected_reward: Float[Tensor, "pairs"]
    """Likewise."""


@validated
def response_log_ratio(
    token_logp: Float[Tensor, "batch_p time_p"],
    token_logq: Float[Tensor, "batch_q time_q"],
    mask: Bool[Tensor, "batch_m time_m"] | Integer[Tensor, "batch_m time_m"],
) -> Float[Tensor, "batch_p"]:
    """log p(response) - log q(response) in nats: the sum of the log ratios of its tokens.

    Summed in float32 at least. What is masked (the prompt, padding, NaN) is not read; a response
    without tokens has ratio 0. It is a number about *this* response. Only averaged over responses
    that ``p`` itself has drawn is it a KL divergence; over a preference data set it is none.

    Args:
        token_logp: log-probabilities of the response's tokens under the policy.
        token_logq: the same under the reference.
        mask: true (or 1) for the tokens of the response.

    Raises:
        ShapeError: if the three differ in shape, or are not [batch, time].
    """
    shapes = [tuple(x.shape) for x in (token_logp, token_logq, mask)]
    if len(set(shapes)) > 1 or len(shapes[0]) != 2:
        raise ShapeError(
            f"token_logp is {shapes[0]}, token_logq {shapes[1]} and mask {shapes[2]}; "
            "give all three as [batch, time]"
        )
    counts = as_mask(mask)
    selected = [torch.where(counts, at_least_float32(x), 0.0) for x in (token_logp, token_logq)]
    return (selected[0] - selected[1]).sum(-1)


@validated
def implicit_reward(
    log_ratio: Float[Tensor, "*responses"], *, beta: float, divergence: str | Divergence = "kl"
) -> Float[Tensor, "*responses"]:
    """The reward for which the policy is already optimal, up to a number per prompt.

        reward(y) = beta score(u) + c(prompt),    u = log p(y) - log q(y)

    The policy that maximises ``E_p reward - beta D(p || q)`` has ``reward = beta g'(p/q) + c``, where
    ``D = E_q g(p/q)``; and ``g' = f + f'`` is the ``score`` of the divergence's record. For the KL it is
    u itself: ``p = q exp(reward / beta) / Z``. Where g' stays finite as p vanishes (chi_squared), the
    policy may rule a poor response out, and the equation holds among those that it keeps.

    Nothing is clamped. The scores of "reverse_kl" and "jeffreys" overflow to -inf where u is far
    below 0, those of "chi_squared" to inf where it is far above (in float32 from |u| of 88 on, which the
    sum over a long response reaches).

    Args:
        log_ratio: one per response, as ``response_log_ratio`` sums it.
        beta: nats of reward paid for one unit of the divergence; finite, above 0.
        divergence: a name of ``DIVERGENCES``, or a record.

    Raises:
        UnknownNameError: if there is no such divergence.
        OptionError: if it implies no reward (its score does not rise strictly), or ``beta`` is not
            a finite number above 0.

    References:
        Rafailov et al., "Direct Preference Optimization" (2023), https://arxiv.org/abs/2305.18290
        Wang et al., "Beyond Reverse KL" (2023), https://arxiv.org/abs/2309.16240
    """
    if not 0 < beta < float("inf"):
        raise OptionError(f"beta is {beta}; give a finite number above 0")
    return beta * _record_with_score(divergence).score(at_least_float32(log_ratio))


@validated
def dpo_loss(
    chosen_log_ratio: Float[Tensor, "pairs_c"],
    rejected_log_ratio: Float[Tensor, "pairs_r"],
    *,
    beta: float,
    divergence: str | Divergence = "kl",
    label_smoothing: float = 0.0,
) -> PreferenceLoss:
    """The DPO loss in nats per pair: the Bradley-Terry negative log-likelihood of the implicit rewards.

        -(1 - s) log sigmoid(m) - s log sigmoid(-m),    m = reward(chosen) - reward(rejected)

    The negative log-likelihood of the Bradley-Terry model, in which the first wins with probability
    sigmoid(m), after a share ``s`` of the labels was flipped. With KL and ``s`` 0 it is DPO, with ``s``
    above 0 cDPO, with another divergence f-DPO. At m = 0 it is log 2; it never overflows before
    ``m`` does, and grows as |m|. A margin of inf gives 0 (inf where labels are smoothed), of -inf gives
    inf, and NaN where both rewards are infinite on the same side.

    Args:
        chosen_log_ratio: log p - log q of each preferred response, as ``response_log_ratio`` sums it.
        rejected_log_ratio: the same of the responses that lost.
        beta: nats of reward paid for one unit of the divergence.
        divergence: that which the reward is implied by: a name of ``DIVERGENCES``, or a record.
        label_smoothing: the share of labels believed to be wrong, from 0 to below 1/2.

    Raises:
        ShapeError: if there are not as many rejected as chosen ones, one number each.
        OptionError: if ``label_smoothing`` is outside its range, or as ``implicit_reward``.
        DetachedError: if gradients are enabled and neither log ratio carries one.
        UnknownNameError: if there is no such divergence.

    References:
        Rafailov et al., "Direct Preference Optimization" (2023), https://arxiv.org/abs/2305.18290
        Mitchell, "A note on DPO with noisy preferences & relationship to IPO" (2023),
        https://ericmitchell.ai/cdpo.pdf
    """
    shapes = tuple(chosen_log_ratio.shape), tuple(rejected_log_ratio.shape)
    if shapes[0] != shapes[1] or len(shapes[0]) != 1:
        raise ShapeError(
            f"chosen_log_ratio is {shapes[0]} and rejected_log_ratio {shapes[1]}; give one number per pair"
        )
    if not 0 <= label_smoothing < 0.5:
        raise OptionError(
            f"label_smoothing is {label_smoothing}; give the share of wrong labels, from 0 to below 0.5"
        )
    require_gradient(chosen_log_ratio, rejected_log_ratio, name="chosen_log_ratio")
    chosen = implicit_reward(chosen_log_ratio, beta=beta, divergence=divergence)
    rejected = implicit_reward(rejected_log_ratio, beta=beta, divergence=divergence)
    loss = -logsigmoid(chosen - rejected)
    if label_smoothing:  # without it, 0 times inf where the margin is infinite
        loss = (1 - label_smoothing) * loss - label_smoothing * logsigmoid(rejected - chosen)
    return PreferenceLoss(loss, chosen.detach(), rejected.detach())


def _record_with_score(divergence: str | Divergence) -> Divergence:
    """The record of a divergence that implies a reward.

    Raises:
        OptionError: if it implies none.
    """
    if isinstance(divergence, str):
        record = look_up(DIVERGENCES, divergence, "divergence")
        if divergence in NO_REWARD:
            raise OptionError(f"{divergence} implies no reward: {NO_REWARD[divergence]}")
        return record
    if divergence.finish is not identity:
        raise OptionError(
            "the divergence implies no reward: it is a function of a sum, and only the sum has a score; "
            "give the record of the sum"
        )
    _require_increasing_score(divergence)
    return divergence


def _require_increasing_score(record: Divergence) -> None:
    """Raise OptionError unless the score of a user's record increases strictly on a grid of log ratios."""
    u = torch.linspace(-6, 6, 97, dtype=torch.float64)
    flat = ~(record.score(u).diff() > 0)
    if flat.any():
        begin = u[:-1][flat][0].item()
        raise OptionError(
            f"the divergence implies no reward: its score does not rise strictly at a log ratio of {begin:g}, "
            "so many policies share one reward; give one whose generator is strictly convex"
        )
