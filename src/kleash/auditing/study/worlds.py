"""Pairs of distributions of which everything that can be drawn is known, so that nothing need be sampled."""

from dataclasses import dataclass

import torch
from jaxtyping import Float64
from torch import Tensor

from kleash.auditing.study.candidates import EXACT, Candidate, candidates
from kleash.records import Number
from kleash.records.study import EstimatorRow


@dataclass(frozen=True, kw_only=True, eq=False)
class World:
    """Places at which one of many outcomes is drawn from p."""

    logp: Float64[Tensor, "places outcomes"]
    """Log-probabilities (or log densities) of the outcomes, as functions of ``parameters``."""
    logq: Float64[Tensor, "places outcomes"]
    measure: Float64[Tensor, "places outcomes"]
    """What an outcome stands for: 1 for a token, the width of its interval for a point of a quadrature."""
    visits: Float64[Tensor, "places"]
    """How often each place is drawn at; an average over places, or a sum along a sequence."""
    parameters: tuple[Tensor, ...]
    """What p depends on and a trainer would move."""

    @property
    def log_ratio(self) -> Float64[Tensor, "places outcomes"]:
        """u of every outcome."""
        return self.logp - self.logq

    @property
    def mass(self) -> Float64[Tensor, "places outcomes"]:
        """The probability of every outcome, without a gradient."""
        return self.measure * self.logp.detach().exp()

    def mean(self, values: Tensor) -> Tensor:
        """The expectation of something known for every outcome."""
        return self.visits @ (self.mass * values).sum(-1)

    def exact(self) -> Tensor:
        """The KL, with its gradient, where ``visits`` do not depend on ``parameters``."""
        return self.visits @ (self.measure * self.logp.exp() * self.log_ratio).sum(-1)

    def gradient(self, loss: Tensor) -> Tensor:
        """The gradient of ``loss`` in all ``parameters``, in one row; 0 where it does not depend on them."""
        parts = torch.autograd.grad(loss, self.parameters, allow_unused=True, retain_graph=True)
        pairs = zip(parts, self.parameters, strict=True)
        return torch.cat([(torch.zeros_like(x) if g is None else g).flatten() for g, x in pairs])

    def variance(self, values: Tensor) -> Tensor:
        """Of one draw around the mean of its place, averaged over ``visits``."""
        means = (self.mass * values).sum(-1, keepdim=True)
        return self.mean((values - means).square())

    def control_weight(self) -> float:
        """The a for which ``u + a (w - 1)`` varies least, one a for all places."""
        u = self.log_ratio.detach()
        change = torch.expm1(-u)
        means = (self.mass * change).sum(-1, keepdim=True)
        return -(self.mean(u * (change - means)) / self.variance(change)).item()


def relative_error(found: Tensor, wanted: Tensor) -> float | None:
    """|found - wanted| / |wanted|; None where nothing (less than 1e-7) is wanted."""
    size = wanted.norm().item()
    return None if size < 1e-7 else (found - wanted).norm().item() / size


def rows_of(world: World) -> tuple[EstimatorRow, ...]:
    """Every estimator's moments and gradient in ``world``, by enumeration; the exact KL last."""
    exact = world.exact()
    wanted = world.gradient(exact)
    found = [
        _row(world, name, candidate, exact.item(), wanted)
        for name, candidate in candidates(world.control_weight()).items()
    ]
    return (*found, exact_row(exact.item(), relative_error(wanted, wanted)))


def _row(world: World, name: str, candidate: Candidate, kl: float, wanted: Tensor) -> EstimatorRow:
    values = candidate(world.log_ratio)
    backpropagated = world.gradient(world.mean(values))
    values = values.detach()
    mean = world.mean(values).item()
    return EstimatorRow(
        name=name,
        value=known(mean),
        bias=known(mean - kl),
        spread=known(world.variance(values).sqrt().item()),
        negative=known(world.mean((values < 0).double()).item(), "probability"),
        gradient_error=relative_error(backpropagated, wanted),
    )


def exact_row(kl: float, gradient_error: float | None) -> EstimatorRow:
    """The KL itself: nothing is drawn, so nothing varies."""
    return EstimatorRow(
        name=EXACT,
        value=known(kl),
        bias=known(0.0),
        spread=known(0.0),
        negative=known(0.0, "probability"),
        gradient_error=gradient_error,
    )


def known(value: float, unit: str = "nats") -> Number:
    """A number that was computed, not measured."""
    return Number(value=value, unit=unit, standard_error=0.0, ci95=(value, value))
