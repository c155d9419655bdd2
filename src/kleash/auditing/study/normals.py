"""Case (a): one draw from a normal distribution, and the curves of noise against distance."""

import math
from collections.abc import Callable, Iterable
from typing import Literal

import torch
from torch import Tensor

from kleash.auditing.study.candidates import controlled
from kleash.auditing.study.quadrature import points_between, sign_changes
from kleash.auditing.study.worlds import World, known, rows_of
from kleash.records.study import SpreadCurves, StudyCase

Cut = Literal["nowhere", "log ratio", "estimates"]
SHIFTS = (0.1, 1.0, 3.0)
REACH = 16.0
"""How far from the two means the integrals go: beyond, a density is below 1e-55."""


def log_normal(x: Tensor, mean: Tensor, log_scale: Tensor) -> Tensor:
    """The log density at ``x`` of a normal distribution."""
    return -((x - mean) / log_scale.exp()).square() / 2 - log_scale - math.log(2 * math.pi) / 2


def gaussian_world(
    mean: float,
    scale: float,
    logq_at: Callable[[Tensor], Tensor],
    ends: tuple[float, float],
    *,
    cut: Cut = "estimates",
) -> World:
    """One draw from N(mean, scale^2) against any density; the mean and the log of the scale are parameters.

    Args:
        mean: of p.
        scale: of p, its standard deviation.
        logq_at: the log density of q.
        ends: between which the integrals go.
        cut: where they are cut: nowhere; where the log ratio passes through 0, and |u| has an edge; or where
            any estimate does, and the shares of negative values have one.
    """
    parameters = tuple(
        torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (mean, math.log(scale))
    )

    def world(cuts: Iterable[float]) -> World:
        x, width = points_between((ends[0], *sorted(cuts), ends[1]))
        return World(
            logp=log_normal(x, *parameters).unsqueeze(0),
            logq=logq_at(x).unsqueeze(0),
            measure=width.unsqueeze(0),
            visits=torch.ones(1, dtype=torch.float64),
            parameters=parameters,
        )

    def log_ratio(x: Tensor) -> Tensor:
        return log_normal(x, *parameters).detach() - logq_at(x)

    if cut == "nowhere":
        return world(())
    cuts = sign_changes(log_ratio, *ends)
    if cut == "log ratio":
        return world(cuts)
    weight = world(cuts).control_weight()
    return world({*cuts, *sign_changes(lambda x: controlled(log_ratio(x), weight=weight), *ends)})


def shifted(shift: float) -> World:
    """N(0, 1) against N(shift, 1)."""
    other = torch.tensor(shift, dtype=torch.float64), torch.tensor(0.0, dtype=torch.float64)
    return gaussian_world(0.0, 1.0, lambda x: log_normal(x, *other), (-REACH, REACH + shift))


def normal_case(shift: float) -> StudyCase:
    """Every estimator on one draw from N(0, 1) against N(shift, 1)."""
    world = shifted(shift)
    return StudyCase(
        name=f"normals-{shift:g}",
        title=f"N(0, 1) against N({shift:g}, 1)",
        drawn="one draw from p = N(0, 1); the gradient is in its mean and in the log of its scale",
        kl=known(world.exact().item()),
        rows=rows_of(world),
        notes=(f"the controlled estimate has a = {world.control_weight():.3f}",),
    )


def spread_curves(points: int = 61) -> SpreadCurves:
    """Standard deviation over the KL for N(0, 1) against N(m, 1), from the closed forms.

    KL = m^2 / 2,   Var k1 = m^2,   Var k2 = m^4 / 2 + m^6 / 4,   Var k3 = exp(m^2) - 1 - m^2
    """
    kls = [10 ** (-3 + 4 * step / (points - 1)) for step in range(points)]
    return SpreadCurves(
        kl=tuple(kls),
        spread={
            name: tuple(math.sqrt(variance(2 * kl)) / kl for kl in kls)
            for name, variance in VARIANCES.items()
        },
        crossing=_crossing(),
    )


VARIANCES: dict[str, Callable[[float], float]] = {
    "k1": lambda square: square,
    "k2": lambda square: square**2 / 2 + square**3 / 4,
    "k3": lambda square: math.expm1(square) - square,
}
"""Of one draw, as a function of the squared shift."""


def _crossing() -> float:
    """The KL above 0 at which k1 and k3 vary alike, by bisection."""
    low, high = 0.1, 10.0
    for _ in range(100):
        middle = (low + high) / 2
        k3_varies_less = VARIANCES["k3"](middle) < VARIANCES["k1"](middle)
        low, high = (middle, high) if k3_varies_less else (low, middle)
    return low / 2
