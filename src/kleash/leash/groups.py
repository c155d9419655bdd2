"""Group-relative advantages (GRPO, RLOO) and whitening."""

from typing import Literal

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from kleash.arguments import validated
from kleash.errors import OptionError, ShapeError
from kleash.masking import as_mask, mean_of
from kleash.precision import at_least_float32

Scale = Literal["none", "std"]


@validated
def group_advantages(
    rewards: Float[Tensor, "sequences"],
    groups: Integer[Tensor, "sequences_g"] | int,
    mask: Bool[Tensor, "sequences_m"] | Integer[Tensor, "sequences_m"] | None = None,
    *,
    scale: Scale = "none",
    corrected: bool = True,
) -> Float[Tensor, "sequences"]:
    """How much better each response was than the others to the same prompt (GRPO); detached.

        advantage_i = (reward_i - mean of its group) * G / (G - 1),    over the group's std with scale "std"

    A response is part of the mean it is compared with, and that takes away 1 / G of the gradient; ``corrected``
    gives it back: the expected gradient is then that of the mean reward, whatever the group's size.

    | | expected gradient |
    | scale "none", corrected | right; the same numbers as ``leave_one_out_advantages`` |
    | scale "none", not corrected (Dr. GRPO) | (G - 1) / G of it: unequal where groups differ in size |
    | scale "std", not corrected (GRPO) | biased for good: each prompt is weighed by 1 / std of the few rewards seen |

    The std is that of a sample (G - 1 in the denominator), with nothing added to it. Rewards that differ by rounding
    alone are blown up to a std of 1: round them first.

    | group | scale "none" | scale "std" |
    | all rewards equal, two or more | exactly 0 | exactly 0 |
    | one response | NaN (there is nothing to compare it with); 0 if not corrected | NaN |
    | a reward is NaN or inf | NaN for its whole group | NaN |

    Args:
        rewards: one per response (``sequence_rewards``).
        groups: which prompt each answers, any integers, in any order, groups of any size; or the size of
            groups that follow one another.
        mask: true (or 1) for the responses that count; the others get 0 and move no mean. Everything, if left out.
        scale: "none" or "std".
        corrected: whether centring's factor is made up for.

    Raises:
        OptionError: if there is no such scale, or a size is below 2 or does not divide the responses.
        ShapeError: if the tensors are not one number per response.

    References:
        Shao et al., "DeepSeekMath" (2024), https://arxiv.org/abs/2402.03300
        Liu et al., "Understanding R1-Zero-Like Training" (2025), https://arxiv.org/abs/2503.20783
    """
    if scale not in ("none", "std"):
        raise OptionError(f"scale is {scale!r}; there are none, std")
    label, counts = _labels(rewards, groups), _response_mask(rewards, mask)
    values = torch.where(counts, at_least_float32(rewards.detach()), 0.0)

    def over_group(values: Tensor) -> Tensor:
        return torch.zeros_like(values).index_add(0, label, values)[label]

    size = over_group(counts.to(values.dtype))
    centred = values - over_group(values) / size
    result = centred * (size / (size - 1)) if corrected else centred
    if scale == "std":
        centred = torch.where(counts, centred, 0.0)
        result = result / (over_group(centred.square()) / (size - 1)).sqrt()
    is_constant = _is_constant_group(values, counts, label) & (size > 1)
    return torch.where(counts & ~is_constant, result, 0.0)


