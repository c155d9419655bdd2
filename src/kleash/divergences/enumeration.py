"""Small worlds in which everything about a sequence can be computed exactly."""

from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch
from jaxtyping import Float64, Int
from torch import Tensor

from kleash.divergences.named import kl
from kleash.errors import OptionError, ShapeError


@dataclass(frozen=True, kw_only=True, eq=False)
class MarkovModel:
    """A language model that remembers one token; in float64."""

    first: Float64[Tensor, "vocab"]
    """Log-probabilities of the first token."""
    then: Float64[Tensor, "vocab vocab"]
    """Log-probabilities of the next token, a row for each token before it."""

    def next_logp(self, tokens: Int[Tensor, "sequences steps"]) -> Float64[Tensor, "sequences steps vocab"]:
        """The whole next-token distribution that each token of each sequence was drawn from."""
        first = self.first.expand(len(tokens), 1, -1)
        return torch.cat([first, self.then[tokens[:, :-1]]], dim=1)

    def token_logp(self, tokens: Int[Tensor, "sequences steps"]) -> Float64[Tensor, "sequences steps"]:
        """The log-probability of each token of each sequence."""
        return self.next_logp(tokens).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)

    def moved(self, seed: int, apart: float) -> "MarkovModel":
        """Another model, every logit of which differs by ``apart`` times a standard normal draw."""
        draw = torch.Generator().manual_seed(seed)

        def nudge(logp: Tensor) -> Tensor:
            noise = torch.randn(logp.shape, generator=draw, dtype=torch.float64)
            return (logp + apart * noise).log_softmax(-1)

        return MarkovModel(first=nudge(self.first), then=nudge(self.then))


def random_markov(vocab: int, seed: int, spread: float = 1.0) -> MarkovModel:
    """A model whose logits are ``spread`` times standard normal draws."""
    flat = torch.zeros(vocab, dtype=torch.float64)
    return MarkovModel(first=flat, then=flat.expand(vocab, vocab)).moved(seed, spread)


def every_sequence(vocab: int, steps: int) -> Int[Tensor, "sequences steps"]:
    """All ``vocab ** steps`` of them, in lexicographic order."""
    return torch.tensor(list(product(range(vocab), repeat=steps)))


class DriftMoments(NamedTuple):
    """Two unbiased estimates of the KL between whole sequences, and how they spread, in nats.

    ``sampled`` is the sum of k1 along a sequence drawn from p, ``summed`` the sum of the exact
    next-token KLs along the same sequence.
    """

    kl: float
    """The mean of both: the KL between the two distributions over sequences."""
    variance_sampled: float
    variance_summed: float
    covariance: float

    @property
    def control_weight(self) -> float:
        """The ``a`` for which ``sampled - a (sampled - summed)`` varies least; NaN if they never differ."""
        difference = self.variance_sampled - 2 * self.covariance + self.variance_summed
        return (self.variance_sampled - self.covariance) / difference if difference else float("nan")

    def variance(self, a: float) -> float:
        """The variance of ``sampled - a (sampled - summed)``."""
        mixed = 2 * a * (1 - a) * self.covariance
        return (1 - a) ** 2 * self.variance_sampled + a**2 * self.variance_summed + mixed


def drift_moments(p: MarkovModel, q: MarkovModel, steps: int) -> DriftMoments:
    """Mean and covariance of both estimates of KL(p || q) over sequences of ``steps`` tokens.

    By backward recursion over the token before: exact up to rounding, for any number of steps.

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
    state = _Moments(*torch.zeros(5, len(p.first), dtype=torch.float64))
    for _ in range(steps - 1):
        state = _one_step_earlier(p.then, q.then, state)
    start = _one_step_earlier(p.first.unsqueeze(0), q.first.unsqueeze(0), state)
    u, d, uu, dd, ud = (moment.item() for moment in start)
    return DriftMoments(d, uu - u * u, dd - d * d, ud - u * d)


class _Moments(NamedTuple):
    """Of what is still to come, by the token before: means, second moments, mean product."""

    sampled: Tensor
    summed: Tensor
    sampled_squared: Tensor
    summed_squared: Tensor
    product: Tensor


def _one_step_earlier(logp: Tensor, logq: Tensor, later: _Moments) -> _Moments:
    """Both totals after one more token: ``log_ratio`` and ``exact`` are what this token adds."""
    probs, log_ratio, exact = logp.exp(), logp - logq, kl(logp, logq)
    u, d, uu, dd, ud = later

    def mean(of_token: Tensor) -> Tensor:
        return (probs * of_token).sum(-1)

    return _Moments(
        sampled=mean(log_ratio + u),
        summed=exact + mean(d),
        sampled_squared=mean(log_ratio.square() + 2 * log_ratio * u + uu),
        summed_squared=exact.square() + 2 * exact * mean(d) + mean(dd),
        product=mean(log_ratio * d + ud) + exact * mean(log_ratio + u),
    )
