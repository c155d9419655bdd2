"""The estimators that are studied, each as a trainer would write it."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from kleash.estimators import ESTIMATORS, k1, k3
from kleash.losses import kl_loss

CONTROLLED = "k1 + a(w − 1)"
LOSS = "kl_loss"
EXACT = "exact"

Candidate = Callable[[Tensor], Tensor]
"""From the log ratios of drawn tokens to estimates, through which one may differentiate."""


def as_a_loss(log_ratio: Tensor) -> Tensor:
    """kleash's own: the value of k3 with the gradient of k2."""
    return kl_loss(log_ratio, torch.zeros_like(log_ratio), torch.ones_like(log_ratio, dtype=torch.bool))


def controlled(log_ratio: Tensor, *, weight: float) -> Tensor:
    """k1 with a control variate of mean 0: ``u + a (w - 1)``, ``w = exp(-u)``; a = 1 is k3."""
    return k1(log_ratio) + weight * (k3(log_ratio) - k1(log_ratio))


def candidates(weight: float) -> Mapping[str, Candidate]:
    """Every estimator from a single draw, by name; ``weight`` is the a of the controlled one."""
    return MappingProxyType(
        {
            **{name: estimator.of for name, estimator in ESTIMATORS.items()},
            LOSS: as_a_loss,
            CONTROLLED: partial(controlled, weight=weight),
        }
    )
