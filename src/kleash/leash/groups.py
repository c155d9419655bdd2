"""Group-relative advantages (GRPO, RLOO) and whitening."""

from typing import Literal

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from kleash.arguments import validated
from kleash.errors import OptionError
from kleash.masking import as_mask, mean_of
from kleash.precision import at_least_float32
from kleash.registry import require_choice

Scale = Literal["none", "std"]


@validated
def group_advantages(
    rewards: Float[Tensor, "sequences"],
    groups: Integer[Tensor, "sequences"] | int,
    mask: Bool[Tensor, "sequences"] | Integer[Tensor, "sequences"] | None = None,
    *,
    scale: Scale = "none",
    corrected: bool = True,
) -> Float[Tensor, "sequences"]:
    """The advantage of each response over the mean of its prompt's responses (GRPO); detached.

        advantage_i = (reward_i - mean of its group) * G / (G - 1),    divided by the group's std with scale "std"

    A response is part of the mean that it is compared with, which reduces the expected gradient by the factor
    (G - 1) / G. ``corrected`` divides by this factor: the expected gradient is then that of the mean reward, for every
    group size.

    | | expected gradient |
    | scale "none", corrected | right; the same numbers as ``leave_one_out_advantages`` |
    | scale "none", not corrected (Dr. GRPO) | (G - 1) / G of it: unequal where groups differ in size |
    | scale "std", not corrected (GRPO) | biased: each prompt is weighted by 1 / std of its few sampled rewards |

    The std is the sample standard deviation (G - 1 in the denominator), without an added constant. Rewards that differ
    only by rounding are scaled up to a std of 1: round them first.

    | group | scale "none" | scale "std" |
    | all rewards equal, two or more | exactly 0 | exactly 0 |
    | one response | NaN (an empty comparison); 0 if not corrected | NaN |
    | a reward is NaN or inf | NaN or inf for its whole group | NaN |

    Args:
        rewards: one per response (``sequence_rewards``).
        groups: a prompt id for each response: any integers, in any order, with groups of any size; or one size for
            consecutive groups.
        mask: true (or 1) for the responses that count; masked ones get 0 and do not enter a mean. None for all.
        scale: "none" or "std".
        corrected: whether to multiply by G / (G - 1).

    Raises:
        OptionError: if the scale is unknown, or a group size is below 2 or does not divide the number of responses.
        ShapeError: if the tensors do not have one number per response.

    References:
        Shao et al., "DeepSeekMath" (2024), https://arxiv.org/abs/2402.03300
        Liu et al., "Understanding R1-Zero-Like Training" (2025), https://arxiv.org/abs/2503.20783
    """
    require_choice(("none", "std"), scale=scale)
    label = _labels(rewards, groups)
    is_counted = torch.ones_like(rewards, dtype=torch.bool) if mask is None else as_mask(mask)
    values = torch.where(is_counted, at_least_float32(rewards.detach()), 0.0)

    def over_group(values: Tensor) -> Tensor:
        return torch.zeros_like(values).index_add(0, label, values)[label]

    size = over_group(is_counted.to(values.dtype))
    deviations = values - over_group(values) / size
    result = deviations * (size / (size - 1)) if corrected else deviations
    if scale == "std":
        deviations = torch.where(is_counted, deviations, 0.0)
        result = result / (over_group(deviations.square()) / (size - 1)).sqrt()
    is_constant = _is_constant_group(values, is_counted, label) & (size > 1)
    return torch.where(is_counted & ~is_constant, result, 0.0)


