"""Beta as a value: each controller is frozen, and a measured KL makes the next one of it."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, SupportsFloat, runtime_checkable

from kleash.errors import OptionError
from kleash.leash.controller_base import (
    LARGEST_COUNT,
    KLTrend,
    Per,
    PredictiveController,
    bounded_exp,
    clip,
    field_values,
    read_measurement,
    require_above,
    require_gains,
    require_per,
    with_beta_times,
)

REACH = 3.0
"""E-folds from the target beyond which changes of the KL are not answered."""


@runtime_checkable
class Leash(Protocol):
    """What holds beta: any controller or schedule."""

    @property
    def beta(self) -> float:
        """Nats of reward paid for one nat of KL, now."""
        ...

    @property
    def event(self) -> str | None:
        """Why the last step was bounded or ignored; None where nothing was."""
        ...

    @property
    def target_nats(self) -> float | None:
        """The KL it steers at; None if at none."""
        ...

    @property
    def per(self) -> Per:
        """What a KL is counted per: "sequence" or "token"."""
        ...

    def after(self, measured_nats: SupportsFloat, *, sequences: int = 1) -> "Leash":
        """The leash for the next update, having measured this KL over that many sequences in this one."""
        ...

    def to_dict(self) -> dict[str, object]:
        """Everything there is to it, as JSON takes it."""
        ...


@dataclass(frozen=True, kw_only=True)
class FixedBeta:
    """The same beta for ever, whatever is measured. It may be 0: no leash."""

    kind: ClassVar[str] = "fixed"

    beta: float
    """Nats of reward paid for one nat of KL; finite, at least 0."""
    per: Per = "sequence"
    """What the measurements count per; nothing comes of it."""

    def __post_init__(self) -> None:
        """Raise OptionError unless beta is finite and at least 0."""
        require_per(self.per)
        if not 0 <= self.beta < math.inf:
            raise OptionError(f"beta is {self.beta}; give a finite number, at least 0")

    @property
    def event(self) -> None:
        """None: no step is ever made."""
        return None

    @property
    def target_nats(self) -> None:
        """None: it steers at nothing."""
        return None

    def after(self, measured_nats: SupportsFloat, *, sequences: int = 1) -> "FixedBeta":
        """Itself."""
        return self

    def to_dict(self) -> dict[str, object]:
        """Everything there is to it, as JSON takes it; ``beta_from_dict`` makes it again."""
        return {"kind": self.kind, **field_values(self)}


@dataclass(frozen=True, kw_only=True)
class ZieglerBeta(PredictiveController):
    """Beta steered so that the measured KL settles at a target: the published rule, with bounds.

        e = clip(KL / target - 1, -0.2, 0.2),    beta <- beta (1 + e sequences / horizon)

    As it is usually copied it has no bounds: a NaN stays for ever, and a batch of more than five horizons
    makes beta negative. Within ``largest_step`` and the two bounds it is the published rule to the last digit.

    How fast it is depends on ``sequences / horizon`` alone: at most a fifth of that per update. At .1 it
    meets the target from a beta 10 times off within 200 updates; slower ones arrive later, faster ones overshoot.

    For runs of tens of updates ``lookahead`` (4, with a horizon of 3 updates' sequences, is what ``kleash train``
    takes) puts the KL that is coming in the place of the one that was measured; see ``Anticipating``.

    References:
        Ziegler et al., "Fine-Tuning Language Models from Human Preferences" (2019), section 2.2,
        https://arxiv.org/abs/1909.08593
    """

    kind: ClassVar[str] = "ziegler"

    horizon: int = 10_000
    """Sequences over which a KL 20 % off (or more) is answered by 20 % of beta."""

    def __post_init__(self) -> None:
        """Raise OptionError where a number means nothing."""
        super().__post_init__()
        require_above(0.0, horizon=self.horizon)

    def after(self, measured_nats: SupportsFloat, *, sequences: int = 1) -> "ZieglerBeta":
        """The leash for the next update, having measured this KL over that many sequences in this one.

        Raises:
            OptionError: if ``sequences`` is negative.
        """
        ratio, event = read_measurement(measured_nats, self.target_nats, sequences)
        if ratio is None:
            return replace(self, event=event)
        if not self.lookahead:
            return with_beta_times(self, 1 + clip(ratio - 1, 0.2) * self.horizon_share(sequences), event)
        trend = self.trend(ratio, REACH)
        return self.with_response(
            trend, 1 + clip(predicted_error(trend), 0.2) * self.horizon_share(sequences), event
        )

    def horizon_share(self, sequences: int) -> float:
        """How much of the horizon so many sequences are."""
        return min(sequences, LARGEST_COUNT) / self.horizon


@dataclass(frozen=True, kw_only=True)
class DualBeta(PredictiveController):
    """Beta as the price of a budget: ascent on the dual of "reward, subject to KL <= budget".

        log beta <- log beta + rate clip(KL / target - 1, -largest_error, largest_error)

    The derivative of the Lagrangian ``reward - beta (KL - budget)`` in beta is how far the KL is over the
    budget; ``target_nats`` is the budget. The ascent is made in log beta (mirror ascent), so that ``rate`` has no
    unit and beta stays above 0. While the KL keeps below the budget beta falls, down to the floor
    ``beta_min``: the constraint costs nothing where it does not bind.

    With ``lookahead`` the KL that is coming takes the place of the measured one (``kleash train`` takes 4, and a
    rate of 0.2; see ``Anticipating``).

    ``sequences`` plays no part, but that none is no measurement.
    """

    kind: ClassVar[str] = "dual"

    rate: float = 0.035
    """What a KL at twice the budget would add to log beta, were it not for ``largest_error``."""
    largest_error: float = 0.4
    """The most of (KL / target - 1) that is answered, to either side."""

    def __post_init__(self) -> None:
        """Raise OptionError where a number means nothing."""
        super().__post_init__()
        require_gains(rate=self.rate)
        require_above(0.0, largest_error=self.largest_error)

    def after(self, measured_nats: SupportsFloat, *, sequences: int = 1) -> "DualBeta":
        """The leash for the next update, having measured this KL in this one.

        Raises:
            OptionError: if ``sequences`` is negative.
        """
        ratio, event = read_measurement(measured_nats, self.target_nats, sequences)
        if ratio is None:
            return replace(self, event=event)
        if not self.lookahead:
            return with_beta_times(self, bounded_exp(self.rate * clip(ratio - 1, self.largest_error)), event)
        trend = self.trend(ratio, REACH)
        return self.with_response(
            trend, bounded_exp(self.rate * clip(predicted_error(trend), self.largest_error)), event
        )


def predicted_error(trend: KLTrend) -> float:
    """KL / target - 1, for the KL that is coming."""
    return trend.predicted - 1


@dataclass(frozen=True, kw_only=True)
class PIDBeta(PredictiveController):
    """Beta steered so that the measured KL settles at a target, soon and without overshooting much.

        l_k = clip(log(KL_k / target), -reach, reach),    e_k = clip(l_k, -largest_error, largest_error)
        log beta <- log beta + proportional (l_k - l_k-1) + integral e_k + derivative (l_k - 2 l_k-1 + l_k-2)

    Logarithms, because KL goes roughly as 1 / beta: half the target is answered like twice the target, and
    the gains have no unit. This is the velocity form: beta itself is the integrator, so what the bounds
    cut off is never wound up, and a beta that somebody sets (``dataclasses.replace``) is where it goes on from. The
    differences are of the measured KL alone: a target that moves gives no kick. They reach further than the
    error, so that a KL which runs away from 0 is answered shortly before it reaches the target: within
    ``lookahead`` updates of it, and not earlier (see ``Anticipating``).

    The default gains are for a KL that answers beta within 3 to 20 updates, seen up to 3 updates
    late, with 10 % noise: from a beta ten times off, overshoot 6 % at most, and within 10 % of the
    target 200 updates later (docs/beta.md).

    ``sequences`` plays no part, but that none is no measurement.
    """

    kind: ClassVar[str] = "pid"

    proportional: float = 0.3
    """What a KL that grew e-fold since the last update adds to log beta."""
    integral: float = 0.03
    """What a KL of e times the target adds to log beta, with every update."""
    derivative: float = 0.0
    """What a KL whose growth has changed adds; 0 because it answers noise before all else."""
    largest_error: float = 1.0
    """The most of log(KL / target) that is answered, to either side."""
    reach: float = 3.0
    """Beyond so many e-folds from the target, to either side, changes of the KL are not answered."""
    lookahead: float = 4.0
    """Below the target beta rises only if the KL is about to pass it in so many updates; 0 asks nothing of the
    kind, and a climb from 0 then tightens all the way."""

    def __post_init__(self) -> None:
        """Raise OptionError where a number means nothing."""
        super().__post_init__()
        require_gains(proportional=self.proportional, integral=self.integral, derivative=self.derivative)
        require_above(0.0, largest_error=self.largest_error, reach=self.reach)

    def after(self, measured_nats: SupportsFloat, *, sequences: int = 1) -> "PIDBeta":
        """The leash for the next update, having measured this KL in this one.

        Raises:
            OptionError: if ``sequences`` is negative.
        """
        ratio, event = read_measurement(measured_nats, self.target_nats, sequences)
        if ratio is None:
            return replace(self, event=event)
        trend = self.trend(ratio, self.reach)
        level, earlier = trend.level, trend.earlier
        push = self.integral * clip(level, self.largest_error)
        if earlier:
            push += self.proportional * (level - earlier[0])
        if len(earlier) > 1:
            push += self.derivative * (level - 2 * earlier[0] + earlier[1])
        return self.with_response(trend, bounded_exp(push), event)


@dataclass(frozen=True, kw_only=True)
class EarlyStop:
    """Within an update, stop once the KL from the policy that drew the samples is past ``factor`` targets.

    The KL is that of the policy at the beginning of the update from the one now, KL(old || new), and not the leash
    to the reference: the old policy drew the tokens, so k3 of ``old_logp - new_logp``, averaged, measures
    it. Ask before each minibatch step; on several ranks, reduce the KL first, so that all stop together.
    """

    target_nats: float
    """How far one update may move the policy, above 0, per what ``per`` says."""
    factor: float = 1.5
    """How many targets are too many; at least 1."""
    per: Per = "token"
    """"token": means over tokens; "sequence": mean sums over responses."""

    def __post_init__(self) -> None:
        """Raise OptionError where a number means nothing."""
        require_above(0.0, target_nats=self.target_nats)
        if not 1 <= self.factor < math.inf:
            raise OptionError(f"factor is {self.factor}; give a finite number, at least 1")
        require_per(self.per)

    def stops(self, measured_nats: SupportsFloat) -> bool:
        """Whether to leave the update; a KL that is NaN does, since nothing holds it."""
        return not float(measured_nats) <= self.factor * self.target_nats
