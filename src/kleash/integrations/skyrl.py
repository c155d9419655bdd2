"""SkyRL's trainer, subclassed: the KL in its reward by k1, masked, steered by any of kleash's controllers."""

from typing import Any

import torch

from kleash.errors import CannotRunError
from kleash.estimators import sampled_kl
from kleash.leash import Leash, measured_kl
from kleash.masking import as_mask

__all__ = ["LeashedRewards"]


class LeashedRewards:
    """In front of ``skyrl.train.trainer.RayPPOTrainer``: ``class Mine(LeashedRewards, RayPPOTrainer)``.

        reward_t <- reward_t - beta u_t,    u = log p - log q of the sampled tokens

    u is k1, the only estimator whose penalty has the gradient of reward - beta KL(policy || reference), whatever
    ``kl_estimator_type`` says. SkyRL's default there is k3, bounded to 10. Masked tokens keep their reward.

    ``leash`` holds beta; None for SkyRL's own controller or ``kl_loss_coef``. It is told the mean of k3, which is
    the KL too and never negative, per token or per response as it counts. SkyRL saves neither controller in its
    checkpoints: save ``leash.to_dict()`` beside them.
    """

    leash: Leash | None = None

    cfg: Any
    all_metrics: Any
    reward_kl_controller: Any

    def __init_subclass__(cls, **options: Any) -> None:
        """See that there is a trainer behind it."""
        super().__init_subclass__(**options)
        if not any(
            "apply_reward_kl_penalty" in vars(base) for base in cls.__mro__ if base is not LeashedRewards
        ):
            raise CannotRunError(
                f"{cls.__name__} has no trainer with apply_reward_kl_penalty behind LeashedRewards; "
                "write class Mine(LeashedRewards, RayPPOTrainer)"
            )

    def apply_reward_kl_penalty(self, data: Any) -> Any:
        """Charge the rewards of a batch, log it by SkyRL's names, and steer."""
        mask = as_mask(data["loss_mask"] > 0)
        p, q = (torch.where(mask, data[f"{name}action_log_probs"], 0.0) for name in ("", "base_"))
        with torch.no_grad():
            charge, kl = sampled_kl(p, q, "k1"), sampled_kl(p, q, "k3")
        beta = self._beta()
        if beta != 0:
            data["rewards"] = torch.where(mask, data["rewards"] - beta * charge, data["rewards"])
        per_token = measured_kl(kl, mask, per="token").value
        self._steer(kl, mask)
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

    def _steer(self, kl: torch.Tensor, mask: torch.Tensor) -> None:
        leash = self.leash
        if leash is not None:
            self.leash = leash.after(measured_kl(kl, mask, per=leash.per).value, sequences=len(mask))
        elif self.reward_kl_controller is not None:
            nats = float(measured_kl(kl, mask, per="token").value)
            self.reward_kl_controller.update(current=nats, n_steps=len(mask))
