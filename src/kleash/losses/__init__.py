"""Losses whose value and gradient are those of the divergence they name."""

from kleash.losses.aggregation import AGGREGATIONS, Aggregation, aggregate, count_of
from kleash.losses.distillation import distillation_loss, gkd_record, top_k_distillation_loss
from kleash.losses.divergence import divergence_loss
from kleash.losses.kl import (
    ControlledLoss,
    ExtremeTokens,
    controlled_kl_loss,
    extreme_tokens,
    future_kl_loss,
    kl_loss,
    require_log_probabilities,
)
from kleash.losses.latent import (
    ActiveUnits,
    active_units,
    cyclical_annealing,
    free_bits,
    kl_per_dimension,
    linear_annealing,
)
from kleash.losses.preference import PreferenceLoss, dpo_loss, implicit_reward, response_log_ratio
from kleash.losses.term import KLTerm
from kleash.losses.top_k import Drawn, TopK, sampled_tail_loss, tail_bucket_loss, top_k_from, top_k_of

__all__ = [
    "AGGREGATIONS",
    "ActiveUnits",
    "Aggregation",
    "ControlledLoss",
    "Drawn",
    "ExtremeTokens",
    "KLTerm",
    "PreferenceLoss",
    "TopK",
    "active_units",
    "aggregate",
    "controlled_kl_loss",
    "count_of",
    "cyclical_annealing",
    "distillation_loss",
    "divergence_loss",
    "dpo_loss",
    "extreme_tokens",
    "free_bits",
    "future_kl_loss",
    "gkd_record",
    "implicit_reward",
    "kl_loss",
    "kl_per_dimension",
    "linear_annealing",
    "require_log_probabilities",
    "response_log_ratio",
    "sampled_tail_loss",
    "tail_bucket_loss",
    "top_k_distillation_loss",
    "top_k_from",
    "top_k_of",
]
