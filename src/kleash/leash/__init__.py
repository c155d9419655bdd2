"""KL control in RL: KL-shaped rewards, advantages, trust regions, engine mismatch, beta controllers."""

from kleash.leash.advantages import Advantages, generalised_advantages, rewards_to_go
from kleash.leash.controller_state import CONTROLLERS, StatefulController, beta_from_dict, beta_reason
from kleash.leash.controllers import DualBeta, EarlyStop, FixedBeta, Leash, PIDBeta, ZieglerBeta
from kleash.leash.engine_mismatch import Mismatch, mismatch
from kleash.leash.groups import group_advantages, leave_one_out_advantages, whiten
from kleash.leash.reward_shaping import (
    ControlledKL,
    best_of_n_bound,
    controlled_kl,
    measured_kl,
    sequence_rewards,
    shape_rewards,
)
from kleash.leash.trust_region import (
    TrustRegion,
    binary_divergence,
    binary_divergence_mask,
    geometric_mask,
    intersection,
    kl_mask,
    off_policy_sequence_mask,
    truncated_weights,
    window_weights,
)
from kleash.registry import refuse_former

__all__ = [
    "CONTROLLERS",
    "Advantages",
    "ControlledKL",
    "DualBeta",
    "EarlyStop",
    "FixedBeta",
    "Leash",
    "Mismatch",
    "PIDBeta",
    "StatefulController",
    "TrustRegion",
    "ZieglerBeta",
    "best_of_n_bound",
    "beta_from_dict",
    "beta_reason",
    "binary_divergence",
    "binary_divergence_mask",
    "controlled_kl",
    "generalised_advantages",
    "geometric_mask",
    "group_advantages",
    "intersection",
    "kl_mask",
    "leave_one_out_advantages",
    "measured_kl",
    "mismatch",
    "off_policy_sequence_mask",
    "rewards_to_go",
    "sequence_rewards",
    "shape_rewards",
    "truncated_weights",
    "whiten",
    "window_weights",
]

__getattr__ = refuse_former(
    __name__,
    {
        **dict.fromkeys(
            ("BetaSchedule", "TargetSchedule"),
            "set beta or target_nats by dataclasses.replace at each update",
        ),
        **dict.fromkeys(
            ("best_of_n_kl", "best_of_n_kl_from_rewards", "best_of_n_kl_from_winners"),
            "take best_of_n_bound, which the KL does not exceed",
        ),
    },
)
