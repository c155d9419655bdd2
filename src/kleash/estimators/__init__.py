"""Estimators of a KL divergence from sampled tokens or top-k log-probabilities."""

from kleash.estimators.bounds import KLBounds, SharedHead, Tail, kl_bounds, rounding_nats, shared_head
from kleash.estimators.sampled import (
    ESTIMATORS,
    Estimator,
    absolute,
    bounded_k3,
    continued_k3,
    k1,
    k2,
    k3,
    largest_log_ratio,
    sampled_kl,
)
from kleash.estimators.semantics import (
    Agreement,
    Semantics,
    check_agreement,
    require_same_semantics,
    to_full,
    to_truncated,
)
from kleash.estimators.weights import ImportanceWeights, importance_weights

__all__ = [
    "ESTIMATORS",
    "Agreement",
    "Estimator",
    "ImportanceWeights",
    "KLBounds",
    "Semantics",
    "SharedHead",
    "Tail",
    "absolute",
    "bounded_k3",
    "check_agreement",
    "continued_k3",
    "importance_weights",
    "k1",
    "k2",
    "k3",
    "kl_bounds",
    "largest_log_ratio",
    "require_same_semantics",
    "rounding_nats",
    "sampled_kl",
    "shared_head",
    "to_full",
    "to_truncated",
]
