"""Divergences from hidden states: exact over the whole vocabulary, without ever holding its logits."""

from kleash.linear.api import (
    linear_divergence,
    linear_kl,
    log_probabilities,
    token_statistics,
    token_statistics_and_top,
)
from kleash.linear.head import Head
from kleash.linear.options import LinearOptions, Skipped
from kleash.linear.statistics import StatisticsAndTop, TokenStatistics, TokenTerms, TopTokens
from kleash.linear.training import LinearLoss, linear_divergence_loss, linear_kl_loss, linear_objective

__all__ = [
    "Head",
    "LinearLoss",
    "LinearOptions",
    "Skipped",
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
]
