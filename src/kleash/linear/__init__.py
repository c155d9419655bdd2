"""Divergences from hidden states: exact over the whole vocabulary, without ever holding its logits."""

from kleash.linear.api import linear_kl, log_probabilities, token_statistics
from kleash.linear.head import Head
from kleash.linear.options import LinearOptions
from kleash.linear.statistics import TokenStatistics

__all__ = ["Head", "LinearOptions", "TokenStatistics", "linear_kl", "log_probabilities", "token_statistics"]
