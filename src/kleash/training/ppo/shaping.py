"""From scores and KLs to advantages: where the leash enters what is learned from."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

from kleash.estimators import sampled_kl
from kleash.leash import generalised_advantages, rewards_to_go, shape_rewards, whiten
from kleash.masking import mean_of
from kleash.records import PPOJob
from kleash.training.ranks import summed


class Shaped(NamedTuple):
    """What a step's updates learn from; nothing carries a gradient."""

    advantages: Float[Tensor, "responses steps"]
    returns: Float[Tensor, "responses steps"]
    """The critic's targets."""
    price: float
    """What a nat of KL costs in the loss: beta, on the scale that whitening gave the advantages."""


class Said(NamedTuple):
    """What a step's responses are judged by."""

    scores: Float[Tensor, "responses"]
    token_logp: Float[Tensor, "responses steps"]
    token_logq: Float[Tensor, "responses steps"]
    token_kl: Float[Tensor, "responses steps"]
    """KL(policy || reference), exact."""
    values: Float[Tensor, "responses steps"]
    mask: Bool[Tensor, "responses steps"]


def shape(said: Said, job: PPOJob, beta: float) -> Shaped:
    """Advantages with the leash where the job wants it.

    A token's own KL belongs into the loss, with its gradient (``losses.objective``); only k1 may be rewarded. What a
    token does to the KL *after* it is a consequence of choosing it, as its reward is:

    | kl_place, kl_scope, kl | rewards | added to the advantages |
    | reward, sequence, k1 | -beta k1_t, score at the end | |
    | reward, sequence, exact | -beta D_t+1, score at the end | |
    | loss, sequence | score at the end | -beta (sum of D_j, j > t, less the mean of the others') |
    | loss, token | score at the end | |

    D is the exact KL, or k3 if that is asked for. With ``whiten`` the advantages are brought to standard
    deviation 1 in the end, all their parts together, and what the loss charges for KL is divided by the same number:
    beta stays the price of a nat in units of reward.

    On several processes a collective.

    Args:
        said: this process's responses; steps alike on all processes.
        job: how the leash is made.
        beta: how tight it is.
    """
    log_ratio = torch.where(said.mask, said.token_logp - said.token_logq, 0.0)
    token_kl = said.token_kl if job.kl == "exact" else sampled_kl(said.token_logp, said.token_logq, "k3")
    led_to = torch.where(said.mask, pad(torch.where(said.mask, token_kl, 0.0)[:, 1:], (0, 1)), 0.0)
    charged = log_ratio if job.kl == "k1" else led_to
    rewarded = beta if job.kl_place == "reward" else 0.0
    found = generalised_advantages(
        shape_rewards(said.scores, charged, said.mask, beta=rewarded),
        said.values,
        said.mask,
        gamma=job.gamma,
        gae_lambda=job.gae_lambda,
    )
    advantages = found.advantages
    if job.kl_place == "loss" and job.kl_scope == "sequence" and beta > 0:
        advantages = advantages - beta * against_the_others(rewards_to_go(led_to, said.mask), said.mask)
    if not job.whiten:
        return Shaped(advantages, found.returns, beta)
    whitened, scale = whitened_by(advantages, said.mask)
    return Shaped(whitened, found.returns, beta * scale)


def against_the_others(
    costs: Float[Tensor, "responses steps"], mask: Bool[Tensor, "responses steps"]
) -> Float[Tensor, "responses steps"]:
    """Each cost less the mean of the other responses' at the same position; as it is where there is no other.

    The others know nothing of this response, so that nothing is biased; most of what is common to a position
    (the later, the less is to come) goes. A collective.
    """
    counted = torch.where(mask, costs, 0.0)
    total, count = summed(counted.sum(0)), summed(mask.sum(0))
    others = (total - counted) / (count - 1).clamp(min=1)
    return torch.where(mask, counted - others, 0.0)


def whitened_by(
    values: Float[Tensor, "responses steps"], mask: Bool[Tensor, "responses steps"]
) -> tuple[Float[Tensor, "responses steps"], float]:
    """``whiten``, and the factor that it multiplied by; 1 where all values are equal. A collective."""
    whitened = whiten(values, mask)
    apart = torch.where(mask, values - mean_of(values, mask).across_ranks().value, 0.0)
    squares, products = (mean_of(whitened * x, mask).across_ranks().total.item() for x in (whitened, apart))
    return whitened, squares / products if squares > 0 else 1.0
