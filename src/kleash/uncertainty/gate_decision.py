"""The decision whether an estimated quantity is at most a limit, and how many more tokens may decide it."""

import math
from typing import Literal, NamedTuple

from kleash.uncertainty.diagnostics import FEW_CLUSTERS

LARGEST_COUNT = 2**63
"""A number of tokens from here on is not reported."""


class GateDecision(NamedTuple):
    """Whether a quantity is at most a limit."""

    verdict: Literal["passed", "failed", "undecided"]
    more_tokens: int | None
    """Of an undecided one, the approximate number of further tokens that may decide it; None if it is decided, or if
    no number of tokens is known to decide it."""


def decide_gate(
    value: float,
    ci95: tuple[float, float],
    *,
    at_most: float,
    noise_floor: float,
    clusters: int,
    tokens: int,
) -> GateDecision:
    """Decide whether a quantity is at most a limit, by its 95 % interval and its noise floor.

        passed      upper end + noise floor <= limit, and at least 30 clusters
        failed      lower end - noise floor > limit, or the quantity is infinite
        undecided   otherwise, also if a number is NaN

    A quantity that equals the limit passes in at most 2.4 % of measurements and fails in at most 3 % (simulated for
    normal clusters, and lognormal ones of one length and a log standard deviation of 1: benchmarks/gates.py); one whose
    clusters have a longer tail passes more often. The number of further tokens assumes that the ends of the interval
    approach the value with the square root of the tokens, and that clusters do not change in length. It is not known
    where an end is infinite: with one cluster, or where all clusters are equal.

    Args:
        value: the estimate; NaN where bounds alone are known.
        ci95: the ends of its 95 % interval.
        at_most: the limit.
        noise_floor: the size of rounding errors, in the unit of the value; at least 0.
        clusters: number of independent clusters behind the interval.
        tokens: number of tokens in them.
    """
    low, high = ci95
    if value == math.inf or low - noise_floor > at_most:
        return GateDecision("failed", None)
    is_below = high + noise_floor <= at_most
    if is_below and clusters >= FEW_CLUSTERS:
        return GateDecision("passed", None)
    if clusters == 0 or (not is_below and math.isnan(value + noise_floor)):
        return GateDecision("undecided", None)
    factor = 1.0 if is_below else _token_factor(value, ci95, at_most, noise_floor)
    # Below 30 clusters, the ends of the interval say little about those of a larger sample.
    factor = max(FEW_CLUSTERS / clusters, factor)
    more_tokens = tokens * (factor - 1)
    return GateDecision("undecided", math.ceil(more_tokens) if more_tokens < LARGEST_COUNT else None)


def _token_factor(value: float, ci95: tuple[float, float], at_most: float, noise_floor: float) -> float:
    """The factor by which the number of tokens has to grow until the interval lies on one side of the limit.

    Infinite if the value is as near to the limit as the noise floor, or if the interval is not finite.
    """
    low, high = ci95
    distance = abs(value - at_most) - noise_floor
    half_width = high - value if value < at_most else value - low
    if distance <= 0 or not math.isfinite(half_width):
        return math.inf
    return max(1.0, (half_width / distance) ** 2)
