"""Quantiles of Student's t distribution, without scipy."""

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from kleash.errors import OptionError

FARTHEST = 1e-8
"""The smallest probability of a tail: the sum is no integral of it for smaller ones."""
STIRLING_FROM = 100.0
"""Half the degrees of freedom above which the Stirling series of the gamma ratio is exact to rounding and more accurate
than a difference of two lgamma."""


def student_t_quantile(probability: float, degrees_of_freedom: float | int) -> float:
    """The quantile t of Student's t distribution: P(T <= t) = probability.

        t = sqrt(nu) tan(theta),    1/2 + c integral_0^theta cos(x)^(nu - 1) dx = probability,
        c = Gamma((nu + 1) / 2) / (sqrt(pi) Gamma(nu / 2))

    The integral is a Gauss-Legendre sum, and theta is found by Newton's method. The integral is concave in theta, so
    the iteration rises to the solution without overshooting. The relative error is below 1e-9 for probabilities
    between 1e-4 and 1 - 1e-4, below 1e-6 for others, and for 1 to ten million degrees of freedom.

    Args:
        probability: from 1e-8 to 1 - 1e-8.
        degrees_of_freedom: nu, a number from 1 on; for probabilities beyond 0.001 and 0.999, where the sum is less
            accurate for others, a whole number.

    Raises:
        OptionError: if either is outside its range.
    """
    if not FARTHEST <= probability <= 1 - FARTHEST:
        raise OptionError(f"probability is {probability}; give one from {FARTHEST} to 1 - {FARTHEST}")
    is_in_tail = not 0.001 <= probability <= 0.999
    if not 1 <= degrees_of_freedom < math.inf or (is_in_tail and degrees_of_freedom % 1):
        raise OptionError(f"degrees_of_freedom is {degrees_of_freedom}; give a whole number from 1 on")
    upper = _upper_quantile(max(probability, 1 - probability), degrees_of_freedom)
    return math.copysign(upper, probability - 0.5)


@lru_cache(maxsize=1024)
def _upper_quantile(probability: float, degrees_of_freedom: float | int) -> float:
    """The quantile of a probability of at least 1/2, by Newton's method for theta (see ``student_t_quantile``)."""
    nodes, weights = _gauss_legendre()
    scale = math.exp(_log_gamma_ratio(degrees_of_freedom / 2)) / math.sqrt(math.pi)
    theta, step = 0.0, 1.0
    while step > 1e-15 * theta and probability > 0.5:
        mass = theta * float(weights @ _density(theta * nodes, degrees_of_freedom))
        step = ((probability - 0.5) / scale - mass) / float(
            _density(np.array([theta]), degrees_of_freedom)[0]
        )
        theta += max(step, 0.0)
    return math.sqrt(degrees_of_freedom) * math.tan(theta)


def _density(theta: NDArray[np.float64], degrees_of_freedom: float | int) -> NDArray[np.float64]:
    """cos(theta)^(nu - 1), accurate also for the small angles of many degrees of freedom."""
    return np.exp((degrees_of_freedom - 1) / 2 * np.log1p(-(np.sin(theta) ** 2)))


def _log_gamma_ratio(half: float) -> float:
    """log Gamma(half + 1/2) - log Gamma(half)."""
    if half < STIRLING_FROM:
        return math.lgamma(half + 0.5) - math.lgamma(half)
    return 0.5 * math.log(half) - 1 / (8 * half) + 1 / (192 * half**3) - 1 / (640 * half**5)


@lru_cache(maxsize=1)
def _gauss_legendre() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Nodes and weights of Gauss-Legendre integration on (0, 1)."""
    nodes, weights = np.polynomial.legendre.leggauss(96)
    return (nodes + 1) / 2, weights / 2
