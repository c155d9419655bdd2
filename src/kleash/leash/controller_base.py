"""What all beta controllers share: how a measurement is read, and how beta is kept in bounds."""

import math
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, NamedTuple, SupportsFloat, TypeVar, cast

from kleash.errors import OptionError

Per = Literal["sequence", "token"]
KL_UNITS: tuple[Per, ...] = ("sequence", "token")
LARGEST_COUNT = 2**53
"""Sequences that a float still counts one by one; nobody measures more."""
LARGEST_EXPONENT = 700.0
ZERO_KL_EVENT = "the measured KL is 0: answered as the largest error below the target"
MAX_LOG_RATIO = 30.0
"""E-folds off the target from which a KL is not told from one that is further off."""
PATIENCE_UPDATES = 20.0
"""Updates in which a KL that rises reaches its target, if beta is to be left alone."""
NOISE_LOG_RATIO = 0.25
"""E-folds from the target within which what the KL does may be noise."""
STEADY_GROWTH = 0.15
"""E-folds per update up to which a KL that runs up to its target is left to the controller's own rule."""
AnyBounded = TypeVar("AnyBounded", bound="BoundedController")
AnyPredictive = TypeVar("AnyPredictive", bound="PredictiveController")


class Reading(NamedTuple):
    """A measurement as a controller answers it."""

    ratio: float | None
    """Measured over target: at least 0, inf for an infinite KL; None where it is ignored."""
    event: str | None
    """What was wrong with it."""


def read_measurement(measured_nats: SupportsFloat, target_nats: float, sequences: int) -> Reading:
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
    return Reading(measured / target_nats, ZERO_KL_EVENT if measured == 0 else None)


def clip(value: float, largest: float) -> float:
    """``value``, but no further from 0 than ``largest``."""
    return max(-largest, min(largest, value))


def bounded_exp(nats: float) -> float:
    """exp, for any number: what overflows is bounded by every step anyway."""
    return math.exp(min(nats, LARGEST_EXPONENT))


@dataclass(frozen=True, kw_only=True)
class BoundedController:
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
        return {"kind": self.kind, **field_values(self)}


@dataclass(frozen=True, kw_only=True)
class PredictiveController(BoundedController):
    """Beta that is moved by where the KL is going, not only by where it is.

    With ``lookahead`` above 0:

    - Below the target beta rises only if the KL, going on as it does, reaches the target within ``lookahead``
      updates; and falls only if it does not reach it within ``PATIENCE``. A climb towards the target is no reason
      to move beta.
    - A KL that runs up to its target for the first time, growing by more than a share ``STEADY`` per update, is
      braked: ``brake`` (growth - STEADY) is added to log beta. How fast it runs says how far beta is off.
    - Once it has been there, beta is loosened by a share ``caution`` only (in log beta) while the KL is further from
      the target than e^``NEAR``: what brought the KL down is about right, and loosened as fast lets it up again.
    """

    lookahead: float = 0.0
    """Updates ahead that the KL is extrapolated along a line through the last two; 0 for none of this."""
    brake: float = 1.5
    """What a KL that grows e-fold per update adds to log beta, while it runs up to its target for the first time."""
    caution: float = 1.0
    """Share of a loosening that is carried out while the KL swings far from a target that it has met before."""
    levels: tuple[float, ...] = ()
    """The log of the last two KLs, as they were answered; newest first."""
    reached: bool = False
    """Whether the KL has come to stand at or above the target since the start."""

    def __post_init__(self) -> None:
        """Raise OptionError where a number means nothing."""
        super().__post_init__()
        require_gains(lookahead=self.lookahead, brake=self.brake, caution=self.caution)
        if len(self.levels) > 2 or not all(map(math.isfinite, self.levels)):
            raise OptionError(
                f"levels are {self.levels}; give the logs of at most two KLs, or leave them out"
            )

    def trend(self, ratio: float, reach: float) -> "KLTrend":
        """Where a KL of so many times the target comes from and is going; levels further off than ``reach`` are cut."""
        log_target = math.log(self.target_nats)
        level = clip(math.log(ratio) if ratio > 0 else -math.inf, reach)
        earlier = tuple(clip(log_kl - log_target, reach) for log_kl in self.levels)
        return KLTrend(level=level, earlier=earlier, lookahead=self.lookahead)

    def with_response(
        self: AnyPredictive, trend: "KLTrend", factor: float, event: str | None
    ) -> AnyPredictive:
        """The controller with beta times ``factor``, as far as the course of the KL, step and bounds allow."""
        if self.lookahead > 0:
            factor = trend.allowed_factor(factor)
            if self.reached and factor < 1 and trend.is_far:
                factor **= self.caution
            if not self.reached and trend.is_crossing:
                factor *= bounded_exp(self.brake * max(0.0, trend.growth - STEADY_GROWTH))
        levels = (math.log(self.target_nats) + trend.level, *self.levels[:1])
        measured = replace(self, levels=levels, reached=self.reached or trend.has_arrived)
        return with_beta_times(measured, factor, event)


