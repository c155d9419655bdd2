"""Reward against KL: what best-of-n costs, and where optimising a proxy stops paying."""

from kleash.leash.best_of_n import (
    best_of_n_bound,
    best_of_n_kl,
    best_of_n_kl_from_rewards,
    best_of_n_kl_from_winners,
)
from kleash.leash.curves import CURVES, Curve
from kleash.leash.overoptimisation import Overoptimisation, RewardAt, fit_overoptimisation

__all__ = [
    "CURVES",
    "Curve",
    "Overoptimisation",
    "RewardAt",
    "best_of_n_bound",
    "best_of_n_kl",
    "best_of_n_kl_from_rewards",
    "best_of_n_kl_from_winners",
    "fit_overoptimisation",
]
