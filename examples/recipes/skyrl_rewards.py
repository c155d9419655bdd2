"""Mixin for SkyRL's trainer: k1 in the reward, masked, with a beta controller of kleash.

Written for the signature of SkyRL at commit a956457 (21 August 2026): ``RayPPOTrainer.apply_reward_kl_penalty``,
documented in its ``docs/content/docs/algorithms/custom_algorithms.mdx``. Needs kleash; SkyRL itself is not imported.
Put this file on the Python path of the trainer and define::

    class Trainer(LeashedRewards, RayPPOTrainer):
        leash = PIDBeta(beta=0.01, target_nats=4.0)
"""

from typing import Any

import torch

from kleash.errors import CannotRunError
from kleash.estimators import sampled_kl
from kleash.leash import Leash, measured_kl
from kleash.masking import as_mask

__all__ = ["LeashedRewards"]


class LeashedRewards:
    """Mixin before ``skyrl.train.trainer.RayPPOTrainer``: ``class Trainer(LeashedRewards, RayPPOTrainer)``.

        reward_t <- reward_t - beta u_t,    u = log p - log q of the sampled tokens

    u is k1, the only estimator whose penalty has the gradient of reward - beta KL(policy || reference);
    ``kl_estimator_type`` (in SkyRL by default k3, clamped to 10) is not used. Masked tokens keep their reward.

    ``leash`` is the beta controller; None for SkyRL's own controller or ``kl_loss_coef``. The controller is updated
    with the mean of k3, an estimate of the same KL that is never negative, per token or per response as its ``per``
    says. SkyRL's checkpoints contain neither controller: save ``leash.to_dict()`` beside them.
    """

    leash: Leash | None = None

    cfg: Any
    all_metrics: Any
    reward_kl_controller: Any

    def __init_subclass__(cls, **options: Any) -> None:
        """Check that a base class after this one has ``apply_reward_kl_penalty``.

        Raises:
            CannotRunError: if none has.
        """
        super().__init_subclass__(**options)
        if not any(
            "apply_reward_kl_penalty" in vars(base) for base in cls.__mro__ if base is not LeashedRewards
        ):
            raise CannotRunError(
                f"{cls.__name__} has no base class with apply_reward_kl_penalty after LeashedRewards; "
                "write class Trainer(LeashedRewards, RayPPOTrainer)"
            )

    def apply_reward_kl_penalty(self, data: Any) -> Any:
        """Subtract the penalty from the rewards of a batch, log the KL by SkyRL's names, and update beta."""
        mask = as_mask(data["loss_mask"] > 0)
        p, q = (torch.where(mask, data[f"{name}action_log_probs"], 0.0) for name in ("", "base_"))
        with torch.no_grad():
            penalty, kl = sampled_kl(p, q, "k1"), sampled_kl(p, q, "k3")
        beta = self._beta()
        if beta != 0:
            data["rewards"] = torch.where(mask, data["rewards"] - beta * penalty, data["rewards"])
        per_token = measured_kl(kl, mask, per="token").value
        self._update_beta(kl, mask)
        metrics = {"avg_kl": float(per_token), "avg_kl_max": float(kl.amax(-1).mean()), "kl_loss_coef": beta}
        data.metadata.setdefault("metrics", {}).update(metrics)
        self.all_metrics.update({f"loss/{name}": value for name, value in metrics.items()})
        return data

    def _beta(self) -> float:
        if self.leash is not None:
            return self.leash.beta
        controller = self.reward_kl_controller
        coefficient = self.cfg.trainer.algorithm.kl_loss_coef if controller is None else controller.value
        return max(0.0, float(coefficient))

    def _update_beta(self, kl: torch.Tensor, mask: torch.Tensor) -> None:
        leash = self.leash
        if leash is not None:
            self.leash = leash.after(measured_kl(kl, mask, per=leash.per).value, sequences=len(mask))
        elif self.reward_kl_controller is not None:
            nats = float(measured_kl(kl, mask, per="token").value)
            self.reward_kl_controller.update(current=nats, n_steps=len(mask))
