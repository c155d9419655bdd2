"""Reward against KL: what best-of-n costs, and where optimising a proxy stops paying."""

from kleash.leash.best_of_n import (
    best_of_n_bound,
    best_of_n_kl,
    best_of_n_kl_from_rewards,
    best_of_n_kl_from_winners,
)
from kleash.leash.curves import CURVES, Curve
from kleash.leash.divergence_masks import (
    binary_divergence,
    binary_divergence_mask,
    off_policy_sequence_mask,
)
from kleash.leash.overoptimisation import Overoptimisation, RewardAt, fit_overoptimisation
from kleash.leash.regions import TrustRegion, intersection
from kleash.leash.trust_region import geometric_mask, kl_mask, truncated_weights, window_weights

__all__ = [
    "CURVES",
    "Curve",
    "Overoptimisation",
    "RewardAt",
    "TrustRegion",
    "best_of_n_bound",
    "best_of_n_kl",
    "best_of_n_kl_from_rewards",
    "best_of_n_kl_from_winners",
    "binary_divergence",
    "binary_divergence_mask",
    "fit_overoptimisation",
    "geometric_mask",
    "intersection",
    "kl_mask",
    "off_policy_sequence_mask",
    "truncated_weights",
    "window_weights",
]
