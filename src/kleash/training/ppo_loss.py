"""The mathematics of a PPO step: where the KL term enters advantages and losses."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

from kleash.estimators import k3, sampled_kl
from kleash.jobs import PPOJob
from kleash.leash import generalised_advantages, rewards_to_go, shape_rewards
from kleash.leash.groups import whitened_with_std
from kleash.linear import TokenTerms
from kleash.losses import kl_loss
from kleash.masking import sum_over_ranks


@dataclass(frozen=True, eq=False, kw_only=True)
class Scored:
    """A process's responses of a step as policy, critic and reference see them before the updates.

    Tensors of tokens are [responses, steps]; they are not read where ``mask`` is false.
    """

    scores: Float[Tensor, "responses"]
    """Rewards, without KL penalty."""
    token_logp: Float[Tensor, "responses steps"]
    token_logq: Float[Tensor, "responses steps"]
    token_kl: Float[Tensor, "responses steps"]
    """KL(policy || reference), exact."""
    values: Float[Tensor, "responses steps"]
    """The critic's value before each token."""
    mask: Bool[Tensor, "responses steps"]


class LearningSignals(NamedTuple):
    """Advantages, returns and the scaled beta of a step, without gradients."""

    advantages: Float[Tensor, "responses steps"]
    returns: Float[Tensor, "responses steps"]
    """The critic's targets."""
    scaled_beta: float
    """Beta on the scale of the (whitened) advantages: the weight of KL in the loss."""


class PastTokens(NamedTuple):
    """What the updates need of the tokens of some responses, concatenated, from before the updates."""

    token_logp: Float[Tensor, " tokens"]
    values: Float[Tensor, " tokens"]
    advantages: Float[Tensor, " tokens"]
    returns: Float[Tensor, " tokens"]


def learning_signals(scored: Scored, job: PPOJob, beta: float) -> LearningSignals:
    """Advantages, with the KL penalty placed as the job says.

    The KL of a token's own position belongs in the loss, with its gradient (``policy_objective``); only k1
    can be used as a reward at the same position. The KL of *later* positions is a consequence of the token and is
    credited to it like a reward:

    | kl_place, kl_scope, kl | rewards | added to the advantages |
    | reward, sequence, k1 | -beta k1_t, score at the end | |
    | reward, sequence, exact | -beta gamma D_t+1, score at the end | |
    | loss, sequence | score at the end | -beta (sum of D_j, j > t, minus the mean over the other responses) |
    | loss, token | score at the end | |

    D is the exact KL, or the estimator that the job names. ``whiten`` scales the sum of all parts to standard deviation
    1, and the weight of KL in the loss is divided by the same number, so that beta stays in units of reward per nat.

    On several processes a collective.

    Args:
        scored: this process's responses; the number of steps is the same on all processes.
        job: placement, scope and estimator of the KL term.
        beta: the current beta.
    """
    token_kl = (
        scored.token_kl if job.kl == "exact" else sampled_kl(scored.token_logp, scored.token_logq, job.kl)
    )
    token_kl = torch.where(scored.mask, token_kl, 0.0)
    next_kl = pad(token_kl[:, 1:], (0, 1))
    penalised_kl = token_kl if job.kl == "k1" else job.gamma * next_kl
    reward_beta = beta if job.kl_place == "reward" else 0.0
    gae = generalised_advantages(
        shape_rewards(scored.scores, penalised_kl, scored.mask, beta=reward_beta),
        scored.values,
        scored.mask,
        gamma=job.gamma,
        gae_lambda=job.gae_lambda,
    )
    advantages = gae.advantages
    if job.kl_place == "loss" and job.kl_scope == "sequence" and beta > 0:
        advantages = advantages - beta * minus_leave_one_out_mean(
            rewards_to_go(next_kl, scored.mask), scored.mask
        )
    if not job.whiten:
        return LearningSignals(advantages, gae.returns, beta)
    whitened, std = whitened_with_std(advantages, scored.mask)
    return LearningSignals(whitened, gae.returns, beta / std.item())


