"""What is trained on: losses whose value and gradient are those of the divergence they name."""

from kleash.losses.distillation import distillation_loss, gkd_record
from kleash.losses.latent import (
    ActiveUnits,
    active_units,
    cyclical_annealing,
    free_bits,
    kl_per_dimension,
    linear_annealing,
)
from kleash.losses.preference import PreferenceLoss, dpo_loss, implicit_reward, response_log_ratio

__all__ = [
    "ActiveUnits",
    "PreferenceLoss",
    "active_units",
    "cyclical_annealing",
    "distillation_loss",
    "dpo_loss",
    "free_bits",
    "gkd_record",
    "implicit_reward",
    "kl_per_dimension",
    "linear_annealing",
    "response_log_ratio",
]
