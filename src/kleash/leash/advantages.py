"""Generalised advantage estimation and discounted returns over masked tokens."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from kleash.arguments import validated
from kleash.estimators.weights import detached_where
from kleash.masking import as_mask
from kleash.registry import require_share


class Advantages(NamedTuple):
    """Advantages for the policy loss and returns for the critic; both are detached."""

    advantages: Float[Tensor, "sequences steps"]
    """Advantage of each token over the critic's value; 0 where masked."""
    returns: Float[Tensor, "sequences steps"]
    """The critic's targets, advantages + values; 0 where masked."""


@validated
def generalised_advantages(
    rewards: Float[Tensor, "sequences steps"],
    values: Float[Tensor, "sequences steps"],
    mask: Bool[Tensor, "sequences steps"] | Integer[Tensor, "sequences steps"],
    *,
    gamma: float = 1.0,
    gae_lambda: float = 1.0,
) -> Advantages:
    """Generalised advantage estimation (GAE) over unmasked tokens.

        delta_t = reward_t + gamma value_next(t) - value_t
        advantage_t = delta_t + gamma gae_lambda advantage_next(t),    return_t = advantage_t + value_t

    ``next(t)`` is the next *unmasked* token: tool output within a response is not a step, is not discounted and needs
    no value. The value after the last token is 0, also for a response that was truncated by a length limit.

    With gae_lambda 1 the advantage is the return minus the value, and the gradient is unbiased for every critic. Below
    1, errors of the critic bias it; with 0, all rewards after the next token come from the critic.

    Masked rewards and values are not read (NaN), and the results are 0 there.

    Args:
        rewards: one per token (``shape_rewards``).
        values: the critic's expected return before each token.
        mask: true (or 1) for the tokens that the policy generated.
        gamma: discount factor, 0 to 1.
        gae_lambda: lambda of GAE, 0 to 1.

    Raises:
        OptionError: if ``gamma`` or ``gae_lambda`` is outside 0 to 1.
        ShapeError: if the three differ in shape, or are not [sequences, steps].

    References:
        Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage Estimation" (2015),
        https://arxiv.org/abs/1506.02438
    """
    require_share(gamma=gamma, gae_lambda=gae_lambda)
    is_counted = as_mask(mask)
    token_rewards, critic_values = detached_where(rewards, is_counted), detached_where(values, is_counted)
    delta = token_rewards + gamma * _next_value(critic_values, is_counted) - critic_values
    advantages = _discounted_sum(torch.where(is_counted, delta, 0.0), is_counted, gamma * gae_lambda)
    return Advantages(advantages, torch.where(is_counted, advantages + critic_values, 0.0))


@validated
def rewards_to_go(
    rewards: Float[Tensor, "sequences steps"],
    mask: Bool[Tensor, "sequences steps"] | Integer[Tensor, "sequences steps"],
    *,
    gamma: float = 1.0,
) -> Float[Tensor, "sequences steps"]:
    """The discounted sum of rewards from each token on; masked tokens are not steps.

        to_go_t = reward_t + gamma to_go_next(t)

    Detached. Masked rewards are not read, and the result is 0 there.

    Raises:
        OptionError: if ``gamma`` is outside 0 to 1.
        ShapeError: if the two differ in shape, or are not [sequences, steps].
    """
    require_share(gamma=gamma)
    is_counted = as_mask(mask)
    return _discounted_sum(detached_where(rewards, is_counted), is_counted, gamma)


def _discounted_sum(values: Tensor, is_counted: Tensor, factor: float) -> Tensor:
    """``x_t = values_t + (factor if t counts else 1) * x_t+1`` for unmasked t, and 0 for masked t.

    By doubling: each round doubles the number of steps that an entry of ``total`` sums; ``decay`` is the factor on the
    steps after them. 8192 steps take 13 rounds over the whole batch instead of 8192.
    """
    total, decay = values, torch.ones_like(values).masked_fill(is_counted, factor)
    steps, stride = values.shape[-1], 1
    while stride < steps:
        next_total, next_decay = (
            torch.nn.functional.pad(x[..., stride:], (0, stride)) for x in (total, decay)
        )
        total, decay = total + decay * next_total, decay * next_decay
        stride *= 2
    return torch.where(is_counted, total, 0.0)


def _next_value(values: Tensor, is_counted: Tensor) -> Tensor:
    """The value of the next unmasked step; 0 after the last."""
    steps = is_counted.shape[-1]
    positions = torch.where(is_counted, torch.arange(steps, device=is_counted.device), steps)
    this_or_next = positions.flip(-1).cummin(-1).values.flip(-1)
    next_position = torch.nn.functional.pad(this_or_next[..., 1:], (0, 1), value=steps)
    return torch.nn.functional.pad(values, (0, 1)).gather(-1, next_position)
