"""Exact divergences between two distributions over the same vocabulary."""

from kleash.divergences.functions import (
    alpha_divergence,
    chi_squared,
    cross_entropy,
    divergence,
    entropy,
    hellinger,
    jeffreys,
    jensen_shannon,
    kl,
    kl_gaussian,
    renyi,
    skew_kl,
    total_variation,
)
from kleash.divergences.generator import phi
from kleash.divergences.probabilities import kl_from_probs
from kleash.divergences.table import (
    DIVERGENCES,
    Divergence,
    Side,
    alpha_record,
    find_divergence,
    jensen_shannon_record,
    skew_kl_record,
)
from kleash.divergences.truncation import Truncated, at_temperature, restrict, truncate

__all__ = [
    "DIVERGENCES",
    "Divergence",
    "Side",
    "Truncated",
    "alpha_divergence",
    "alpha_record",
    "at_temperature",
    "chi_squared",
    "cross_entropy",
    "divergence",
    "entropy",
    "find_divergence",
    "hellinger",
    "jeffreys",
    "jensen_shannon",
    "jensen_shannon_record",
    "kl",
    "kl_from_probs",
    "kl_gaussian",
    "phi",
    "renyi",
    "restrict",
    "skew_kl",
    "skew_kl_record",
    "total_variation",
    "truncate",
]
