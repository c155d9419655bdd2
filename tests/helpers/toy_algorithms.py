"""Whole algorithms in the toy world, from kleash's own functions: name -> expected update."""

from collections.abc import Callable

import torch
from torch import Tensor
from toy_mdp import (
    BETA,
    GROUP,
    OLD,
    TOKENS,
    WRONG_VALUES,
    Said,
    expected_update,
    in_the_loss,
    k1,
    rewards_of,
    surrogate,
    true_values,
    values_at,
)

from kleash.estimators import ImportanceWeights, importance_weights, sampled_kl
from kleash.leash import (
    TrustRegion,
    binary_divergence_mask,
    generalised_advantages,
    geometric_mask,
    group_advantages,
    kl_mask,
    leave_one_out_advantages,
    off_policy_sequence_mask,
    shape_rewards,
    truncated_weights,
    window_weights,
)

EVERY = torch.arange(len(TOKENS))


def ppo(
    kl: str,
    place: str,
    *,
    scope="sequence",
    gae_lambda=1.0,
    critic: Tensor | None = WRONG_VALUES,
    clip=0.2,
    old=None,
) -> Tensor:
    """One minibatch: advantages by GAE, the clipped surrogate, the KL in the reward or in the loss."""

    def algorithm(of: Said) -> Tensor:
        in_reward = {"k1": k1(of), "exact": of.token_kl, "k3": sampled_kl(of.token_logp, of.reference_logp)}
        cost = in_reward[kl] if place != "loss" else torch.zeros_like(of.token_kl)
        rewards = shape_rewards(of.scores, cost, of.mask, beta=BETA)
        values = torch.zeros_like(rewards) if critic is None else values_at(critic, EVERY)
        advantages = generalised_advantages(rewards, values, of.mask, gae_lambda=gae_lambda).advantages
        loss = surrogate(of, advantages, clip)
        if place == "loss":
            return loss + in_the_loss(of, kl, scope)
        return loss + in_the_loss(of, "exact", "token") if place == "both" else loss

    return expected_update(algorithm, old=old)


def rloo(kl: str, place: str, *, scope: str = "sequence", backpropagated: bool = False) -> Tensor:
    """Groups of two, each response against the other."""

    def in_loss(of: Said) -> Tensor:
        if not backpropagated:
            return in_the_loss(of, kl, scope)
        # As trainers do it; a KLTerm refuses k1, and k3 unless it is told whose gradient that is.
        pair = [torch.where(of.mask, x, 0.0) for x in (of.token_logp, of.reference_logp)]
        return BETA * sampled_kl(*pair, kl)

    def algorithm(of: Said) -> Tensor:
        rewards = rewards_of(of, "none" if place == "loss" else kl)
        loss = surrogate(of, leave_one_out_advantages(rewards, GROUP).unsqueeze(-1))
        if place == "loss":
            return loss + in_loss(of)
        return loss + in_the_loss(of, "exact", "token") if place == "both" else loss

    return expected_update(algorithm, group=GROUP)


def grpo(place="reward", *, aggregation="sequence_sum", scale="none", corrected=False) -> Tensor:
    """Groups of two, each response against the mean of both."""

    def algorithm(of: Said) -> Tensor:
        rewards = rewards_of(of, "none" if place == "loss" else "k1")
        advantages = group_advantages(rewards, GROUP, scale=scale, corrected=corrected)
        loss = surrogate(of, advantages.unsqueeze(-1))
        return loss + in_the_loss(of, "exact") if place == "loss" else loss

    return expected_update(algorithm, group=GROUP, aggregation=aggregation)


def weighted(level: str) -> Tensor:
    """Responses of the old policy, counted by importance weights; k1 in the reward, no clip."""
    return within(lambda of, _: region_of(_weights(of, level)))[0]


def region_of(weights: ImportanceWeights) -> TrustRegion:
    """Plain weights as a region that removes nothing."""
    nothing = torch.zeros(())
    return TrustRegion(weights.values, weights.values > 0, nothing, nothing, weights.effective_sample_size)


def within(region: Callable[[Said, Tensor], TrustRegion], *, ratio: bool = False) -> tuple[Tensor, float]:
    """Responses of the old policy in a trust region; the update, and which share of the tokens is removed.

    ``ratio``: whether the token's ratio multiplies the loss as well, as in DPPO and OPSM, where the region has none.
    """
    removed: list[float] = []

    def algorithm(of: Said) -> Tensor:
        rewards = shape_rewards(of.scores, k1(of), of.mask, beta=BETA)
        values = values_at(true_values(), EVERY)
        advantages = generalised_advantages(rewards, values, of.mask, gae_lambda=1.0).advantages
        found = region(of, advantages)
        drawn = torch.where(of.mask, of.old_logp, 0.0).sum(-1).exp().unsqueeze(-1) * of.mask
        removed.append(1 - ((drawn * found.kept).sum() / drawn.sum()).item())
        each = surrogate(of, advantages) if ratio else -torch.where(of.mask, of.token_logp, 0.0) * advantages
        return each * found.weights

    return expected_update(algorithm, old=OLD), removed[0]


