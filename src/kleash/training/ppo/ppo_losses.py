"""The losses of a PPO update: the clipped policy loss with its KL term, and the value loss."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kleash.estimators import k3
from kleash.jobs import PPOJob
from kleash.linear import TokenTerms
from kleash.losses import kl_loss
from kleash.training.ppo.policy import Objective


class RolloutTokens(NamedTuple):
    """Per-token data of the rollout, all responses concatenated."""

    token_logp: Float[Tensor, " tokens"]
    values: Float[Tensor, " tokens"]
    advantages: Float[Tensor, " tokens"]
    returns: Float[Tensor, " tokens"]
    is_counted: Bool[Tensor, " tokens"]
    """True for tokens in the loss; all False in a micro-batch that only keeps processes in step."""


def policy_objective(past: RolloutTokens, job: PPOJob, scaled_beta: float) -> Objective:
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
        is_counted = past.is_counted[rows]
        logp, logq, exact, entropy = (torch.where(is_counted, x, 0.0) for x in terms)
        ratio = torch.exp(logp - torch.where(is_counted, past.token_logp[rows], 0.0))
        loss = -clipped_gain(ratio, torch.where(is_counted, past.advantages[rows], 0.0), job.clip_range)
        if scaled_beta > 0 and job.kl == "exact":
            loss = loss + scaled_beta * exact
        elif scaled_beta > 0 and job.kl_place == "loss":
            loss = loss + scaled_beta * kl_loss(
                logp, logq, is_counted, estimator=job.kl, weights=ratio.detach()
            )
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
    values: Float[Tensor, " tokens"], past: RolloutTokens, clip: float | None
) -> Float[Tensor, " tokens"]:
    """Half the squared error of each value; with ``clip``, at least that of the value clipped to old value +- clip."""
    new, old, target = (torch.where(past.is_counted, x, 0.0) for x in (values, past.values, past.returns))
    errors = (new - target).square()
    if clip is not None:
        clipped_values = old + (new - old).clamp(-clip, clip)
        errors = torch.maximum(errors, (clipped_values - target).square())
    return errors / 2


def update_sums(terms: TokenTerms, values: Tensor, past: RolloutTokens, job: PPOJob) -> dict[str, float]:
    """Sums over the tokens in the loss, for metrics; "ratio_max" is a maximum, "update_kl" the k3 of the update."""
    logp, new = (x.detach().cpu().double() for x in (terms.token_logp, values))
    past = RolloutTokens(*(x.cpu().double() for x in past[:4]), is_counted=past.is_counted.cpu())
    log_ratio = torch.where(past.is_counted, logp - past.token_logp, 0.0)
    ratio = log_ratio.exp()
    gain = clipped_gain(ratio, past.advantages, job.clip_range)
    max_change = torch.inf if job.clip_range_value is None else job.clip_range_value
    per_token = {
        "tokens": torch.ones_like(ratio),
        "policy_loss": -gain,
        "value_loss": value_losses(new, past, job.clip_range_value),
        "ratio": ratio,
        "clipped": (gain < ratio * past.advantages).double(),
        "value_clipped": ((new - past.values).abs() > max_change).double(),
        "update_kl": k3(-log_ratio),
    }
    sums = {name: torch.where(past.is_counted, x, 0.0).sum().item() for name, x in per_token.items()}
    return {**sums, "ratio_max": torch.where(past.is_counted, ratio, 0.0).max().item()}
