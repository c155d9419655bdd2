"""Schedules of beta, or of a controller's target, over the number of updates."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import ClassVar, SupportsFloat

from kleash.errors import OptionError
from kleash.leash.controller_base import BetaRecord, Per, PlannedBeta, TargetController, require_above
from kleash.registry import look_up

SHAPES: Mapping[str, Callable[[float], float]] = MappingProxyType(
    {
        "constant": lambda done: 0.0,
        "linear": lambda done: done,
        "cosine": lambda done: (1 - math.cos(math.pi * done)) / 2,
    }
)
"""Name -> function from the fraction of the updates made to the fraction of the way from begin to end."""


@dataclass(frozen=True, kw_only=True)
class BetaSchedule(PlannedBeta):
    """A beta that moves from ``begin`` to ``end`` over ``updates``, independently of the measured KL."""

    kind: ClassVar[str] = "schedule"

    begin: float
    """The beta of the first update; finite, at least 0."""
    end: float
    """The beta from ``updates`` on; finite, at least 0."""
    updates: int
    """The number of updates from begin to end."""
    shape: str = "linear"
    """"constant" (stays at ``begin``), "linear" or "cosine": a name of ``SHAPES``."""
    done: int = 0
    """Updates made."""

    def __post_init__(self) -> None:
        """Raise OptionError if a field is out of range."""
        super().__post_init__()
        require_schedule(self.updates, self.done, self.shape)
        if not (0 <= self.begin < math.inf and 0 <= self.end < math.inf):
            raise OptionError(f"beta goes from {self.begin} to {self.end}; give finite numbers, at least 0")

    @property
    def beta(self) -> float:
        """The current beta: nats of reward paid for one nat of KL."""
        return interpolate(self.begin, self.end, self.done / self.updates, self.shape)

    def after(
        self,
        measured_nats: SupportsFloat,
        *,
        sequences: int = 1,
        standard_error: SupportsFloat | None = None,
    ) -> "BetaSchedule":
        """The schedule for the next update, independently of the measurement."""
        return replace(self, done=self.done + 1)


@dataclass(frozen=True, kw_only=True)
class TargetSchedule(BetaRecord):
    """A controller whose target KL moves from ``begin_nats`` to ``end_nats`` over ``updates``."""

    kind: ClassVar[str] = "target_schedule"

    controller: TargetController
    """The controller; the schedule replaces its target."""
    begin_nats: float
    """The target of the first update, above 0."""
    end_nats: float
    """The target from ``updates`` on, above 0."""
    updates: int
    """The number of updates from begin to end."""
    shape: str = "linear"
    """"constant" (stays at ``begin_nats``), "linear" or "cosine": a name of ``SHAPES``."""
    done: int = 0
    """Updates made."""

    def __post_init__(self) -> None:
        """Raise OptionError if a field is out of range."""
        require_schedule(self.updates, self.done, self.shape)
        require_above(0.0, begin_nats=self.begin_nats, end_nats=self.end_nats)

    @property
    def beta(self) -> float:
        """The current beta: nats of reward paid for one nat of KL."""
        return self.controller.beta

    @property
    def event(self) -> str | None:
        """Why the last step was bounded or the measurement ignored; None otherwise."""
        return self.controller.event

    @property
    def target_nats(self) -> float:
        """The target KL of this update."""
        return interpolate(self.begin_nats, self.end_nats, self.done / self.updates, self.shape)

    @property
    def per(self) -> Per:
        """The unit of target and measurements."""
        return self.controller.per

    def after(
        self,
        measured_nats: SupportsFloat,
        *,
        sequences: int = 1,
        standard_error: SupportsFloat | None = None,
    ) -> "TargetSchedule":
        """The schedule for the next update; the measured KL is compared with this update's target.

        Raises:
            OptionError: if ``sequences`` or ``standard_error`` is negative.
        """
        controller = replace(self.controller, target_nats=self.target_nats)
        controller = controller.after(measured_nats, sequences=sequences, standard_error=standard_error)
        return replace(self, controller=controller, done=self.done + 1)


def interpolate(begin: float, end: float, progress: float, shape: str) -> float:
    """Interpolate between two numbers by a name of ``SHAPES``; exact at both ends."""
    fraction = SHAPES[shape](min(progress, 1.0))
    return end if fraction == 1 else begin + (end - begin) * fraction


def require_schedule(updates: int, done: int, shape: str) -> None:
    """Raise OptionError unless the schedule is valid."""
    look_up(SHAPES, shape, "shape of a schedule")
    if updates < 1 or done < 0:
        raise OptionError(f"{done} of {updates} updates are made; give at least 1 in all, and count from 0")
