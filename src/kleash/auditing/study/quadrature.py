"""Integrals over the real line, cut wherever the integrand may jump."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

PANELS, NODES = 32, 24


class Points(NamedTuple):
    """Where to evaluate an integrand, and what each value counts for."""

    x: Float64[Tensor, "points"]
    width: Float64[Tensor, "points"]


def points_between(ends: Sequence[float]) -> Points:
    """Gauss-Legendre points on each interval between neighbouring ``ends``, in 32 equal panels of 24 each."""
    nodes, weights = np.polynomial.legendre.leggauss(NODES)
    x: list[np.ndarray] = []
    width: list[np.ndarray] = []
    for low, high in pairwise(ends):
        edges = np.linspace(low, high, PANELS + 1)
        half = np.diff(edges)[:, None] / 2
        x.append(((edges[:-1, None] + half) + half * nodes).ravel())
        width.append((half * weights).ravel())
    return Points(torch.from_numpy(np.concatenate(x)), torch.from_numpy(np.concatenate(width)))


def sign_changes(function: Callable[[Tensor], Tensor], low: float, high: float) -> list[float]:
    """Where ``function`` passes through 0 between ``low`` and ``high``, to 13 digits.

    Each place is looked for among 1000 intervals, and then six times over among 64 parts of the one found.
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
    changed = signs[:, 1:] != signs[:, :-1]
    return x[:, :-1][changed].unsqueeze(-1), x[:, 1:][changed].unsqueeze(-1)
