"""Divergences of Rényi's family: a logarithm of a sum rather than a sum."""

from math import inf

import torch
from jaxtyping import Float
from torch import Tensor

from kleash.arguments import validated
from kleash.divergences.exact import as_pair, divergence
from kleash.divergences.families import KL, alpha_record
from kleash.errors import OptionError

NEAR_NATS = 0.5
"""Below this logarithm of the sum, the sum is taken as 1 plus a small divergence."""


@validated
def renyi(
    logp: Float[Tensor, "*batch_p vocab_p"], logq: Float[Tensor, "*batch_q vocab_q"], order: float
) -> Float[Tensor, "*batch_p"]:
    """The Rényi divergence of an order above 0, in nats; of order 1 it is KL(p || q).

        log(sum_x p(x)^order q(x)^(1 - order)) / (order - 1)

    It grows with the order. Pairs that nearly agree go through ``alpha_divergence``, whose terms do
    not cancel; pairs far apart through a log-sum-exp, which does not overflow. ``inf`` where q = 0 < p
    for orders from 1 on, and below 1 only where the supports do not meet.

    Args:
        logp: natural log-probabilities, normalised over the last axis.
        logq: the same tokens under the other distribution.
        order: above 0, finite.

    Raises:
        OptionError: if ``order`` is not.
        VocabularyMismatchError, ShapeError: as ``kl``.

    References:
        van Erven & Harremoës, "Rényi Divergence and Kullback-Leibler Divergence" (2014),
        https://arxiv.org/abs/1206.2459
    """
    if not 0 < order < inf:
        raise OptionError(f"order is {order}; give a finite number above 0")
    if order == 1:
        return divergence(KL, logp, logq)
    logp, logq = as_pair(logp, logq)
    log_sum = _log_sum(logp, logq, order)
    near = log_sum.abs() < NEAR_NATS
    close = torch.where(near.unsqueeze(-1), logq, logp)
    excess = order * (order - 1) * divergence(alpha_record(order), logp, close)
    return torch.where(near, torch.log1p(excess), log_sum) / (order - 1)


def _log_sum(logp: Tensor, logq: Tensor, order: float) -> Tensor:
    in_p, in_q = logp != -torch.inf, logq != -torch.inf
    both = in_p & in_q
    shared = order * torch.where(both, logp, 0.0) + (1 - order) * torch.where(both, logq, 0.0)
    apart = torch.where(in_p, inf if order > 1 else -inf, -inf)
    return torch.where(both, shared, apart).logsumexp(-1)
