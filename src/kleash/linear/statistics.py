"""What is known about one position of a text under two models."""

from typing import NamedTuple

from jaxtyping import Float, Int
from torch import Tensor


class TokenStatistics(NamedTuple):
    """Per position: the token that stands there, and the two whole distributions it came from.

    All numbers are detached; nats where they are logarithms, entropies or divergences.
    """

    token_logp: Float[Tensor, "*tokens"]
    """log p of the token."""
    token_logq: Float[Tensor, "*tokens"]
    """log q of the token."""
    kl_pq: Float[Tensor, "*tokens"]
    """KL(p || q), averaged over p."""
    kl_qp: Float[Tensor, "*tokens"]
    """KL(q || p), averaged over q."""
    jensen_shannon: Float[Tensor, "*tokens"]
    """Half KL(p || m) plus half KL(q || m), m = (p + q) / 2; at most log 2."""
    total_variation: Float[Tensor, "*tokens"]
    """Half the sum of |p - q|: a probability."""
    entropy_p: Float[Tensor, "*tokens"]
    """Entropy of p."""
    entropy_q: Float[Tensor, "*tokens"]
    """Entropy of q."""
    top1_p: Int[Tensor, "*tokens"]
    """The likeliest token under p; the first of several."""
    top1_q: Int[Tensor, "*tokens"]
    """The likeliest token under q; the first of several."""
    top1_probability_p: Float[Tensor, "*tokens"]
    """p of ``top1_p``."""
    top1_probability_q: Float[Tensor, "*tokens"]
    """q of ``top1_q``."""
    rank_q: Int[Tensor, "*tokens"]
    """How many tokens q finds strictly likelier than this one; 0 is the likeliest."""


class TopTokens(NamedTuple):
    """The likeliest tokens of one model at each position, likeliest first."""

    token_ids: Int[Tensor, "*tokens top"]
    probability: Float[Tensor, "*tokens top"]


class StatisticsAndTop(NamedTuple):
    """``TokenStatistics``, and the likeliest tokens of both models."""

    statistics: TokenStatistics
    top_p: TopTokens
    top_q: TopTokens


class TokenTerms(NamedTuple):
    """What an objective may be made of, for each token; nats."""

    token_logp: Float[Tensor, "*tokens"]
    """Log-probability of the token under p."""
    token_logq: Float[Tensor, "*tokens"]
    """Log-probability of the token under q."""
    kl: Float[Tensor, "*tokens"]
    """KL(p || q) over the whole vocabulary."""
    entropy: Float[Tensor, "*tokens"]
    """-sum p log p."""
