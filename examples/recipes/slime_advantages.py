"""Advantages for slime with the KL in the reward, also for grpo, gspo and cispo.

Written for the signature of slime 0.3.1 (commit 624b824, 21 August 2026): ``--custom-advantage-function-path``, a
function of slime's arguments and its rollout data, documented by the help text in ``slime/utils/arguments.py``. Needs
kleash; slime itself is not imported. Put this file on the Python path of the trainer and run::

    python train.py --kl-coef 0.01 --custom-advantage-function-path slime_advantages.leashed_advantages ...
"""

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor

from kleash.errors import CannotRunError
from kleash.leash import rewards_to_go, shape_rewards

__all__ = ["leashed_advantages"]


def leashed_advantages(args: Any, rollout_data: MutableMapping[str, Any]) -> None:
    """Set the advantage of each token: the reward of its response less beta times the KL from the token on.

        A_t = reward - beta sum_{j >= t} u_j,    u = log p - log q of the sampled tokens

    This is the policy gradient of reward - beta KL(policy || reference) between responses. u is k1, the only
    estimator with the right gradient in a reward; ``--kl-loss-type`` is not used. beta is ``--kl-coef``. The reward
    is slime's, normalised in its group if slime does so. Masked tokens are not read and get 0.

    Args:
        args: slime's arguments; ``kl_coef`` and ``use_rollout_logprobs`` are read.
        rollout_data: slime's rollout data; its entries "advantages" and "returns" are set.

    Raises:
        CannotRunError: if an entry is missing, or a response is split over context-parallel ranks.
    """
    beta = _require_value(vars(args), "kl_coef")
    policy_name = "rollout_log_probs" if getattr(args, "use_rollout_logprobs", False) else "log_probs"
    rewards, masks, policy = (
        _require_value(rollout_data, name) for name in ("rewards", "loss_masks", policy_name)
    )
    reference = _require_value(rollout_data, "ref_log_probs") if beta else policy
    responses = zip(rewards, masks, policy, reference, strict=True)
    advantages = [
        _response_advantages(reward, mask, logp, logq, beta) for reward, mask, logp, logq in responses
    ]
    rollout_data["advantages"] = advantages
    rollout_data["returns"] = list(advantages)


def _require_value(source: Any, name: str) -> Any:
    value = source.get(name)
    if value is None:
        raise CannotRunError(
            f"slime passed no {name}; this recipe was written for slime 0.3.1, with a reference model and --kl-coef"
        )
    return value


def _response_advantages(reward: float, mask: Tensor, logp: Tensor, logq: Tensor, beta: float) -> Tensor:
    if not mask.shape == logp.shape == logq.shape:
        raise CannotRunError(
            f"a response has {len(mask)} tokens and {len(logp)} log-probabilities here ({len(logq)} of the reference); "
            "context parallelism splits it: set --context-parallel-size 1"
        )
    score = torch.tensor([float(reward)], dtype=torch.float32, device=logp.device)
    per_token = shape_rewards(score, (logp.float() - logq.float())[None], mask[None] > 0, beta=beta)
    return rewards_to_go(per_token, mask[None] > 0)[0]