@validated
def leave_one_out_advantages(
    rewards: Float[Tensor, "sequences"],
    groups: Integer[Tensor, "sequences_g"] | int,
    mask: Bool[Tensor, "sequences_m"] | Integer[Tensor, "sequences_m"] | None = None,
) -> Float[Tensor, "sequences"]:
    """How much better each response was than the mean of the *others* to the same prompt (RLOO); detached.

        advantage_i = reward_i - mean of reward_j over the others of its group

    The others do not depend on this response, so the expected gradient is that of the mean reward. A
    response without others has NaN: an empty mean is no number.

    Args:
        rewards: one per response (``sequence_rewards``).
        groups: which prompt each answers, or the size of groups that follow one another.
        mask: true (or 1) for the responses that count; the others get 0 and enter no mean.

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
    mask: Bool[Tensor, "*tokens_m"] | Integer[Tensor, "*tokens_m"],
    *,
    group: "dist.ProcessGroup | None" = None,
) -> Float[Tensor, "*tokens"]:
    """``values`` with mean 0 and std 1 over everything that counts, on all ranks together; detached.

        (value - mean) / std,    std with n - 1 in the denominator

    The size of the gradient then no longer depends on that of the rewards; nor does beta mean nats of reward
    per nat of KL any more, but per std of this batch. Values that are all equal give exactly 0; one that is NaN or
    infinite makes all of them NaN. Where masked, 0, and nothing is read.

    A collective where torch.distributed is initialised: every process of the group has to call it.

    Args:
        values: advantages, of tokens or of sequences.
        mask: true (or 1) for what counts.
        group: the processes; all of them if left out.

    Raises:
        ShapeError: if the two differ in shape.
    """
    counts, unmasked = as_mask(mask), at_least_float32(values.detach())
    mean = mean_of(unmasked, counts).across_ranks(group)
    deviations = torch.where(counts, unmasked - mean.value, 0.0)
    squares = mean_of(deviations.square(), counts).across_ranks(group)
    least, most = _extremes(unmasked, counts, group)
    is_constant = (least == most) & most.isfinite()
    return torch.where(counts & ~is_constant, deviations / (squares.total / (squares.count - 1)).sqrt(), 0.0)


def _extremes(values: Tensor, counts: Tensor, group: "dist.ProcessGroup | None") -> tuple[Tensor, Tensor]:
    """Least and most of what counts, over all ranks."""
    ends = torch.stack([torch.where(counts, x, -torch.inf).flatten() for x in (-values, values)])
    ends = torch.nn.functional.pad(ends, (0, 1), value=-torch.inf).amax(-1)
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=group)  # pyright: ignore[reportUnknownMemberType]
    return -ends[0], ends[1]


def _labels(rewards: Tensor, groups: Tensor | int) -> Tensor:
    """Which group each response is in, counted from 0 in the order of the ids."""
    if rewards.ndim != 1:
        raise ShapeError(f"rewards are {tuple(rewards.shape)}; give one number per response")
    responses = len(rewards)
    if isinstance(groups, int):
        if groups < 2 or responses % groups:
            raise OptionError(
                f"{responses} responses in groups of {groups}; give a size of at least 2 that divides them"
            )
        return torch.arange(responses, device=rewards.device) // groups
    if groups.shape != rewards.shape:
        raise ShapeError(
            f"rewards are {tuple(rewards.shape)} and groups {tuple(groups.shape)}; give one id per response"
        )
    ids, order = groups.sort()
    label = torch.nn.functional.pad((ids[1:] != ids[:-1]).cumsum(0), (1, 0))[:responses]
    return torch.empty_like(label).scatter(0, order, label)


def _response_mask(rewards: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return torch.ones_like(rewards, dtype=torch.bool)
    if mask.shape != rewards.shape:
        raise ShapeError(
            f"rewards are {tuple(rewards.shape)} and mask {tuple(mask.shape)}; give one of each per response"
        )
    return as_mask(mask)


def _is_constant_group(rewards: Tensor, counts: Tensor, label: Tensor) -> Tensor:
    """Whether all rewards of the group are the same finite number."""

    def group_max(values: Tensor) -> Tensor:
        start = torch.full_like(values, -torch.inf)
        return start.scatter_reduce(0, label, torch.where(counts, values, -torch.inf), "amax")[label]

    highest, lowest = group_max(rewards), -group_max(-rewards)
    return (highest == lowest) & highest.isfinite()
