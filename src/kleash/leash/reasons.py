"""Why a controller has moved beta, in words."""

import math
from typing import SupportsFloat

from kleash.leash.controllers import Leash
from kleash.leash.schedules import TargetSchedule
from kleash.leash.steering import Anticipating

LONGEST_CLIMB = 99.0
"""Updates until the target is met beyond which nothing is said of when."""


def beta_reason(before: Leash, after: Leash, measured_nats: SupportsFloat) -> str | None:
    """Why ``before.after(measured_nats)`` has another beta, with the numbers; None if it has not.

    ::

        beta 0.05 -> 0.0743: KL 5.18 is below its target of 8, and would pass it in 1.5 updates
        beta 0.21 -> 0.2057: KL 6.4 is below its target of 8

    Args:
        before: the controller that was told the measurement.
        after: the one that it returned.
        measured_nats: the KL.
    """
    if after.beta == before.beta:
        return None
    moved = f"beta {before.beta:.4g} -> {after.beta:.4g}"
    if before.target_nats is None:
        return f"{moved}: by its schedule"
    measured, target = float(measured_nats), before.target_nats
    where = "above" if measured > target else "below" if measured < target else "at"
    factor = f", {measured / target:.2g} times" if measured > 1.2 * target else ""
    state = f"KL {measured:.3g} is {where} its target of {target:g}{factor}"
    return f"{moved}: {state}{_trend(before, after.beta > before.beta, measured)}"


def _trend(before: Leash, rises: bool, measured: float) -> str:
    """Where the KL comes from, as far as it explains why beta rises or falls."""
    inner = before.controller if isinstance(before, TargetSchedule) else before
    if not isinstance(inner, Anticipating) or not inner.levels or not math.isfinite(measured):
        return ""
    earlier = math.exp(min(inner.levels[0], 700.0))
    change, target = measured - earlier, float(before.target_nats or 0.0)
    if measured < target and rises:
        updates = (target - measured) / change if change > 0 else math.inf
        return f", and would pass it in {updates:.2g} updates" if updates < LONGEST_CLIMB else ""
    if measured > target and not rises:
        return ", and comes down"
    if measured > target and change > 0:
        return ", and rises"
    return ""
