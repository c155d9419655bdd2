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
from kleash.registry import refuse_former

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

__getattr__ = refuse_former(
    __name__,
    dict.fromkeys(
        ("Agreement", "check_agreement"), "take mean_weight of kleash.leash.mismatch, or kleash doctor"
    ),
)
