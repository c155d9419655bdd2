"""The base of the beta controllers: reading of measurements, prediction of the KL, steps and bounds of beta."""

import math
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, NamedTuple, SupportsFloat, TypeVar, cast

from kleash.errors import OptionError

Per = Literal["sequence", "token"]
KL_UNITS: tuple[Per, ...] = ("sequence", "token")
LARGEST_COUNT = 2**53
"""The largest count of sequences that a float represents exactly."""
LARGEST_EXPONENT = 700.0
ZERO_KL_EVENT = "the measured KL is 0: answered as the largest error below the target"
MAX_LOG_RATIO = 30.0
"""log(KL / target) is clipped to this, to either side, before it is exponentiated."""
PATIENCE_UPDATES = 20.0
"""Beta stays if a rising KL is predicted to reach its target within this many updates."""
NOISE_LOG_RATIO = 0.25
"""|log(KL / target)| up to which changes of the KL may be noise."""
STEADY_GROWTH = 0.15
"""E-folds per update above which a first rise to the target is braked."""
BoundedT = TypeVar("BoundedT", bound="BoundedController")
PredictiveT = TypeVar("PredictiveT", bound="PredictiveController")


class Reading(NamedTuple):
    """A measured KL relative to the target."""

    ratio: float | None
    """Measured over target: at least 0, inf for an infinite KL; None if the measurement is ignored."""
    event: str | None
    """What was wrong with the measurement; None if it is valid."""


def read_measurement(measured_nats: SupportsFloat, target_nats: float, sequences: int) -> Reading:
    """The measured KL divided by the target; an invalid value is ignored or replaced, as the event states.

    Raises:
        OptionError: if ``sequences`` is negative.
    """
    if sequences < 0:
        raise OptionError(f"sequences is {sequences}; give how many were measured, at least 0")
    if sequences == 0:
        return Reading(None, "ignored: no sequence was measured")
    kl_nats = float(measured_nats)
    if math.isnan(kl_nats) or kl_nats == -math.inf:
        return Reading(None, f"ignored: the measured KL is {kl_nats}")
    if kl_nats == math.inf:
        return Reading(math.inf, "the measured KL is infinite: answered as the largest error")
    if kl_nats < 0:
        return Reading(0.0, f"the measured KL is {kl_nats:g} and none is below 0: answered as 0")
    return Reading(kl_nats / target_nats, ZERO_KL_EVENT if kl_nats == 0 else None)


def clip(value: float, largest: float) -> float:
    """``value`` clipped to [-largest, largest]."""
    return max(-largest, min(largest, value))


def bounded_exp(nats: float) -> float:
    """exp with the exponent bounded, so that it does not overflow; ``largest_step`` is far below this bound."""
    return math.exp(min(nats, LARGEST_EXPONENT))


@dataclass(frozen=True, kw_only=True)
class BoundedController:
    """A controller whose beta lies between two bounds and is multiplied by a factor at each update."""

    kind: ClassVar[str]
    """Its name in ``to_dict``."""

    beta: float
    """The current beta: nats of reward paid for one nat of KL."""
    target_nats: float
    """The target KL, above 0, in the unit of ``per``."""
    per: Per = "sequence"
    """"sequence": target and measurements are mean sums over responses; "token": means over tokens."""
    beta_min: float = 1e-4
    """The lower bound of beta; above 0, since a factor cannot raise a beta of 0."""
    beta_max: float = 100.0
    """The upper bound of beta."""
    largest_step: float = 2.0
    """The largest factor that one update multiplies or divides beta by."""
    event: str | None = None
    """Why the last step was bounded or the measurement ignored; None otherwise."""

    def __post_init__(self) -> None:
        """Raise OptionError if a field is out of range."""
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
        """Its kind and fields, JSON-serialisable; ``beta_from_dict`` restores it."""
        return {"kind": self.kind, **field_values(self)}


