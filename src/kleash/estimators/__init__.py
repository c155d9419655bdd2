"""Estimators of a KL divergence from sampled tokens or top-k log-probabilities."""

from kleash.estimators.bounds import KLBounds, SharedHead, Tail, kl_bounds, shared_head
from kleash.estimators.sampled import ESTIMATORS, Estimator, absolute, bounded_k3, k1, k2, k3, sampled_kl
from kleash.estimators.semantics import (
    Semantics,
    require_same_semantics,
    to_full,
    to_truncated,
)
from kleash.estimators.weights import ImportanceWeights, importance_weights

__all__ = [
    "ESTIMATORS",
    "Estimator",
    "ImportanceWeights",
    "KLBounds",
    "Semantics",
    "SharedHead",
    "Tail",
    "absolute",
    "bounded_k3",
    "importance_weights",
    "k1",
    "k2",
    "k3",
    "kl_bounds",
    "require_same_semantics",
    "sampled_kl",
    "shared_head",
    "to_full",
    "to_truncated",
]
