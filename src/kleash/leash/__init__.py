"""Reward against KL: rewards and advantages with the leash in them, trust regions, what steers beta."""

from kleash.leash.advantages import Advantages, generalised_advantages, rewards_to_go
from kleash.leash.best_of_n import (
    best_of_n_bound,
    best_of_n_kl,
    best_of_n_kl_from_rewards,
    best_of_n_kl_from_winners,
)
from kleash.leash.controllers import DualBeta, FixedBeta, Leash, ZieglerBeta
from kleash.leash.curves import CURVES, Curve
from kleash.leash.divergence_masks import (
    binary_divergence,
    binary_divergence_mask,
    off_policy_sequence_mask,
)
from kleash.leash.early_stop import EarlyStop
from kleash.leash.groups import group_advantages, leave_one_out_advantages, whiten
from kleash.leash.held import HeldLeash
from kleash.leash.kinds import CONTROLLERS, beta_from_dict
from kleash.leash.mismatch_record import Mismatch, ProbabilityGaps, SequenceMeans
from kleash.leash.overoptimisation import Overoptimisation, RewardAt, fit_overoptimisation
from kleash.leash.pid import PIDBeta
from kleash.leash.reasons import beta_reason
from kleash.leash.regions import TrustRegion, intersection
from kleash.leash.rewards import ControlledKL, controlled_kl, measured_kl, sequence_rewards, shape_rewards
from kleash.leash.schedules import SHAPES, BetaSchedule, TargetSchedule
from kleash.leash.trainer_engine import mismatch
from kleash.leash.trust_region import geometric_mask, kl_mask, truncated_weights, window_weights

__all__ = [
    "CONTROLLERS",
    "CURVES",
    "SHAPES",
    "Advantages",
    "BetaSchedule",
    "ControlledKL",
    "Curve",
    "DualBeta",
    "EarlyStop",
    "FixedBeta",
    "HeldLeash",
    "Leash",
    "Mismatch",
    "Overoptimisation",
    "PIDBeta",
    "ProbabilityGaps",
    "RewardAt",
    "SequenceMeans",
    "TargetSchedule",
    "TrustRegion",
    "ZieglerBeta",
    "best_of_n_bound",
    "best_of_n_kl",
    "best_of_n_kl_from_rewards",
    "best_of_n_kl_from_winners",
    "beta_from_dict",
    "beta_reason",
    "binary_divergence",
    "binary_divergence_mask",
    "controlled_kl",
    "fit_overoptimisation",
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
