"""What all beta controllers share: how a measurement is read, and how beta is kept in bounds."""

import math
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, NamedTuple, SupportsFloat, TypeVar, cast

from kleash.errors import OptionError

Per = Literal["sequence", "token"]
PERS: tuple[Per, ...] = ("sequence", "token")
LARGEST_COUNT = 2**53
"""Sequences that a float still counts one by one; nobody measures more."""
LARGEST_EXPONENT = 700.0
ZERO = "the measured KL is 0: answered as the largest error below the target"
AnySteered = TypeVar("AnySteered", bound="Steered")


class Reading(NamedTuple):
    """A measurement as a controller answers it."""

    ratio: float | None
    """Measured over target: at least 0, inf for an infinite KL; None where it is ignored."""
    event: str | None
    """What was wrong with it."""


def read(measured_nats: SupportsFloat, target_nats: float, sequences: int) -> Reading:
    """The measurement over the target; what no KL can be is ignored or answered as 0, and said.

    Raises:
        OptionError: if ``sequences`` is negative.
    """
    if sequences < 0:
        raise OptionError(f"sequences is {sequences}; give how many were measured, at least 0")
    if sequences == 0:
        return Reading(None, "ignored: no sequence was measured")
    measured = float(measured_nats)
    if math.isnan(measured) or measured == -math.inf:
        return Reading(None, f"ignored: the measured KL is {measured}")
    if measured == math.inf:
        return Reading(math.inf, "the measured KL is infinite: answered as the largest error")
    if measured < 0:
        return Reading(0.0, f"the measured KL is {measured:g} and none is below 0: answered as 0")
    return Reading(measured / target_nats, ZERO if measured == 0 else None)


def within(value: float, largest: float) -> float:
    """``value``, but no further from 0 than ``largest``."""
    return max(-largest, min(largest, value))


def growth(nats: float) -> float:
    """exp, for any number: what overflows is bounded by every step anyway."""
    return math.exp(min(nats, LARGEST_EXPONENT))


@dataclass(frozen=True, kw_only=True)
class Steered:
    """Beta between two bounds, moved by a factor per update so that the KL meets a target."""

    kind: ClassVar[str]
    """Its name in a dict."""

    beta: float
    """Nats of reward paid for one nat of KL, now."""
    target_nats: float
    """The KL to settle at, above 0, per what ``per`` says."""
    per: Per = "sequence"
    """"sequence": target and measurements are mean sums over responses; "token": means over tokens."""
    beta_min: float = 1e-4
    """Beta never falls below; above 0, since from 0 no factor leads back."""
    beta_max: float = 100.0
    """Beta never rises above."""
    largest_step: float = 2.0
    """The most that one update multiplies or divides beta by."""
    event: str | None = None
    """Why the last step was bounded or ignored; None where nothing was."""

    def __post_init__(self) -> None:
        """Raise OptionError where a number means nothing."""
        require_per(self.per)
        if not 0 < self.beta_min <= self.beta_max < math.inf:
            raise OptionError(
                f"beta_min is {self.beta_min} and beta_max {self.beta_max}; give finite bounds above 0, in order"
            )
        if not self.beta_min <= self.beta <= self.beta_max:
            raise OptionError(
                f"beta is {self.beta}, outside {self.beta_min:g} to {self.beta_max:g}; start within the bounds"
            )
        require_above(0.0, target_nats=self.target_nats)
        require_above(1.0, largest_step=self.largest_step)

    def to_dict(self) -> dict[str, object]:
        """Everything there is to it, as JSON takes it; ``beta_from_dict`` makes it again."""
        return {"kind": self.kind, **saved_fields(self)}


def saved_fields(record: Any) -> dict[str, object]:
    """The fields of a flat dataclass, tuples as lists."""
    values: dict[str, Any] = {field.name: getattr(record, field.name) for field in fields(record)}
    return {
        name: list(cast("tuple[Any, ...]", x)) if isinstance(x, tuple) else x for name, x in values.items()
    }


def moved(controller: AnySteered, factor: float, event: str | None) -> AnySteered:
    """The controller with beta times ``factor``, as far as step and bounds allow; the event says where not."""
    events = [] if event is None else [event]
    largest = controller.largest_step
    step = max(1 / largest, min(largest, factor))
    if step != factor:
        events.append(f"a step of times {factor:.4g} bounded to {step:.4g}")
    wanted = controller.beta * step
    beta = max(controller.beta_min, min(controller.beta_max, wanted))
    if beta != wanted:
        name = "beta_min" if beta > wanted else "beta_max"
        events.append(f"beta {wanted:.4g} bounded to {name} {beta:g}")
    return replace(controller, beta=beta, event="; ".join(events) or None)


def require_per(per: str) -> None:
    """Raise unless it is one of ``PERS``."""
    if per not in PERS:
        raise OptionError(f"per is {per!r}; there are {', '.join(PERS)}")


def require_above(least: float, **given: float | int) -> None:
    """Raise unless each is finite and above ``least``."""
    for name, value in given.items():
        if not least < value < math.inf:
            raise OptionError(f"{name} is {value}; give a finite number above {least:g}")


def require_gains(**given: float) -> None:
    """Raise unless each is finite and at least 0."""
    for name, value in given.items():
        if not 0 <= value < math.inf:
            raise OptionError(f"{name} is {value}; give a finite gain, at least 0")