@validated
def leave_one_out_advantages(
    rewards: Float[Tensor, "sequences"],
    groups: Integer[Tensor, "sequences"] | int,
    mask: Bool[Tensor, "sequences"] | Integer[Tensor, "sequences"] | None = None,
) -> Float[Tensor, "sequences"]:
    """The advantage of each response over the mean of the *other* responses to its prompt (RLOO); detached.

        advantage_i = reward_i - mean of reward_j over j != i in its group

    The mean does not depend on response i, so the expected gradient is that of the mean reward. The advantage of the
    only response to a prompt is NaN.

    Args:
        rewards: one per response (``sequence_rewards``).
        groups: a prompt id for each response, or one size for consecutive groups.
        mask: true (or 1) for the responses that count; masked ones get 0 and do not enter a mean.

    Raises:
        OptionError, ShapeError: as ``group_advantages``.

    References:
        Ahmadian et al., "Back to Basics: Revisiting REINFORCE Style Optimization" (2024),
        https://arxiv.org/abs/2402.14740
    """
    return group_advantages(rewards, groups, mask)


@validated
def whiten(
    values: Float[Tensor, "*tokens"],
    mask: Bool[Tensor, "*tokens"] | Integer[Tensor, "*tokens"],
    *,
    group: "dist.ProcessGroup | None" = None,
) -> Float[Tensor, "*tokens"]:
    """Normalise ``values`` to mean 0 and std 1 over all unmasked ones on all ranks; detached.

        (value - mean) / std,    std with n - 1 in the denominator

    The size of the gradient then does not depend on the size of the rewards, and beta is no longer in nats of reward
    per nat of KL but relative to the std of the batch. Values that are all equal give exactly 0; one NaN or infinite
    value makes all NaN. Masked values are not read, and the result is 0 there.

    If torch.distributed is initialised this is a collective: every process of the group must call it.

    Args:
        values: advantages of tokens or of sequences.
        mask: true (or 1) for the values that count.
        group: the process group; None for all processes.

    Raises:
        ShapeError: if the two differ in shape.
    """
    return whitened_with_std(values, mask, group)[0]


def whitened_with_std(
    values: Tensor, mask: Tensor, group: "dist.ProcessGroup | None" = None
) -> tuple[Tensor, Tensor]:
    """``whiten`` of values, and the std that they were divided by; 1 if all are equal. A collective."""
    is_counted, upcast = as_mask(mask), at_least_float32(values.detach())
    mean = mean_of(upcast, is_counted).across_ranks(group)
    deviations = torch.where(is_counted, upcast - mean.value, 0.0)
    squares = mean_of(deviations.square(), is_counted).across_ranks(group)
    lowest, highest = _extremes(upcast, is_counted, group)
    is_constant = (lowest == highest) & highest.isfinite()
    std = torch.where(is_constant, 1.0, (squares.total / (squares.count - 1)).sqrt())
    return torch.where(is_counted & ~is_constant, deviations / std, 0.0), std


def _extremes(values: Tensor, is_counted: Tensor, group: "dist.ProcessGroup | None") -> tuple[Tensor, Tensor]:
    """Minimum and maximum of the unmasked values over all ranks."""
    extremes = torch.stack([torch.where(is_counted, x, -torch.inf).flatten() for x in (-values, values)])
    extremes = torch.nn.functional.pad(extremes, (0, 1), value=-torch.inf).amax(-1)
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    return -extremes[0], extremes[1]


def _labels(rewards: Tensor, groups: Tensor | int) -> Tensor:
    """The group of each response, numbered from 0 in the order of the ids."""
    responses = len(rewards)
    if not isinstance(groups, Tensor):
        if groups < 2 or responses % groups:
            raise OptionError(
                f"{responses} responses in groups of {groups}; give a size of at least 2 that divides them"
            )
        return (torch.arange(responses, device=rewards.device) // groups).long()
    ids, order = groups.sort()
    label = torch.nn.functional.pad((ids[1:] != ids[:-1]).cumsum(0), (1, 0))[:responses]
    return torch.empty_like(label).scatter(0, order, label)


def _is_constant_group(rewards: Tensor, is_counted: Tensor, label: Tensor) -> Tensor:
    """Whether all rewards of each response's group are the same finite number."""

    def group_max(values: Tensor) -> Tensor:
        start = torch.full_like(values, -torch.inf)
        return start.scatter_reduce(0, label, torch.where(is_counted, values, -torch.inf), "amax")[label]

    highest, lowest = group_max(rewards), -group_max(-rewards)
    return (highest == lowest) & highest.isfinite()
