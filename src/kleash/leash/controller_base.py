"""The base of the beta controllers: reading of measurements, prediction of the KL, steps and bounds of beta."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Literal, SupportsFloat, TypeVar

from kleash.arguments import validated
from kleash.errors import OptionError
from kleash.registry import require_above, require_at_least, require_choice

Per = Literal["sequence", "token"]
KL_UNITS: tuple[Per, ...] = ("sequence", "token")
LARGEST_EXPONENT = 700.0
MAX_LOG_RATIO = 30.0
"""log(KL / target) is clipped to this, to either side."""
LARGEST_RATIO = 20.0
"""A KL of more than this many targets counts as this many."""
DRIFT = 0.04
"""Change of the true KL in an update that the filter expects, as a share of the KL, or of a larger target."""
NOISE_RATE = 0.2
"""Weight of the newest standard error in the average that sets the filter's gain."""
UNKNOWN_ERROR = 0.5
"""Largest standard error that is read off the scatter of the measurements, in the unit of ``DRIFT``: more would slow
the answer to a KL that grows, which scatters, too."""
ControllerT = TypeVar("ControllerT", bound="TargetController")


def read_measurement(
    measured_nats: SupportsFloat, target_nats: float, sequences: int, standard_error: SupportsFloat | None
) -> tuple[float | None, float, str | None]:
    """The measurement and its standard error divided by the target, and what was wrong with the measurement.

    An invalid value is ignored (None) or replaced; the first number is from 0 to ``LARGEST_RATIO``. An error that is
    not known is NaN. The event is None if the measurement is valid.

    Raises:
        OptionError: if ``sequences`` or ``standard_error`` is negative.
    """
    require_at_least(0, sequences=sequences)
    error_nats = math.nan if standard_error is None else float(standard_error)
    if error_nats < 0:
        raise OptionError(
            f"standard_error is {error_nats:g}; give nats, at least 0, or None if it is not known"
        )
    if sequences == 0:
        return None, math.nan, "ignored: no sequence was measured"
    kl_nats = float(measured_nats)
    if math.isnan(kl_nats) or kl_nats == -math.inf:
        return None, math.nan, f"ignored: the measured KL is {kl_nats}"
    error = min(error_nats / target_nats, LARGEST_RATIO) if math.isfinite(error_nats) else math.nan
    event = f"the standard error is {error_nats}: ignored" if error_nats == math.inf else None
    if kl_nats == math.inf:
        event = "the measured KL is infinite: taken as the largest deviation"
    elif kl_nats < 0:
        event = f"the measured KL is {kl_nats:g} and none is below 0: answered as 0"
    elif kl_nats == 0:
        event = "the measured KL is 0, as before the first update: taken as the largest deviation"
    return max(0.0, min(LARGEST_RATIO, kl_nats / target_nats)), error, event


def clip(value: float, largest: float) -> float:
    """``value`` clipped to [-largest, largest]."""
    return max(-largest, min(largest, value))


def bounded_exp(nats: float) -> float:
    """exp with the exponent bounded, so that it does not overflow; ``largest_step`` is far below this bound."""
    return math.exp(min(nats, LARGEST_EXPONENT))


