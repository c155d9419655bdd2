"""What sampled tokens tell about a KL divergence."""

from kleash.estimators.sampled import ESTIMATORS, Estimator, absolute, k1, k2, k3, sampled_kl
from kleash.estimators.weights import ImportanceWeights, importance_weights

__all__ = [
    "ESTIMATORS",
    "Estimator",
    "ImportanceWeights",
    "absolute",
    "importance_weights",
    "k1",
    "k2",
    "k3",
    "sampled_kl",
]
