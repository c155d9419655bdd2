"""Means and spreads over seeds with intervals; uses numpy and the standard library only, for reproducibility."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from kleash.uncertainty import student_t_quantile

LEVEL = 0.95
Numbers = Sequence[float]
Figure = dict[str, float | list[float] | None]


def mean_of(values: Numbers) -> Figure:
    """The mean with Student's interval, n - 1 degrees of freedom; without an interval for one value."""
    array = np.asarray(values, np.float64)
    value = float(array.mean())
    if len(array) < 2:
        return {"value": value, "ci95": None, "n": len(array)}
    reach = student_t_quantile((1 + LEVEL) / 2, len(array) - 1) * float(array.std(ddof=1)) / len(array) ** 0.5
    return {"value": value, "ci95": [value - reach, value + reach], "n": len(array)}


def difference_of(values: Numbers, baseline: Numbers) -> Figure:
    """The mean of ``values - baseline``, paired."""
    return mean_of(list(np.subtract(values, baseline)))


def spread_of(values: Numbers) -> Figure:
    """The standard deviation s with divisor n - 1; the interval assumes normally distributed values.

    (n - 1) s^2 / sigma^2 has a chi-squared distribution with n - 1 degrees of freedom.
    """
    array = np.asarray(values, np.float64)
    if len(array) < 3:
        return {"value": None, "ci95": None, "n": len(array)}
    value, freedom = float(array.std(ddof=1)), len(array) - 1
    ends = [value * math.sqrt(freedom / chi_squared_quantile(p, freedom)) for p in _tails()]
    return {"value": value, "ci95": sorted(ends), "n": len(array)}


def ratio_of_spreads(values: Numbers, baseline: Numbers) -> Figure:
    """The standard deviation of ``values`` over that of ``baseline``, paired: interval of Pitman and Morgan.

        x - l y and x + l y are uncorrelated where l = sigma_x / sigma_y.
        l^2 = s_x^2 / s_y^2 (K +- sqrt(K^2 - 1)),    K = 1 + 2 (1 - r^2) t^2 / (n - 2)

    t is Student's with n - 2 degrees of freedom, r the correlation. Exact for normally distributed pairs.

    References:
        Pitman (1939), "A Note on Normal Correlation"; Morgan (1939), "A Test for the Significance of the Difference
        between the Two Variances in a Sample from a Normal Bivariate Population".
    """
    x, y = np.asarray(values, np.float64), np.asarray(baseline, np.float64)
    if len(x) < 4:
        return {"value": None, "ci95": None, "n": len(x)}
    value = float(x.std(ddof=1) / y.std(ddof=1))
    correlation = float(np.corrcoef(x, y)[0, 1])
    t = student_t_quantile((1 + LEVEL) / 2, len(x) - 2)
    k = 1 + 2 * (1 - correlation**2) * t**2 / (len(x) - 2)
    root = math.sqrt(k**2 - 1)
    return {"value": value, "ci95": [value * math.sqrt(k - root), value * math.sqrt(k + root)], "n": len(x)}


def chi_squared_quantile(probability: float, freedom: int) -> float:
    """The quantile of the chi-squared distribution, by bisection."""
    return 2 * bisect(
        lambda x: gamma_below(freedom / 2, x) - probability, 0.0, freedom + 40 * freedom**0.5 + 40
    )


def gamma_below(shape: float, x: float) -> float:
    """The regularised lower incomplete gamma function, by its series, whose terms are all positive."""
    if x == 0:
        return 0.0
    term = total = 1 / shape
    count = shape
    while term > 1e-17 * total:
        count += 1
        term *= x / count
        total += term
    return total * math.exp(shape * math.log(x) - x - math.lgamma(shape))


def bisect(function: Callable[[float], float], low: float, high: float) -> float:
    """The zero of an increasing function, by bisection."""
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < 0 else (low, middle)
    return (low + high) / 2


def smoothed(values: Numbers, window: int) -> list[float]:
    """Moving means over ``window`` values; the first is that of the first ``window`` values."""
    return [float(np.mean(values[end - window : end])) for end in range(window, len(values) + 1)]


def reached(rewards: Numbers, kls: Numbers, reward: float, window: int) -> float | None:
    """The KL of a path at which its smoothed reward first reaches ``reward``; None if it never does.

    KL and reward are smoothed alike and interpolated linearly between steps.
    """
    paths = list(zip(smoothed(rewards, window), smoothed(kls, window), strict=True))
    if paths and paths[0][0] >= reward:
        return paths[0][1]
    for (r0, k0), (r1, k1) in pairwise(paths):
        if r1 >= reward:
            return k0 + (k1 - k0) * (reward - r0) / (r1 - r0)
    return None


def reward_at(kls: Numbers, rewards: Numbers, kl: float) -> float | None:
    """The reward of a frontier at a KL, interpolated linearly in sqrt(KL); None outside of its points."""
    order = np.argsort(kls)
    across, up = np.sqrt(np.asarray(kls)[order]), np.asarray(rewards)[order]
    if not across[0] <= math.sqrt(kl) <= across[-1]:
        return None
    return float(np.interp(math.sqrt(kl), across, up))


def _tails() -> tuple[float, float]:
    return (1 - LEVEL) / 2, (1 + LEVEL) / 2
