"""Case (a): one sample from a normal distribution, by quadrature; and noise as a function of the distance."""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from estimator_study.enumeration import EnumeratedPair, control_variate, enumerated_rows
from estimator_study.results import StudyCase

PANELS, NODES = 32, 24
Split = Literal["nowhere", "log ratio", "estimates"]
SHIFTS = (0.1, 1.0, 3.0)
REACH = 16.0
"""How far beyond the two means the integrals go: there the density is below 1e-55."""


class Quadrature(NamedTuple):
    """Points at which to evaluate an integrand, and their weights."""

    x: Float64[Tensor, "points"]
    weights: Float64[Tensor, "points"]


def gauss_legendre(ends: Sequence[float]) -> Quadrature:
    """Gauss-Legendre points on each interval between neighbouring ``ends``: 32 equal panels of 24 points."""
    nodes, node_weights = np.polynomial.legendre.leggauss(NODES)
    x: list[np.ndarray] = []
    weights: list[np.ndarray] = []
    for low, high in pairwise(ends):
        edges = np.linspace(low, high, PANELS + 1)
        half = np.diff(edges)[:, None] / 2
        x.append(((edges[:-1, None] + half) + half * nodes).ravel())
        weights.append((half * node_weights).ravel())
    return Quadrature(torch.from_numpy(np.concatenate(x)), torch.from_numpy(np.concatenate(weights)))


def sign_changes(function: Callable[[Tensor], Tensor], low: float, high: float) -> list[float]:
    """The zeros of ``function`` between ``low`` and ``high`` at which its sign changes, to 13 digits.

    Brackets among 1000 intervals, each narrowed six times to one of 64 parts.
    """
    x = torch.linspace(low, high, 1001, dtype=torch.float64)
    left, right = _brackets(function, x.unsqueeze(0))
    parts = torch.linspace(0, 1, 65, dtype=torch.float64)
    for _ in range(6):
        left, right = _brackets(function, left + (right - left) * parts)
    return ((left + right) / 2).flatten().tolist()


def _brackets(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """The ends of the intervals in each row of ``x`` over which the sign changes, one a row."""
    signs = torch.signbit(function(x))
    changes = signs[:, 1:] != signs[:, :-1]
    return x[:, :-1][changes].unsqueeze(-1), x[:, 1:][changes].unsqueeze(-1)


def log_normal(x: Tensor, mean: Tensor, log_scale: Tensor) -> Tensor:
    """The log density at ``x`` of a normal distribution."""
    return -((x - mean) / log_scale.exp()).square() / 2 - log_scale - math.log(2 * math.pi) / 2


def gaussian_pair(
    mean: float,
    scale: float,
    log_density_q: Callable[[Tensor], Tensor],
    ends: tuple[float, float],
    *,
    split: Split = "estimates",
) -> EnumeratedPair:
    """p = N(mean, scale^2) against any density q; the mean and the log of the scale are the parameters.

    Args:
        mean: of p.
        scale: of p, its standard deviation.
        log_density_q: the log density of q.
        ends: the limits of the integrals.
        split: where the integrals are split, since an integrand has a kink or a jump there: nowhere; at the zeros
            of the log ratio (for |u|); or at the zeros of any estimate (for the shares of negative values).
    """
    parameters = tuple(
        torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (mean, math.log(scale))
    )

    def pair(splits: Iterable[float]) -> EnumeratedPair:
        x, weights = gauss_legendre((ends[0], *sorted(splits), ends[1]))
        return EnumeratedPair(
            logp=log_normal(x, *parameters).unsqueeze(0),
            logq=log_density_q(x).unsqueeze(0),
            measure=weights.unsqueeze(0),
            visits=torch.ones(1, dtype=torch.float64),
            parameters=parameters,
        )

    def log_ratio(x: Tensor) -> Tensor:
        return log_normal(x, *parameters).detach() - log_density_q(x)

    if split == "nowhere":
        return pair(())
    splits = sign_changes(log_ratio, *ends)
    if split == "log ratio":
        return pair(splits)
    weight = pair(splits).control_weight()
    return pair({*splits, *sign_changes(lambda x: control_variate(log_ratio(x), weight=weight), *ends)})


def shifted_pair(shift: float) -> EnumeratedPair:
    """N(0, 1) against N(shift, 1)."""
    q = torch.tensor(shift, dtype=torch.float64), torch.tensor(0.0, dtype=torch.float64)
    return gaussian_pair(0.0, 1.0, lambda x: log_normal(x, *q), (-REACH, REACH + shift))


def normal_case(shift: float) -> StudyCase:
    """Every estimator on one sample from N(0, 1) against N(shift, 1)."""
    pair = shifted_pair(shift)
    return StudyCase(
        name=f"normals-{shift:g}",
        title=f"N(0, 1) against N({shift:g}, 1)",
        kl=pair.kl().item(),
        rows=enumerated_rows(pair),
        notes=(f"the control variate has a = {pair.control_weight():.3f}",),
    )


def noise_crossing() -> float:
    """The KL in nats at which k1 becomes less noisy than k3 for N(0, 1) against N(m, 1), by bisection."""
    low, high = 0.1, 10.0
    for _ in range(100):
        middle = (low + high) / 2
        k3_varies_less = math.expm1(middle) - middle < middle  # of a squared shift
        low, high = (middle, high) if k3_varies_less else (low, middle)
    return low / 2