def minus_leave_one_out_mean(
    costs: Float[Tensor, "responses steps"], mask: Bool[Tensor, "responses steps"]
) -> Float[Tensor, "responses steps"]:
    """Each cost minus the mean of the other responses' costs at the same position: a leave-one-out baseline.

    The baseline does not depend on the response itself, so the gradient stays unbiased. A cost is unchanged where
    there is no other response. Masked costs are 0, and the result is not read there. A collective.
    """
    total, count = sum_over_ranks(costs.sum(0)), sum_over_ranks(mask.sum(0))
    return costs - (total - costs) / (count - 1).clamp(min=1)


def policy_objective(
    past: PastTokens, job: PPOJob, scaled_beta: float
) -> Callable[[TokenTerms, slice], Tensor]:
    """The policy loss of each token, as an objective for ``linear_objective``.

        ratio = p(x) / p_old(x)
        loss  = - min(ratio A, clip(ratio, 1 - c, 1 + c) A) + scaled_beta KL - ent_coef H

    A is the advantage. It contains the reward and, with scope "sequence", the KL of later tokens. KL is that of the
    token itself:

    | kl | value | gradient |
    | exact | D, over the whole vocabulary | that of D, on- and off-policy |
    | k1, k2, k3 | ratio times the estimator | ratio u on log p: that of D in expectation, also off-policy |
    | k1 in the reward | 0 | none: the KL is in A |

    Args:
        past: data of the rollout for the tokens.
        job: clip range, entropy coefficient and KL options.
        scaled_beta: beta times the scale of whitened advantages.
    """

    def token_losses(terms: TokenTerms, rows: slice) -> Tensor:
        logp, logq, exact, entropy = terms
        ratio = torch.exp(logp - past.token_logp[rows])
        loss = -clipped_gain(ratio, past.advantages[rows], job.clip_range)
        if scaled_beta > 0 and job.kl == "exact":
            loss = loss + scaled_beta * exact
        elif scaled_beta > 0 and job.kl_place == "loss":
            every = torch.ones_like(logp, dtype=torch.bool)
            loss = loss + scaled_beta * kl_loss(logp, logq, every, estimator=job.kl, weights=ratio.detach())
        if job.ent_coef > 0:
            loss = loss - job.ent_coef * entropy
        return loss

    return token_losses


def clipped_gain(
    ratio: Float[Tensor, " tokens"], advantages: Float[Tensor, " tokens"], clip: float
) -> Float[Tensor, " tokens"]:
    """``min(ratio A, clip(ratio, 1 - clip, 1 + clip) A)``: PPO's clipped surrogate.

    References:
        Schulman et al., "Proximal Policy Optimization Algorithms" (2017), https://arxiv.org/abs/1707.06347
    """
    return torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)


def value_losses(
    values: Float[Tensor, " tokens"], past: PastTokens, clip: float | None
) -> Float[Tensor, " tokens"]:
    """Half the squared error of each value; with ``clip``, at least that of the value clipped to old value +- clip."""
    errors = (values - past.returns).square()
    if clip is not None:
        clipped_values = past.values + (values - past.values).clamp(-clip, clip)
        errors = torch.maximum(errors, (clipped_values - past.returns).square())
    return errors / 2


def update_sums(terms: TokenTerms, values: Tensor, past: PastTokens, job: PPOJob) -> dict[str, float]:
    """Sums over tokens, for metrics; "ratio_max" is a maximum, "update_kl" the k3 of the update."""
    logp, new = (x.detach().cpu().double() for x in (terms.token_logp, values))
    past = PastTokens(*(x.cpu().double() for x in past))
    log_ratio = logp - past.token_logp
    ratio = log_ratio.exp()
    gain = clipped_gain(ratio, past.advantages, job.clip_range)
    per_token = {
        "tokens": torch.ones_like(ratio),
        "policy_loss": -gain,
        "value_loss": value_losses(new, past, job.clip_range_value),
        "ratio": ratio,
        "clipped": (gain < ratio * past.advantages).double(),
        "value_clipped": ((new - past.values).abs() > (job.clip_range_value or torch.inf)).double(),
        "update_kl": k3(-log_ratio),
    }
    return {name: x.sum().item() for name, x in per_token.items()} | {"ratio_max": ratio.max().item()}
