"""The estimators that are studied, each as a trainer would write it."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

from torch import Tensor

from kleash.estimators import ESTIMATORS, k1, k2, k3

CONTROLLED = "k1 + a(w − 1)"
RIGHT_TWICE = "k3, k2's gradient"
EXACT = "exact"

Candidate = Callable[[Tensor], Tensor]
"""From the log ratios of drawn tokens to estimates, through which one may differentiate."""


def straight_through(log_ratio: Tensor) -> Tensor:
    """The value of k3 with the gradient of k2: what a KL loss wants."""
    gradient = k2(log_ratio)
    return k3(log_ratio).detach() + gradient - gradient.detach()


def controlled(log_ratio: Tensor, *, weight: float) -> Tensor:
    """k1 with a control variate of mean 0: ``u + a (w - 1)``, ``w = exp(-u)``; a = 1 is k3."""
    return k1(log_ratio) + weight * (k3(log_ratio) - k1(log_ratio))


def candidates(weight: float) -> Mapping[str, Candidate]:
    """Every estimator from a single draw, by name; ``weight`` is the a of the controlled one."""
    return MappingProxyType(
        {
            **{name: estimator.of for name, estimator in ESTIMATORS.items()},
            RIGHT_TWICE: straight_through,
            CONTROLLED: partial(controlled, weight=weight),
        }
    )
