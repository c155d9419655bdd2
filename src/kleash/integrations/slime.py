"""slime's ``--custom-advantage-function-path``: the KL in the reward, also for grpo, gspo and cispo."""

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor

from kleash.errors import CannotRunError
from kleash.leash import rewards_to_go, shape_rewards

__all__ = ["leashed_advantages"]


def leashed_advantages(args: Any, rollout_data: MutableMapping[str, Any]) -> None:
    """Each token's advantage: the response's, less beta times the KL that follows it.

        A_t = reward - beta sum_{j >= t} u_j,    u = log p - log q of the sampled tokens

    That is the policy gradient of reward - beta KL(policy || reference) between responses. u is k1, the only
    estimator that is right in a reward, whatever ``--kl-loss-type`` says; beta is ``--kl-coef``; reward is slime's,
    normalised in its group if slime does that. Masked tokens are not read and get 0.

    Args:
        args: slime's; ``kl_coef`` and ``use_rollout_logprobs`` are read.
        rollout_data: slime's, changed in place: "advantages" and "returns" are put in.

    Raises:
        CannotRunError: if something that slime used to hand over is missing, or a response is split over
            context-parallel ranks.
    """
    beta = _require_value(vars(args), "kl_coef")
    of_policy = "rollout_log_probs" if getattr(args, "use_rollout_logprobs", False) else "log_probs"
    rewards, masks, policy = (
        _require_value(rollout_data, name) for name in ("rewards", "loss_masks", of_policy)
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
            f"slime did not hand over {name}; this was written for slime 0.3.1, with a reference model and --kl-coef"
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
