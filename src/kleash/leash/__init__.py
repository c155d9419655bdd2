"""Reward against KL: rewards and advantages with the leash in them, what steers beta, what best-of-n costs."""

from kleash.leash.advantages import Advantages, generalised_advantages, rewards_to_go
from kleash.leash.best_of_n import (
    best_of_n_bound,
    best_of_n_kl,
    best_of_n_kl_from_rewards,
    best_of_n_kl_from_winners,
)
from kleash.leash.controllers import DualBeta, FixedBeta, Leash, ZieglerBeta
from kleash.leash.curves import CURVES, Curve
from kleash.leash.early_stop import EarlyStop
from kleash.leash.groups import group_advantages, leave_one_out_advantages, whiten
from kleash.leash.kinds import CONTROLLERS, beta_from_dict
from kleash.leash.overoptimisation import Overoptimisation, RewardAt, fit_overoptimisation
from kleash.leash.pid import PIDBeta
from kleash.leash.rewards import ControlledKL, controlled_kl, measured_kl, sequence_rewards, shape_rewards
from kleash.leash.schedules import SHAPES, BetaSchedule, TargetSchedule

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
    "Leash",
    "Overoptimisation",
    "PIDBeta",
    "RewardAt",
    "TargetSchedule",
    "ZieglerBeta",
    "best_of_n_bound",
    "best_of_n_kl",
    "best_of_n_kl_from_rewards",
    "best_of_n_kl_from_winners",
    "beta_from_dict",
    "controlled_kl",
    "fit_overoptimisation",
    "generalised_advantages",
    "group_advantages",
    "leave_one_out_advantages",
    "measured_kl",
    "rewards_to_go",
    "sequence_rewards",
    "shape_rewards",
    "whiten",
]
