"""Advantages and returns from rewards and KL: where the KL term enters the policy gradient."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

from kleash.estimators import sampled_kl
from kleash.jobs import PPOJob
from kleash.leash import generalised_advantages, rewards_to_go, shape_rewards, whiten
from kleash.masking import mean_of
from kleash.training.process_group import all_reduce_sum


class LearningSignals(NamedTuple):
    """Advantages, returns and the scaled beta of a step, without gradients."""

    advantages: Float[Tensor, "responses steps"]
    returns: Float[Tensor, "responses steps"]
    """The critic's targets."""
    scaled_beta: float
    """Beta on the scale of the (whitened) advantages: the weight of KL in the loss."""


class RewardSignals(NamedTuple):
    """Scores, log-probabilities, KL and values of a step's responses."""

    scores: Float[Tensor, "responses"]
    token_logp: Float[Tensor, "responses steps"]
    token_logq: Float[Tensor, "responses steps"]
    token_kl: Float[Tensor, "responses steps"]
    """KL(policy || reference), exact."""
    values: Float[Tensor, "responses steps"]
    mask: Bool[Tensor, "responses steps"]


def learning_signals(signals: RewardSignals, job: PPOJob, beta: float) -> LearningSignals:
    """Advantages, with the KL penalty placed as the job says.

    The KL of a token's own position belongs in the loss, with its gradient (``ppo_losses.policy_objective``); only k1
    can be used as a reward at the same position. The KL of *later* positions is a consequence of the token and is
    credited to it like a reward:

    | kl_place, kl_scope, kl | rewards | added to the advantages |
    | reward, sequence, k1 | -beta k1_t, score at the end | |
    | reward, sequence, exact | -beta D_t+1, score at the end | |
    | loss, sequence | score at the end | -beta (sum of D_j, j > t, minus the mean over the other responses) |
    | loss, token | score at the end | |

    D is the exact KL, or the estimator that the job names. ``whiten`` scales the sum of all parts to standard deviation
    1, and the weight of KL in the loss is divided by the same number, so that beta stays in units of reward per nat.

    On several processes a collective.

    Args:
        signals: this process's responses; the number of steps is the same on all processes.
        job: placement, scope and estimator of the KL term.
        beta: the current beta.
    """
    token_kl = (
        signals.token_kl if job.kl == "exact" else sampled_kl(signals.token_logp, signals.token_logq, job.kl)
    )
    token_kl = torch.where(signals.mask, token_kl, 0.0)
    next_kl = torch.where(signals.mask, pad(token_kl[:, 1:], (0, 1)), 0.0)
    penalised_kl = token_kl if job.kl == "k1" else next_kl
    reward_beta = beta if job.kl_place == "reward" else 0.0
    gae = generalised_advantages(
        shape_rewards(signals.scores, penalised_kl, signals.mask, beta=reward_beta),
        signals.values,
        signals.mask,
        gamma=job.gamma,
        gae_lambda=job.gae_lambda,
    )
    advantages = gae.advantages
    if job.kl_place == "loss" and job.kl_scope == "sequence" and beta > 0:
        advantages = advantages - beta * minus_leave_one_out_mean(
            rewards_to_go(next_kl, signals.mask), signals.mask
        )
    if not job.whiten:
        return LearningSignals(advantages, gae.returns, beta)
    whitened, scale = whiten_with_scale(advantages, signals.mask)
    return LearningSignals(whitened, gae.returns, beta * scale)


def minus_leave_one_out_mean(
    costs: Float[Tensor, "responses steps"], mask: Bool[Tensor, "responses steps"]
) -> Float[Tensor, "responses steps"]:
    """Each cost minus the mean of the other responses' costs at the same position: a leave-one-out baseline.

    The baseline does not depend on the response itself, so the gradient stays unbiased. A cost is unchanged where
    there is no other response. A collective.
    """
    counted = torch.where(mask, costs, 0.0)
    total, count = all_reduce_sum(counted.sum(0)), all_reduce_sum(mask.sum(0))
    mean_of_others = (total - counted) / (count - 1).clamp(min=1)
    return torch.where(mask, counted - mean_of_others, 0.0)


def whiten_with_scale(
    values: Float[Tensor, "responses steps"], mask: Bool[Tensor, "responses steps"]
) -> tuple[Float[Tensor, "responses steps"], float]:
    """``whiten`` and its scale factor (1 if all values are equal). A collective."""
    whitened = whiten(values, mask)
    centred = torch.where(mask, values - mean_of(values, mask).across_ranks().value, 0.0)
    squares, products = (mean_of(whitened * x, mask).across_ranks().total.item() for x in (whitened, centred))
    return whitened, squares / products if squares > 0 else 1.0