@dataclass(frozen=True, kw_only=True)
class PredictiveController(BoundedController):
    """A controller that can respond to the predicted KL instead of the measured one.

    With ``lookahead`` above 0:

    - Below the target, beta rises only if the KL is predicted to reach the target within ``lookahead`` updates, and
      falls only if the KL is not predicted to reach it within ``PATIENCE_UPDATES``.
    - The first rise to the target is braked if the KL grows by more than ``STEADY_GROWTH`` e-folds per update:
      ``brake`` (growth - STEADY_GROWTH) is added to log beta.
    - Once the KL has reached the target, a decrease of log beta is multiplied by ``caution`` while
      abs(log(KL / target)) is above ``NOISE_LOG_RATIO``, so that the KL does not swing up again.
    """

    lookahead: float = 0.0
    """Updates by which the KL is extrapolated linearly from the last two; 0 switches the prediction off."""
    brake: float = 1.5
    """Increase of log beta for each e-fold per update of growth, during the first rise of the KL to its target."""
    caution: float = 1.0
    """Factor on a decrease of log beta while the KL is far from a target that it has reached before."""
    levels: tuple[float, ...] = ()
    """log KL of the last two measurements, clipped; newest first. A state, which starts empty."""
    reached: bool = False
    """Whether the KL has settled at or above the target since the start."""

    def __post_init__(self) -> None:
        """Raise OptionError if a field is out of range."""
        super().__post_init__()
        require_gains(lookahead=self.lookahead, brake=self.brake, caution=self.caution)
        if len(self.levels) > 2 or not all(map(math.isfinite, self.levels)):
            raise OptionError(
                f"levels are {self.levels}; give the logs of at most two KLs, or leave them out"
            )

    def trend(self, ratio: float, reach: float) -> "KLTrend":
        """The trend of the KL, given the newest as a multiple of the target; log ratios are clipped to ``reach``."""
        log_target = math.log(self.target_nats)
        log_ratio = clip(math.log(ratio) if ratio > 0 else -math.inf, reach)
        earlier = tuple(clip(log_kl - log_target, reach) for log_kl in self.levels)
        return KLTrend(log_ratio=log_ratio, earlier=earlier, lookahead=self.lookahead)

    def with_beta_limited_by(
        self: PredictiveT, trend: "KLTrend", factor: float, event: str | None
    ) -> PredictiveT:
        """The controller after a measurement: beta times ``factor``, limited by the KL's trend and the bounds."""
        if self.lookahead > 0:
            factor = trend.allowed_factor(factor)
            if self.reached and factor < 1 and trend.is_far:
                factor **= self.caution
            if not self.reached and trend.is_crossing:
                factor *= bounded_exp(self.brake * max(0.0, trend.growth - STEADY_GROWTH))
        levels = (math.log(self.target_nats) + trend.log_ratio, *self.levels[:1])
        controller = replace(self, levels=levels, reached=self.reached or trend.has_arrived)
        return with_beta_times(controller, factor, event)


