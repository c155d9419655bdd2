"""Entropy and cross-entropy."""

import torch
from jaxtyping import Float
from torch import Tensor

from kleash.arguments import validated
from kleash.divergences.exact import as_pair


@validated
def entropy(logp: Float[Tensor, "*batch vocab"]) -> Float[Tensor, "*batch"]:
    """H(p) = -sum p log p in nats: how undecided ``p`` is, 0 to log of the vocabulary.

    A token of probability 0 adds 0, in value and gradient.

    Raises:
        ShapeError: if there is no axis, or the numbers are not floating-point.
    """
    return cross_entropy(logp, logp)


@validated
def cross_entropy(
    logp: Float[Tensor, "*batch_p vocab_p"], logq: Float[Tensor, "*batch_q vocab_q"]
) -> Float[Tensor, "*batch_p"]:
    """H(p, q) = -sum p log q = H(p) + KL(p || q) in nats per draw ``x ~ p``.

    |          | q > 0      | q = 0 |
    | p > 0    | -p log q   | inf   |
    | p = 0    | 0          | 0     |

    Not a divergence: it is H(p) where the two agree. For the difference use ``kl``, which does not cancel.

    Raises:
        VocabularyMismatchError, ShapeError: as ``kl``.
    """
    logp, logq = as_pair(logp, logq)
    in_p, in_q = logp != -torch.inf, logq != -torch.inf
    both = in_p & in_q
    shared = -torch.exp(torch.where(both, logp, 0.0)) * torch.where(both, logq, 0.0)
    return torch.where(both, shared, torch.where(in_p, torch.inf, 0.0)).sum(-1)