RIGHT: dict[str, Callable[[], Tensor]] = {
    "PPO, k1 in the reward": lambda: ppo("k1", "reward"),
    "PPO, exact KL in the reward, its own gradient in the loss": lambda: ppo("exact", "both"),
    "PPO, k1 in the loss, sequence scope": lambda: ppo("k1", "loss"),
    "PPO, exact KL in the loss, sequence scope": lambda: ppo("exact", "loss"),
    "PPO, k1 in the reward, lambda .95, a critic that is right": lambda: ppo(
        "k1", "reward", gae_lambda=0.95, critic=true_values()
    ),
    "RLOO, k1 in the reward": lambda: rloo("k1", "reward"),
    "RLOO, exact KL in the reward, its own gradient in the loss": lambda: rloo("exact", "both"),
    "RLOO, k1 in the loss, sequence scope": lambda: rloo("k1", "loss"),
    "RLOO, exact KL in the loss, sequence scope": lambda: rloo("exact", "loss"),
    "RLOO, k3 in the loss, sequence scope": lambda: rloo("k3", "loss"),
    "GRPO, group mean times G/(G - 1), k1 in the reward": lambda: grpo(corrected=True),
    "GRPO, group mean times G/(G - 1), exact KL in the loss": lambda: grpo("loss", corrected=True),
    "off-policy, sequence weights, k1 in the reward": lambda: weighted("sequence"),
}
"""Whose expected update is the gradient of reward - beta KL."""

DEVIATING: dict[str, Callable[[], Tensor]] = {
    "GRPO, group mean, k1 in the reward": lambda: grpo(),
    "GRPO, group mean, exact KL in the loss": lambda: grpo("loss"),
    "GRPO, group std": lambda: grpo(scale="std"),
    "GRPO, 1/length of each response": lambda: grpo(aggregation="sequence_mean", corrected=True),
    "GRPO, mean over the group's tokens": lambda: grpo(aggregation="token_mean", corrected=True),
    "PPO, lambda .95, a wrong critic": lambda: ppo("k1", "reward", gae_lambda=0.95),
    "PPO, lambda .5, a wrong critic": lambda: ppo("k1", "reward", gae_lambda=0.5),
    "PPO, responses of an older policy, not clipped": lambda: ppo("k1", "reward", old=OLD, clip=None),
    "PPO, responses of an older policy, clipped at .2": lambda: ppo("k1", "reward", old=OLD),
    "exact KL in the loss, token scope": lambda: rloo("exact", "loss", scope="token"),
    "kl_loss in the loss, token scope": lambda: rloo("k3", "loss", scope="token"),
    "exact KL in the reward alone": lambda: rloo("exact", "reward"),
    "k3 in the reward": lambda: ppo("k3", "reward"),
    "k3 backpropagated": lambda: rloo("k3", "loss", backpropagated=True),
    "k1 backpropagated": lambda: rloo("k1", "loss", backpropagated=True),
}
"""Whose is not."""


REGIONS: dict[str, Callable[[], tuple[Tensor, float]]] = {
    "sequence weights": lambda: within(lambda of, _: region_of(_weights(of, "sequence"))),
    "token weights": lambda: within(lambda of, _: region_of(_weights(of, "token"))),
    "sequence weights, capped at 1.2": lambda: within(
        lambda of, _: truncated_weights(*_sides(of), cap=1.2, level="sequence")
    ),
    "token weights, capped at 1.2": lambda: within(lambda of, _: truncated_weights(*_sides(of), cap=1.2)),
    "token ratios within .8 and 1.2 (IcePop)": lambda: within(
        lambda of, _: window_weights(*_sides(of), bounds=(0.8, 1.2))
    ),
    "sequence ratios within .8 and 1.2": lambda: within(
        lambda of, _: window_weights(*_sides(of), bounds=(0.8, 1.2), level="sequence")
    ),
    "geometric mean within .85 and 1.2, token ratio": lambda: within(
        lambda of, _: geometric_mask(*_sides(of), bounds=(0.85, 1.2)), ratio=True
    ),
    "k3 up to .016 nats, token ratio": lambda: within(
        lambda of, _: kl_mask(*_sides(of), bounds=(0.0, 0.016)), ratio=True
    ),
    "binary KL up to .01 nats (DPPO), token ratio": lambda: within(
        lambda of, toward: binary_divergence_mask(of.token_logp, of.old_logp, toward, of.mask, most=0.01),
        ratio=True,
    ),
    "OPSM beyond .02 nats per token, token ratio": lambda: within(
        lambda of, toward: off_policy_sequence_mask(of.token_logp, of.old_logp, toward, of.mask, most=0.02),
        ratio=True,
    ),
}
"""Trust regions on responses of the older policy; k1 in the reward."""


def _sides(of: Said) -> tuple[Tensor, Tensor, Tensor]:
    return of.token_logp, of.old_logp, of.mask


def _weights(of: Said, level: str) -> ImportanceWeights:
    return importance_weights(*_sides(of), level=level)