@dataclass(frozen=True, kw_only=True)
class KLTrend:
    """A KL and the two before it, as logs of their shares of the target."""

    level: float
    earlier: tuple[float, ...]
    """Newest first; at most two."""
    lookahead: float

    @property
    def change(self) -> float:
        """By how much of the target the KL has grown since the last update; 0 at the first."""
        return _ratio(self.level) - _ratio(self.earlier[0]) if self.earlier else 0.0

    @property
    def growth(self) -> float:
        """E-folds per update: the smaller of those since the last update and since the one before."""
        if not self.earlier:
            return 0.0
        return min(self.level - self.earlier[0], (self.level - self.earlier[-1]) / len(self.earlier))

    @property
    def predicted(self) -> float:
        """The KL over the target in ``lookahead`` updates, if it goes on along a line; at least 0."""
        return max(0.0, _ratio(self.level) + self.lookahead * self.change)

    @property
    def is_far(self) -> bool:
        """Whether the KL is further from the target than noise carries it."""
        return abs(self.level) > NOISE_LOG_RATIO

    @property
    def is_approaching(self) -> bool:
        """Whether the KL, going on as in the last two updates, reaches the target within ``PATIENCE``."""
        if not self.earlier or self.level > -NOISE_LOG_RATIO:
            return False
        change = (_ratio(self.level) - _ratio(self.earlier[-1])) / len(self.earlier)
        return change > 0 and _ratio(self.level) + PATIENCE_UPDATES * change > 1

    @property
    def is_crossing(self) -> bool:
        """Whether the KL grows and is above the target, or will be within ``lookahead`` updates.

        A rise that slows down by a factor from one update to the next is taken to go on slowing down. From two
        measurements alone nothing is concluded while the KL is far below.
        """
        if not self.change > 0 or (len(self.earlier) < 2 and self.level < -NOISE_LOG_RATIO):
            return False
        steps = self.lookahead
        if len(self.earlier) > 1:
            before = _ratio(self.earlier[0]) - _ratio(self.earlier[1])
            slowing = self.change / before if before > self.change else 1.0
            steps = slowing * (1 - slowing**steps) / (1 - slowing) if slowing < 1 else steps
        return _ratio(self.level) + steps * self.change >= 1

    @property
    def has_arrived(self) -> bool:
        """Whether the KL is at the target or above and grows no more, or has begun there."""
        return self.level >= 0 and self.change <= 0

    def allowed_factor(self, factor: float) -> float:
        """What beta may be multiplied by; 1 where the KL is on its way to the target from below."""
        if self.level >= 0:
            return factor
        if factor > 1:
            return factor if self.is_crossing else 1.0
        return 1.0 if self.is_approaching else factor


def _ratio(level: float) -> float:
    return math.exp(clip(level, MAX_LOG_RATIO))


def field_values(record: Any) -> dict[str, object]:
    """The fields of a flat dataclass, tuples as lists."""
    values: dict[str, Any] = {field.name: getattr(record, field.name) for field in fields(record)}
    return {
        name: list(cast("tuple[Any, ...]", x)) if isinstance(x, tuple) else x for name, x in values.items()
    }


def with_beta_times(controller: AnyBounded, factor: float, event: str | None) -> AnyBounded:
    """The controller with beta times ``factor``, as far as step and bounds allow; the event says where not."""
    events = [] if event is None else [event]
    largest = controller.largest_step
    step = max(1 / largest, min(largest, factor))
    if step != factor:
        events.append(f"a step of times {factor:.4g} bounded to {step:.4g}")
    unbounded = controller.beta * step
    beta = max(controller.beta_min, min(controller.beta_max, unbounded))
    if beta != unbounded:
        name = "beta_min" if beta > unbounded else "beta_max"
        events.append(f"beta {unbounded:.4g} bounded to {name} {beta:g}")
    return replace(controller, beta=beta, event="; ".join(events) or None)


def require_per(per: str) -> None:
    """Raise unless it is one of ``PERS``."""
    if per not in KL_UNITS:
        raise OptionError(f"per is {per!r}; there are {', '.join(KL_UNITS)}")


def require_above(least: float, **numbers: float | int) -> None:
    """Raise unless each is finite and above ``least``."""
    for name, value in numbers.items():
        if not least < value < math.inf:
            raise OptionError(f"{name} is {value}; give a finite number above {least:g}")


def require_gains(**gains: float) -> None:
    """Raise unless each is finite and at least 0."""
    for name, value in gains.items():
        if not 0 <= value < math.inf:
            raise OptionError(f"{name} is {value}; give a finite gain, at least 0")
