"""Toy language models whose sequence distributions can be computed exactly."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float64, Int
from torch import Tensor

from kleash.divergences import kl


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
    """
    vocab = len(p.first)
    mean, product = torch.zeros(vocab, 2).double(), torch.zeros(vocab, 2, 2).double()
    for _ in range(steps - 1):
        mean, product = _add_earlier_token(p.then, q.then, mean, product)
    mean, product = _add_earlier_token(p.first.unsqueeze(0), q.first.unsqueeze(0), mean, product)
    (variance_sampled, covariance), (_, variance_summed) = (product - _outer(mean, mean))[0].tolist()
    return DriftMoments(mean[0, 1].item(), variance_sampled, variance_summed, covariance)


def _add_earlier_token(logp: Tensor, logq: Tensor, mean: Tensor, product: Tensor) -> tuple[Tensor, Tensor]:
    """Means and mean products of both totals by the previous token, with one more token in front.

    ``mean`` and ``product`` are those of all later tokens. The token adds its log ratio to the first total, and the
    exact KL of its distribution to the second.
    """
    probs = logp.exp().unsqueeze(-1)
    added = torch.stack([logp - logq, kl(logp, logq).unsqueeze(-1).expand_as(logp)], -1)
    cross = _outer(added, mean.expand_as(added))
    products = _outer(added, added) + cross + cross.mT + product
    return (probs * (added + mean)).sum(-2), (probs.unsqueeze(-1) * products).sum(-3)


def _outer(a: Tensor, b: Tensor) -> Tensor:
    """The products of the elements of two vectors."""
    return a.unsqueeze(-1) * b.unsqueeze(-2)
