"""The options of the linear functions, and their results for each token as named tuples."""

from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from jaxtyping import Float, Int
from torch import Tensor

from kleash.registry import look_up, options_given, require_at_least, require_choice

IMPLS = MappingProxyType(
    {
        "auto": "chunked",
        "reference": "all logits at once in float64, by autograd: the specification, with derivatives of every order",
        "chunked": "a few tokens at a time, within buffer_bytes",
    }
)


@dataclass(frozen=True, kw_only=True)
class LinearOptions:
    """Implementation, memory and compilation of the functions that start from hidden states.

    Raises:
        UnknownNameError: if ``impl`` is not one of its values.
        OptionError: if ``buffer_bytes`` is not positive, or ``compile`` not a bool.

    >>> kleash.LinearOptions(impl="chunked", buffer_bytes=64 * 2**20).impl
    'chunked'
    """

    impl: str = "auto"
    """The implementation: reference or chunked; auto is chunked. Both return the same number. Token statistics, and
    calls where several ranks have the rows of a head, are chunked in any case."""
    buffer_bytes: int | None = None
    """Memory for the logits of a chunk of tokens, of both models together; a chunk has at least one token. None
    chooses by device: 128 MiB on a CPU, enough for 1024 tokens on a GPU."""
    compile: bool | None = None
    """Whether torch compiles the elementwise work of KL (values, losses, objectives) and of token statistics, which
    takes about 10 seconds in each process. None compiles calls of 10^8 logits on a GPU, and of 5 * 10^9 on a CPU, where
    such a call saves more time than compiling takes; True raises where the compiler is missing, or several ranks have
    the rows of a head."""

    def __post_init__(self) -> None:
        """Check the values."""
        look_up(IMPLS, self.impl, "implementation of the linear functions")
        require_choice((True, False, None), compile=self.compile)
        require_at_least(1, **options_given(buffer_bytes=self.buffer_bytes))


class TokenStatistics(NamedTuple):
    """Statistics of one position: the token there, and the distributions of both models over the vocabulary.

    All tensors are detached. Logarithms, entropies and divergences are in nats.
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
    """The number of tokens that q gives a larger probability than this one; 0 is the likeliest."""


INTEGER_FIELDS = ("top1_p", "top1_q", "rank_q")
"""The fields of TokenStatistics that are int64."""


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
    """The terms of each token that an objective is a function of; nats."""

    token_logp: Float[Tensor, "*tokens"]
    """Log-probability of the token under p."""
    token_logq: Float[Tensor, "*tokens"]
    """Log-probability of the token under q."""
    kl: Float[Tensor, "*tokens"]
    """KL(p || q) over the whole vocabulary."""
    entropy: Float[Tensor, "*tokens"]
    """-sum p log p."""


class LinearLoss(NamedTuple):
    """A loss and the divergences that it is the weighted sum of."""

    loss: Float[Tensor, ""]
    """The weighted sum; backpropagate it once."""
    per_token: Float[Tensor, "*tokens"]
    """The divergence of each token, detached; 0 where the weight is 0, since such a token is not read."""