@dataclass(frozen=True, kw_only=True)
class KLTrend:
    """log(KL / target), clipped, of the newest measurement and of up to two before it."""

    log_ratio: float
    """Of the newest measurement."""
    earlier: tuple[float, ...]
    """Of the measurements before it: newest first, at most two."""
    lookahead: float
    """Updates by which the KL is extrapolated."""

    @property
    def change(self) -> float:
        """The change of KL / target since the last update; 0 at the first."""
        return _ratio(self.log_ratio) - _ratio(self.earlier[0]) if self.earlier else 0.0

    @property
    def growth(self) -> float:
        """E-folds per update: the smaller of those since the last update and since the one before."""
        if not self.earlier:
            return 0.0
        return min(self.log_ratio - self.earlier[0], (self.log_ratio - self.earlier[-1]) / len(self.earlier))

    @property
    def predicted(self) -> float:
        """KL / target after ``lookahead`` updates, extrapolated linearly; at least 0."""
        return max(0.0, _ratio(self.log_ratio) + self.lookahead * self.change)

    @property
    def is_far(self) -> bool:
        """Whether the KL is further from the target than noise explains."""
        return abs(self.log_ratio) > NOISE_LOG_RATIO

    @property
    def is_approaching(self) -> bool:
        """Whether the KL, extrapolated from the last two updates, reaches the target within ``PATIENCE_UPDATES``."""
        if not self.earlier or self.log_ratio > -NOISE_LOG_RATIO:
            return False
        change = (_ratio(self.log_ratio) - _ratio(self.earlier[-1])) / len(self.earlier)
        return change > 0 and _ratio(self.log_ratio) + PATIENCE_UPDATES * change > 1

    @property
    def is_crossing(self) -> bool:
        """Whether the KL grows and is above the target, or will be within ``lookahead`` updates.

        If the rise slowed down by a factor from one update to the next, it is extrapolated with that factor. With only
        two measurements the result is False while the KL is far below the target.
        """
        if not self.change > 0 or (len(self.earlier) < 2 and self.log_ratio < -NOISE_LOG_RATIO):
            return False
        steps = self.lookahead
        if len(self.earlier) > 1:
            earlier_change = _ratio(self.earlier[0]) - _ratio(self.earlier[1])
            decay = self.change / earlier_change if earlier_change > self.change else 1.0
            steps = decay * (1 - decay**steps) / (1 - decay) if decay < 1 else steps
        return _ratio(self.log_ratio) + steps * self.change >= 1

    @property
    def has_arrived(self) -> bool:
        """Whether the KL is at or above the target and does not grow; at the first update, whether it is there."""
        return self.log_ratio >= 0 and self.change <= 0

    def allowed_factor(self, factor: float) -> float:
        """``factor``, or 1 if beta must wait while the KL approaches the target from below."""
        if self.log_ratio >= 0:
            return factor
        if factor > 1:
            return factor if self.is_crossing else 1.0
        return 1.0 if self.is_approaching else factor


def _ratio(log_ratio: float) -> float:
    """KL / target from its logarithm, which is clipped."""
    return math.exp(clip(log_ratio, MAX_LOG_RATIO))


def field_values(record: Any) -> dict[str, object]:
    """The fields of a flat dataclass by name, with tuples as lists."""
    values: dict[str, Any] = {field.name: getattr(record, field.name) for field in fields(record)}
    return {
        name: list(cast("tuple[Any, ...]", x)) if isinstance(x, tuple) else x for name, x in values.items()
    }


def with_beta_times(controller: BoundedT, factor: float, event: str | None) -> BoundedT:
    """The controller with beta times ``factor``, limited by ``largest_step`` and the bounds (see ``event``)."""
    events = [] if event is None else [event]
    largest = controller.largest_step
    step = max(1 / largest, min(largest, factor))
    if step != factor:
        events.append(f"a step of times {factor:.4g} bounded to {step:.4g}")
    next_beta = controller.beta * step
    beta = max(controller.beta_min, min(controller.beta_max, next_beta))
    if beta != next_beta:
        name = "beta_min" if beta > next_beta else "beta_max"
        events.append(f"beta {next_beta:.4g} bounded to {name} {beta:g}")
    return replace(controller, beta=beta, event="; ".join(events) or None)


def require_per(per: str) -> None:
    """Raise OptionError unless ``per`` is one of ``KL_UNITS``."""
    if per not in KL_UNITS:
        raise OptionError(f"per is {per!r}; there are {', '.join(KL_UNITS)}")


def require_above(least: float, **numbers: float | int) -> None:
    """Raise OptionError unless each number is finite and above ``least``."""
    for name, value in numbers.items():
        if not least < value < math.inf:
            raise OptionError(f"{name} is {value}; give a finite number above {least:g}")


def require_gains(**gains: float) -> None:
    """Raise OptionError unless each gain is finite and at least 0."""
    for name, value in gains.items():
        if not 0 <= value < math.inf:
            raise OptionError(f"{name} is {value}; give a finite gain, at least 0")
