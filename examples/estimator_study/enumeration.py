"""The estimators under study, and pairs of distributions on which their moments are finite sums."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import torch
from jaxtyping import Float64
from torch import Tensor

from estimator_study.results import EstimatorRow
from kleash.estimators import ESTIMATORS, k1, k3
from kleash.losses import kl_loss

CONTROL_VARIATE = "k1 + a(w − 1)"
LOSS = "kl_loss"
EXACT = "exact"

EstimatorFunction = Callable[[Tensor], Tensor]
"""From the log ratios of sampled tokens to estimates of the KL; differentiable."""


def kl_loss_value(log_ratio: Tensor) -> Tensor:
    """kleash's ``kl_loss`` per token: the value of k3 with the gradient of k2."""
    return kl_loss(log_ratio, torch.zeros_like(log_ratio), torch.ones_like(log_ratio, dtype=torch.bool))


def control_variate(log_ratio: Tensor, *, weight: float) -> Tensor:
    """k1 with a control variate of mean 0: ``u + a (w - 1)``, ``w = exp(-u)``; a = 1 is k3."""
    return k1(log_ratio) + weight * (k3(log_ratio) - k1(log_ratio))


def estimator_functions(weight: float) -> Mapping[str, EstimatorFunction]:
    """Every estimator that uses one sample, by name; ``weight`` is the a of the control variate."""
    return MappingProxyType(
        {
            **{name: estimator.of for name, estimator in ESTIMATORS.items()},
            LOSS: kl_loss_value,
            CONTROL_VARIATE: partial(control_variate, weight=weight),
        }
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class EnumeratedPair:
    """p and q over a finite set of outcomes, at one or several positions."""

    logp: Float64[Tensor, "positions outcomes"]
    """Log-probabilities (or log densities) of the outcomes, as functions of ``parameters``."""
    logq: Float64[Tensor, "positions outcomes"]
    measure: Float64[Tensor, "positions outcomes"]
    """1 for a token, the quadrature weight for a point of an integral."""
    visits: Float64[Tensor, "positions"]
    """The weight of each position: for a mean over positions, or the expected visits along a sequence."""
    parameters: tuple[Tensor, ...]
    """The parameters of p that a trainer would update."""

    @property
    def log_ratio(self) -> Float64[Tensor, "positions outcomes"]:
        """log p - log q of every outcome."""
        return self.logp - self.logq

    @property
    def mass(self) -> Float64[Tensor, "positions outcomes"]:
        """The probability of every outcome, detached."""
        return self.measure * self.logp.detach().exp()

    def mean(self, values: Tensor) -> Tensor:
        """The expectation under p of a value per outcome, weighted by ``visits``."""
        return self.visits @ (self.mass * values).sum(-1)

    def kl(self) -> Tensor:
        """KL(p || q), with its gradient provided that ``visits`` do not depend on ``parameters``."""
        return self.visits @ (self.measure * self.logp.exp() * self.log_ratio).sum(-1)

    def gradient(self, loss: Tensor) -> Tensor:
        """The gradient of ``loss`` in all ``parameters``, flattened; 0 where it does not depend on them."""
        parts = torch.autograd.grad(loss, self.parameters, allow_unused=True, retain_graph=True)
        pairs = zip(parts, self.parameters, strict=True)
        return torch.cat([(torch.zeros_like(x) if g is None else g).flatten() for g, x in pairs])

    def variance(self, values: Tensor) -> Tensor:
        """The variance of one sample at its position, averaged over ``visits``."""
        means = (self.mass * values).sum(-1, keepdim=True)
        return self.mean((values - means).square())

    def control_weight(self) -> float:
        """The a that minimises the variance of ``u + a (w - 1)``, one a for all positions."""
        u = self.log_ratio.detach()
        change = torch.expm1(-u)
        means = (self.mass * change).sum(-1, keepdim=True)
        return -(self.mean(u * (change - means)) / self.variance(change)).item()


def relative_error(actual: Tensor, expected: Tensor) -> float | None:
    """|actual - expected| / |expected|; None where |expected| is below 1e-7."""
    size = expected.norm().item()
    return None if size < 1e-7 else (actual - expected).norm().item() / size


def enumerated_rows(pair: EnumeratedPair) -> tuple[EstimatorRow, ...]:
    """Moments and gradient of every estimator on ``pair``, by enumeration; the exact KL comes last."""
    kl = pair.kl()
    kl_gradient = pair.gradient(kl)
    rows = [
        _enumerated_row(pair, name, function, kl.item(), kl_gradient)
        for name, function in estimator_functions(pair.control_weight()).items()
    ]
    return (*rows, exact_row(kl.item(), relative_error(kl_gradient, kl_gradient)))


def _enumerated_row(
    pair: EnumeratedPair, name: str, function: EstimatorFunction, kl: float, kl_gradient: Tensor
) -> EstimatorRow:
    values = function(pair.log_ratio)
    backpropagated = pair.gradient(pair.mean(values))
    values = values.detach()
    mean = pair.mean(values).item()
    return EstimatorRow(
        name=name,
        value=mean,
        bias=mean - kl,
        standard_deviation=pair.variance(values).sqrt().item(),
        negative_share=pair.mean((values < 0).double()).item(),
        gradient_error=relative_error(backpropagated, kl_gradient),
    )


def exact_row(kl: float, gradient_error: float | None) -> EstimatorRow:
    """The row of the exact KL, which has no bias and no variance."""
    return EstimatorRow(
        name=EXACT,
        value=kl,
        bias=0.0,
        standard_deviation=0.0,
        negative_share=0.0,
        gradient_error=gradient_error,
    )