@dataclass(frozen=True, kw_only=True)
class BetaRecord:
    """What the controllers of beta have in common: fields that a dict can hold."""

    kind: ClassVar[str]
    """Its name in ``to_dict``."""

    def to_dict(self) -> dict[str, object]:
        """Its kind and fields, JSON-serialisable, also of numbers of torch or numpy; ``beta_from_dict`` restores it."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        plain = {name: x.item() if hasattr(x, "item") else x for name, x in values.items()}
        return {"kind": self.kind, **{name: list(x) if name == "levels" else x for name, x in plain.items()}}


@dataclass(frozen=True, kw_only=True)
class TargetController(BetaRecord, ABC):
    """A controller that multiplies beta by a factor at each update, within bounds, to keep a filtered KL at a target.

    A measurement moves the filtered KL by a share ``gain`` of the difference: by little if its ``standard_error`` is
    large. The variances are relative to the filtered KL, or to the target while the KL is below it:

        variance <- variance + DRIFT^2,    gain = variance / (variance + noise),    variance <- (1 - gain) variance

    ``noise`` is the average of *earlier* squared errors. A gain that contained the newest error would depend on the
    measurement that it multiplies, since the error of a KL grows with the KL, and would bias the filter downwards. An
    error that is not known (None, or NaN, as of a single prompt) is replaced by the distance from the filtered KL; one
    of 0 is that of a KL which is not filtered.
    """

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
    proportional: float = 1.5
    """The proportional gain: the increase of log beta if the filtered KL grew e-fold since the last update."""
    levels: tuple[float, ...] = ()
    """log of the filtered KL after the last two measurements, newest first. A state, which starts empty."""
    variance: float = 0.0
    """Relative variance of the filtered KL; a state."""
    noise: float = 0.0
    """Average relative variance of the measurements; a state."""
    event: str | None = None
    """Why the last step was bounded or the measurement ignored; None otherwise."""

    def __post_init__(self) -> None:
        """Raise OptionError if a field is out of range."""
        require_choice(KL_UNITS, per=self.per)
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
        require_at_least(0.0, proportional=self.proportional, variance=self.variance, noise=self.noise)
        if len(self.levels) > 2 or not all(map(math.isfinite, self.levels)):
            raise OptionError(
                f"levels are {self.levels}; give the logs of at most two KLs, or leave them out"
            )

    @validated
    def after(
        self: ControllerT,
        measured_nats: SupportsFloat,
        *,
        sequences: int = 1,
        standard_error: SupportsFloat | None = None,
    ) -> ControllerT:
        """The controller for the next update, given the KL measured on this many sequences in this update.

        ``sequences`` is used by Ziegler's published rule alone, except that 0 stands for no measurement.

        Raises:
            OptionError: if ``sequences`` is not a whole number, or it or ``standard_error`` is negative.
        """
        ratio, error, event = read_measurement(measured_nats, self.target_nats, sequences, standard_error)
        if ratio is None:
            return replace(self, event=event)
        controller, factor = self.respond(ratio, error, sequences)
        return with_beta_times(controller, factor, event)

    @abstractmethod
    def respond(self: ControllerT, ratio: float, error: float, sequences: int) -> tuple[ControllerT, float]:
        """The controller with the state that follows a measurement, and the factor for beta: the rule of its kind.

        Args:
            ratio: measured KL over the target.
            error: standard error over the target; NaN if it is not known.
            sequences: number of sequences that were measured.
        """

    def log_ratios(self, reach: float) -> tuple[float, ...]:
        """log(KL / target) of the ``levels``, clipped to [-reach, reach]."""
        log_target = math.log(self.target_nats)
        return tuple(clip(level - log_target, reach) for level in self.levels)

    def filtered(self: ControllerT, ratio: float, error: float) -> tuple[ControllerT, float]:
        """The controller after a measurement, with its old beta, and the filtered KL over the target.

        Args:
            ratio: measured KL over the target.
            error: standard error over the target; NaN if it is not known.
        """
        earlier = self.log_ratios(MAX_LOG_RATIO)
        before = math.exp(earlier[0]) if earlier else ratio
        if math.isnan(error):
            error = min(abs(ratio - before), UNKNOWN_ERROR * max(1.0, before))
        variance = noise = (error / max(1.0, before)) ** 2
        if earlier:
            predicted = self.variance + DRIFT**2
            gain = predicted / (predicted + self.noise)
            ratio = before + gain * (ratio - before)
            variance = (1 - gain) * predicted
            noise = self.noise + NOISE_RATE * (noise - self.noise)
        log_ratio = math.log(ratio) if ratio > 0 else -MAX_LOG_RATIO
        level = math.log(self.target_nats) + max(log_ratio, -MAX_LOG_RATIO)
        return replace(self, levels=(level, *self.levels[:1]), variance=variance, noise=noise), ratio

    def growth(self, reach: float) -> float:
        """The change of log KL since the last update, with both logs clipped; 0 at the first."""
        log_ratios = self.log_ratios(reach)
        return log_ratios[0] - log_ratios[1] if len(log_ratios) > 1 else 0.0


def with_beta_times(controller: ControllerT, factor: float, event: str | None) -> ControllerT:
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
