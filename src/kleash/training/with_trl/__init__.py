"""GRPO, RLOO, DPO and distillation by TRL's trainers, with kleash's KL term, beta controllers, rewards and run log."""

from kleash.training.with_trl.on_policy_distillation import train_distill
from kleash.training.with_trl.online import train_grpo, train_rloo
from kleash.training.with_trl.preferences import train_dpo

__all__ = ["train_distill", "train_dpo", "train_grpo", "train_rloo"]
