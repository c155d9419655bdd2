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
from kleash.losses.preference import PreferenceLoss, dpo_loss, implicit_reward, response_log_ratio
from kleash.losses.term import KLTerm
from kleash.losses.top_k import Drawn, TopK, sampled_tail_loss, tail_bucket_loss, top_k_from, top_k_of
from kleash.registry import refuse_former

__all__ = [
    "AGGREGATIONS",
    "Aggregation",
    "ControlledLoss",
    "Drawn",
    "ExtremeTokens",
    "KLTerm",
    "PreferenceLoss",
    "TopK",
    "aggregate",
    "controlled_kl_loss",
    "count_of",
    "distillation_loss",
    "divergence_loss",
    "dpo_loss",
    "extreme_tokens",
    "future_kl_loss",
    "gkd_record",
    "implicit_reward",
    "kl_loss",
    "require_log_probabilities",
    "response_log_ratio",
    "sampled_tail_loss",
    "tail_bucket_loss",
    "top_k_distillation_loss",
    "top_k_from",
    "top_k_of",
]

__getattr__ = refuse_former(
    __name__,
    dict.fromkeys(
        (
            "ActiveUnits",
            "active_units",
            "cyclical_annealing",
            "free_bits",
            "kl_per_dimension",
            "linear_annealing",
        ),
        "take kleash.divergences.kl_gaussian, and write the floor or weight of its terms out",
    ),
)
