"""Toy language models whose sequence distributions can be computed exactly."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float64, Int
from torch import Tensor

from kleash.divergences import kl
from kleash.errors import OptionError, ShapeError


@dataclass(frozen=True, kw_only=True, eq=False)
class MarkovModel:
    """A language model whose next token depends on the previous token only; in float64."""

    first: Float64[Tensor, "vocab"]
    """Log-probabilities of the first token."""
    then: Float64[Tensor, "vocab vocab"]
    """Log-probabilities of the next token, one row for each previous token."""

    def next_logp(self, tokens: Int[Tensor, "sequences steps"]) -> Float64[Tensor, "sequences steps vocab"]:
        """The next-token distribution at each position of each sequence."""
        first = self.first.expand(len(tokens), 1, -1)
        return torch.cat([first, self.then[tokens[:, :-1]]], dim=1)

    def token_logp(self, tokens: Int[Tensor, "sequences steps"]) -> Float64[Tensor, "sequences steps"]:
        """The log-probability of each token of each sequence."""
        return self.next_logp(tokens).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)

    def moved(self, seed: int, apart: float) -> "MarkovModel":
        """Return a model with standard normal noise times ``apart`` added to every logit."""
        generator = torch.Generator().manual_seed(seed)

        def perturb(logp: Tensor) -> Tensor:
            noise = torch.randn(logp.shape, generator=generator, dtype=torch.float64)
            return (logp + apart * noise).log_softmax(-1)

        return MarkovModel(first=perturb(self.first), then=perturb(self.then))


def random_markov(vocab: int, seed: int, spread: float = 1.0) -> MarkovModel:
    """Return a model whose logits are ``spread`` times standard normal draws."""
    uniform = torch.zeros(vocab, dtype=torch.float64)
    return MarkovModel(first=uniform, then=uniform.expand(vocab, vocab)).moved(seed, spread)


class DriftMoments(NamedTuple):
    """Mean and covariance of two unbiased estimates of the KL between whole sequences, in nats.

    ``sampled`` is the sum of k1 along a sequence drawn from p, ``summed`` the sum of the exact next-token KLs along
    the same sequence.
    """

    kl: float
    """The mean of both: the KL between the two distributions over sequences."""
    variance_sampled: float
    """Of the sum of k1."""
    variance_summed: float
    """Of the sum of exact next-token KLs."""
    covariance: float
    """Of both."""

    @property
    def control_weight(self) -> float:
        """The ``a`` that minimises the variance of ``sampled - a (sampled - summed)``; NaN if the two are equal."""
        difference = self.variance_sampled - 2 * self.covariance + self.variance_summed
        return (self.variance_sampled - self.covariance) / difference if difference else float("nan")

    def variance(self, a: float) -> float:
        """The variance of ``sampled - a (sampled - summed)``."""
        cross_term = 2 * a * (1 - a) * self.covariance
        return (1 - a) ** 2 * self.variance_sampled + a**2 * self.variance_summed + cross_term


def drift_moments(p: MarkovModel, q: MarkovModel, steps: int) -> DriftMoments:
    """Mean and covariance of both estimates of KL(p || q) over sequences of ``steps`` tokens.

    By backward recursion over the previous token: exact up to rounding, for any number of steps.

    Raises:
        OptionError: if ``steps`` is below 1.
        ShapeError: if the vocabularies differ.
    """
    if steps < 1:
        raise OptionError(f"steps is {steps}; a sequence has at least 1")
    if p.then.shape != q.then.shape:
        raise ShapeError(
            f"p has {len(p.first)} tokens and q {len(q.first)}; compare models over one vocabulary"
        )
    moments = _Moments(*torch.zeros(5, len(p.first), dtype=torch.float64))
    for _ in range(steps - 1):
        moments = _add_earlier_token(p.then, q.then, moments)
    moments = _add_earlier_token(p.first.unsqueeze(0), q.first.unsqueeze(0), moments)
    u, d, uu, dd, ud = (moment.item() for moment in moments)
    return DriftMoments(d, uu - u * u, dd - d * d, ud - u * d)


class _Moments(NamedTuple):
    """Moments of the totals over all later tokens, by the previous token."""

    sampled: Tensor
    summed: Tensor
    sampled_squared: Tensor
    summed_squared: Tensor
    product: Tensor


def _add_earlier_token(logp: Tensor, logq: Tensor, later: _Moments) -> _Moments:
    """Moments of both totals with one more token in front, which adds ``log_ratio`` and ``exact``."""
    probs, log_ratio, exact = logp.exp(), logp - logq, kl(logp, logq)
    # u and d are the means of the totals of later tokens, uu, dd and ud the means of their products.
    u, d, uu, dd, ud = later

    def mean(per_token: Tensor) -> Tensor:
        return (probs * per_token).sum(-1)

    return _Moments(
        sampled=mean(log_ratio + u),
        summed=exact + mean(d),
        sampled_squared=mean(log_ratio.square() + 2 * log_ratio * u + uu),
        summed_squared=exact.square() + 2 * exact * mean(d) + mean(dd),
        product=mean(log_ratio * d + ud) + exact * mean(log_ratio + u),
    )
