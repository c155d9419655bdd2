"""How far apart two distributions over the same tokens are, exactly."""

from kleash.divergences.exact import divergence
from kleash.divergences.families import alpha_record, jensen_shannon_record, skew_kl_record
from kleash.divergences.gaussian import kl_gaussian
from kleash.divergences.generator import phi
from kleash.divergences.information import cross_entropy, entropy
from kleash.divergences.named import (
    alpha_divergence,
    chi_squared,
    hellinger,
    jeffreys,
    jensen_shannon,
    kl,
    skew_kl,
    total_variation,
)
from kleash.divergences.orders import renyi
from kleash.divergences.probabilities import kl_from_probs
from kleash.divergences.record import Divergence, Side
from kleash.divergences.table import DIVERGENCES
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
