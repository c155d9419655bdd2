"""Means and spreads over seeds, with intervals: numpy and the standard library, so that every machine has the same."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from kleash.uncertainty import student_t_quantile

LEVEL = 0.95
Numbers = Sequence[float]
Figure = dict[str, float | list[float] | None]


def mean_of(values: Numbers) -> Figure:
    """The mean with Student's interval, n - 1 degrees of freedom; of one value, no interval."""
    found = np.asarray(values, np.float64)
    value = float(found.mean())
    if len(found) < 2:
        return {"value": value, "ci95": None, "n": len(found)}
    reach = student_t_quantile((1 + LEVEL) / 2, len(found) - 1) * float(found.std(ddof=1)) / len(found) ** 0.5
    return {"value": value, "ci95": [value - reach, value + reach], "n": len(found)}


def difference_of(ours: Numbers, theirs: Numbers) -> Figure:
    """The mean of ours - theirs, pair by pair."""
    return mean_of(list(np.subtract(ours, theirs)))


def spread_of(values: Numbers) -> Figure:
    """The standard deviation s, n - 1 below; the interval is that of normally distributed values.

    (n - 1) s^2 / sigma^2 has a chi-squared distribution with n - 1 degrees of freedom.
    """
    found = np.asarray(values, np.float64)
    if len(found) < 3:
        return {"value": None, "ci95": None, "n": len(found)}
    value, freedom = float(found.std(ddof=1)), len(found) - 1
    ends = [value * math.sqrt(freedom / chi_squared_quantile(p, freedom)) for p in _tails()]
    return {"value": value, "ci95": sorted(ends), "n": len(found)}


def ratio_of_spreads(ours: Numbers, theirs: Numbers) -> Figure:
    """The standard deviation of ours over that of theirs, which come in pairs: interval of Pitman and Morgan.

        x - l y and x + l y are uncorrelated where l = sigma_x / sigma_y.
        l^2 = s_x^2 / s_y^2 (K +- sqrt(K^2 - 1)),    K = 1 + 2 (1 - r^2) t^2 / (n - 2)

    t is Student's with n - 2 degrees of freedom, r the correlation. Exact where the pairs are normally distributed.

    References:
        Pitman (1939), "A Note on Normal Correlation"; Morgan (1939), "A Test for the Significance of the Difference
        between the Two Variances in a Sample from a Normal Bivariate Population".
    """
    x, y = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    if len(x) < 4:
        return {"value": None, "ci95": None, "n": len(x)}
    value = float(x.std(ddof=1) / y.std(ddof=1))
    correlation = float(np.corrcoef(x, y)[0, 1])
    t = student_t_quantile((1 + LEVEL) / 2, len(x) - 2)
    k = 1 + 2 * (1 - correlation**2) * t**2 / (len(x) - 2)
    root = math.sqrt(k**2 - 1)
    return {"value": value, "ci95": [value * math.sqrt(k - root), value * math.sqrt(k + root)], "n": len(x)}


def chi_squared_quantile(probability: float, freedom: int) -> float:
    """What a chi-squared variable stays below with this probability, by halving an interval."""
    return 2 * halved(
        lambda x: gamma_below(freedom / 2, x) - probability, 0.0, freedom + 40 * freedom**0.5 + 40
    )


def gamma_below(shape: float, x: float) -> float:
    """The regularised lower incomplete gamma function, by its series: every term is positive, nothing cancels."""
    if x == 0:
        return 0.0
    term = total = 1 / shape
    count = shape
    while term > 1e-17 * total:
        count += 1
        term *= x / count
        total += term
    return total * math.exp(shape * math.log(x) - x - math.lgamma(shape))


def halved(function: Callable[[float], float], low: float, high: float) -> float:
    """Where a rising function is 0."""
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < 0 else (low, middle)
    return (low + high) / 2


def smoothed(values: Numbers, window: int) -> list[float]:
    """Means of ``window`` neighbours: the first stands for the first ``window`` steps."""
    return [float(np.mean(values[end - window : end])) for end in range(window, len(values) + 1)]


def reached(rewards: Numbers, kls: Numbers, reward: float, window: int) -> float | None:
    """The KL of a path where its reward is first ``reward``, both smoothed alike; None if it never is.

    Between the last step below and the first step not below, both are taken to be straight lines.
    """
    paths = list(zip(smoothed(rewards, window), smoothed(kls, window), strict=True))
    if paths and paths[0][0] >= reward:
        return paths[0][1]
    for (r0, k0), (r1, k1) in pairwise(paths):
        if r1 >= reward:
            return k0 + (k1 - k0) * (reward - r0) / (r1 - r0)
    return None


def reward_at(kls: Numbers, rewards: Numbers, kl: float) -> float | None:
    """The reward of a frontier at a KL, straight lines in sqrt(KL) between its points; None outside of them."""
    order = np.argsort(kls)
    across, up = np.sqrt(np.asarray(kls)[order]), np.asarray(rewards)[order]
    if not across[0] <= math.sqrt(kl) <= across[-1]:
        return None
    return float(np.interp(math.sqrt(kl), across, up))


def _tails() -> tuple[float, float]:
    return (1 - LEVEL) / 2, (1 + LEVEL) / 2
