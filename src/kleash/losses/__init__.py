"""What is trained on: losses whose value and gradient are those of the divergence they name."""

from kleash.losses.distillation import distillation_loss, gkd_record
from kleash.losses.preference import PreferenceLoss, dpo_loss, implicit_reward, response_log_ratio

__all__ = [
    "PreferenceLoss",
    "distillation_loss",
    "dpo_loss",
    "gkd_record",
    "implicit_reward",
    "response_log_ratio",
]
