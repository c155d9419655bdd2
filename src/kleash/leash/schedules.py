"""Beta, or the target of a controller, as a function of how many updates have been made."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import ClassVar, SupportsFloat

from kleash.errors import OptionError
from kleash.leash.controller_base import Per, field_values, require_above, require_per
from kleash.leash.controllers import DualBeta, PIDBeta, ZieglerBeta
from kleash.registry import look_up

SHAPES: Mapping[str, Callable[[float], float]] = MappingProxyType(
    {
        "constant": lambda done: 0.0,
        "linear": lambda done: done,
        "cosine": lambda done: (1 - math.cos(math.pi * done)) / 2,
    }
)
"""Name -> how much of the way from begin to end lies behind, from the share of the updates that do."""


@dataclass(frozen=True, kw_only=True)
class BetaSchedule:
    """A beta that goes from one number to another whatever is measured, and stays there."""

    kind: ClassVar[str] = "schedule"

    begin: float
    """The beta of the first update; finite, at least 0."""
    end: float
    """The beta from ``updates`` on; finite, at least 0."""
    updates: int
    """How many updates the way takes."""
    shape: str = "linear"
    """"constant" (stays at ``begin``), "linear" or "cosine": a name of ``SHAPES``."""
    done: int = 0
    """Updates made."""
    per: Per = "sequence"
    """What the measurements count per; nothing comes of it."""

    def __post_init__(self) -> None:
        """Raise OptionError where a number means nothing."""
        require_schedule(self.updates, self.done, self.shape)
        require_per(self.per)
        if not (0 <= self.begin < math.inf and 0 <= self.end < math.inf):
            raise OptionError(f"beta goes from {self.begin} to {self.end}; give finite numbers, at least 0")

    @property
    def beta(self) -> float:
        """Nats of reward paid for one nat of KL, now."""
        return interpolate(self.begin, self.end, self.done / self.updates, self.shape)

    @property
    def event(self) -> None:
        """None: nothing is ever bounded."""
        return None

    @property
    def target_nats(self) -> None:
        """None: it steers at nothing."""
        return None

    def after(self, measured_nats: SupportsFloat, *, sequences: int = 1) -> "BetaSchedule":
        """The leash for the next update, whatever was measured in this one."""
        return replace(self, done=self.done + 1)

    def to_dict(self) -> dict[str, object]:
        """Everything there is to it, as JSON takes it; ``beta_from_dict`` makes it again."""
        return {"kind": self.kind, **field_values(self)}


@dataclass(frozen=True, kw_only=True)
class TargetSchedule:
    """A controller whose target goes from one KL to another, and stays there."""

    kind: ClassVar[str] = "target_schedule"

    controller: ZieglerBeta | PIDBeta | DualBeta
    """What steers; its own target gives way to the schedule's."""
    begin_nats: float
    """The target of the first update, above 0."""
    end_nats: float
    """The target from ``updates`` on, above 0."""
    updates: int
    """How many updates the way takes."""
    shape: str = "linear"
    """"constant" (stays at ``begin_nats``), "linear" or "cosine": a name of ``SHAPES``."""
    done: int = 0
    """Updates made."""

    def __post_init__(self) -> None:
        """Raise OptionError where a number means nothing."""
        require_schedule(self.updates, self.done, self.shape)
        require_above(0.0, begin_nats=self.begin_nats, end_nats=self.end_nats)

    @property
    def beta(self) -> float:
        """Nats of reward paid for one nat of KL, now."""
        return self.controller.beta

    @property
    def event(self) -> str | None:
        """Why the last step was bounded or ignored; None where nothing was."""
        return self.controller.event

    @property
    def target_nats(self) -> float:
        """The KL to settle at, as of this update."""
        return interpolate(self.begin_nats, self.end_nats, self.done / self.updates, self.shape)

    @property
    def per(self) -> Per:
        """What target and measurements count per."""
        return self.controller.per

    def after(self, measured_nats: SupportsFloat, *, sequences: int = 1) -> "TargetSchedule":
        """The leash for the next update: this one's KL is held against this one's target.

        Raises:
            OptionError: if ``sequences`` is negative.
        """
        controller = replace(self.controller, target_nats=self.target_nats)
        return replace(
            self, controller=controller.after(measured_nats, sequences=sequences), done=self.done + 1
        )

    def to_dict(self) -> dict[str, object]:
        """Everything there is to it, as JSON takes it; ``beta_from_dict`` makes it again."""
        return {"kind": self.kind, **field_values(self), "controller": self.controller.to_dict()}


def interpolate(begin: float, end: float, share: float, shape: str) -> float:
    """Between two numbers; exactly either of them at its end."""
    fraction = SHAPES[shape](min(share, 1.0))
    return end if fraction == 1 else begin + (end - begin) * fraction


def require_schedule(updates: int, done: int, shape: str) -> None:
    """Raise unless the schedule is one."""
    look_up(SHAPES, shape, "shape of a schedule")
    if updates < 1 or done < 0:
        raise OptionError(f"{done} of {updates} updates are made; give at least 1 in all, and count from 0")
