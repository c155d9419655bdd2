"""Exact divergences over the whole vocabulary from hidden states, computed without storing the logits."""

from kleash.linear.api import (
    linear_divergence,
    linear_divergence_loss,
    linear_kl,
    linear_kl_loss,
    linear_objective,
    log_probabilities,
    token_statistics,
    token_statistics_and_top,
)
from kleash.linear.head import Head
from kleash.linear.types import (
    LinearLoss,
    LinearOptions,
    StatisticsAndTop,
    TokenStatistics,
    TokenTerms,
    TopTokens,
)
from kleash.linear.zero3 import zero3_as_dtensor

__all__ = [
    "Head",
    "LinearLoss",
    "LinearOptions",
    "StatisticsAndTop",
    "TokenStatistics",
    "TokenTerms",
    "TopTokens",
    "linear_divergence",
    "linear_divergence_loss",
    "linear_kl",
    "linear_kl_loss",
    "linear_objective",
    "log_probabilities",
    "token_statistics",
    "token_statistics_and_top",
    "zero3_as_dtensor",
]
