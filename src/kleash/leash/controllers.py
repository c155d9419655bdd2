"""Controllers of beta, which are immutable (``after`` returns the next one), and early stopping of an update."""

from dataclasses import dataclass
from typing import ClassVar, SupportsFloat, TypeAlias

from kleash.leash.controller_base import (
    KL_UNITS,
    BetaRecord,
    Per,
    TargetController,
    bounded_exp,
    clip,
)
from kleash.registry import options_given, require_above, require_at_least, require_choice

REACH = 3.0
"""Largest absolute value of log(KL / target) from which changes are computed; beyond it is clipped."""
HORIZON_UPDATES = 4
"""Horizon of Ziegler's rule in updates if none is given."""


@dataclass(frozen=True, kw_only=True)
class FixedBeta(BetaRecord):
    """A constant beta; 0 switches the KL term off.

    >>> kleash.FixedBeta(beta=0.1).after(8.0).beta
    0.1
    """

    kind: ClassVar[str] = "fixed"
    event: ClassVar[None] = None
    """None: beta is never bounded."""
    target_nats: ClassVar[None] = None
    """None: there is no target."""

    beta: float
    """Nats of reward paid for one nat of KL; finite, at least 0."""
    per: Per = "sequence"
    """The unit of the measurements, which are not used."""

    def __post_init__(self) -> None:
        """Raise OptionError unless beta is finite and at least 0."""
        require_choice(KL_UNITS, per=self.per)
        require_at_least(0.0, beta=self.beta)

    def after(
        self,
        measured_nats: SupportsFloat,
        *,
        sequences: int = 1,
        standard_error: SupportsFloat | None = None,
    ) -> "FixedBeta":
        """This controller, unchanged."""
        return self


Leash: TypeAlias = FixedBeta | TargetController
"""A controller of beta: both have ``beta``, ``target_nats``, ``per``, ``event``, ``after`` and ``to_dict``."""


@dataclass(frozen=True, kw_only=True)
class ZieglerBeta(TargetController):
    """The rule of Ziegler et al. with bounds, faster and damped, or exactly as published with a ``horizon``.

        e = clip(KL / target - 1, -0.2, 0.2)
        beta <- beta (1 + e / 4) (KL / earlier KL)^proportional      without a horizon; KL is the filtered one
        beta <- beta (1 + e sequences / horizon)                     with a horizon; KL is the measured one

    The usual implementations of the published rule have no bounds: a NaN persists, and a batch of more than five
    horizons makes beta negative. Within ``largest_step`` and the two bounds the result equals it exactly. Its speed
    depends on ``sequences / horizon`` alone: with the published 10 000 and batches of 64, beta changes by at most
    0.13 % per update, too slowly for runs of hundreds of updates.

    References:
        Ziegler et al., "Fine-Tuning Language Models from Human Preferences" (2019), section 2.2,
        https://arxiv.org/abs/1909.08593

    >>> kleash.ZieglerBeta(beta=0.1, target_nats=4.0).after(8.0).beta > 0.1
    True
    """

    kind: ClassVar[str] = "ziegler"

    horizon: int | None = None
    """The number of sequences after which a KL that is 20 % off (or more) has changed beta by 20 %; published is
    10 000. None for four updates, whatever their size."""

    def __post_init__(self) -> None:
        """Raise OptionError if a field is out of range."""
        super().__post_init__()
        require_above(0.0, **options_given(horizon=self.horizon))

    def respond(self, ratio: float, error: float, sequences: int) -> "tuple[ZieglerBeta, float]":
        """The controller and the factor for beta: by the published rule with a ``horizon``, otherwise by the damped."""
        if self.horizon is not None:
            return self, 1 + clip(ratio - 1, 0.2) * (sequences / self.horizon)
        controller, ratio = self.filtered(ratio, error)
        damping = bounded_exp(self.proportional * controller.growth(REACH))
        return controller, (1 + clip(ratio - 1, 0.2) / HORIZON_UPDATES) * damping


@dataclass(frozen=True, kw_only=True)
class DualBeta(TargetController):
    """Dual ascent on beta, the Lagrange multiplier of "maximise reward subject to KL <= budget".

        e = clip(KL / target - 1, -largest_error, largest_error)
        log beta <- log beta + rate e + proportional (change of log KL)

    The negative derivative of the Lagrangian ``reward - beta (KL - budget)`` in beta is the excess of the KL over the
    budget, which is ``target_nats``. The ascent is in log beta (mirror ascent), so ``rate`` has no unit and beta stays
    above 0. While the KL stays below the budget, beta falls until ``beta_min``: a constraint that does not bind costs
    nothing. The proportional term damps the oscillations of plain ascent, which ``proportional=0`` gives.

    >>> kleash.DualBeta(beta=0.1, target_nats=4.0).after(8.0).beta > 0.1
    True
    """

    kind: ClassVar[str] = "dual"

    rate: float = 0.12
    """The gain: the increase of log beta at a KL of twice the budget (before ``largest_error``)."""
    largest_error: float = 1.0
    """Largest absolute value of KL / target - 1; beyond it is clipped."""

    def __post_init__(self) -> None:
        """Raise OptionError if a field is out of range."""
        super().__post_init__()
        require_at_least(0.0, rate=self.rate)
        require_above(0.0, largest_error=self.largest_error)

    def respond(self, ratio: float, error: float, sequences: int) -> "tuple[DualBeta, float]":
        """The controller and the factor for beta: exp of the ascent's step and its damping."""
        controller, ratio = self.filtered(ratio, error)
        log_factor = self.rate * clip(ratio - 1, self.largest_error)
        return controller, bounded_exp(log_factor + self.proportional * controller.growth(REACH))


@dataclass(frozen=True, kw_only=True)
class PIDBeta(TargetController):
    """A PID controller of log beta: the KL settles at a target quickly and with little overshoot.

        l_k = clip(log(KL_k / target), -reach, reach),    e_k = clip(KL_k / target - 1, -largest_error, largest_error)
        log beta <- log beta + proportional (l_k - l_k-1) + integral e_k + derivative (l_k - 2 l_k-1 + l_k-2)

    Changes are in logarithms because the KL is roughly proportional to 1 / beta, and gains have no unit. The error is
    linear, so that noise which the filter leaves does not bias it. In this velocity form beta is the integrator, so
    there is no wind-up at the bounds, and a beta that was set by hand (``dataclasses.replace``) is the new starting
    point. The differences are of the KL alone, so a change of the target causes no jump. KL is the filtered one.

    With the default gains the KL is held within 5 % of its target if it responds to beta within 3 to 20 updates and is
    measured with errors of up to 50 % (docs/explanation/beta.md).

    >>> kleash.PIDBeta(beta=0.1, target_nats=4.0).after(2.0).beta < 0.1
    True
    """

    kind: ClassVar[str] = "pid"

    integral: float = 0.12
    """The integral gain: the increase of log beta per update at a KL of twice the target."""
    derivative: float = 0.0
    """The derivative gain, on the change of the KL's growth; 0 by default because it amplifies noise."""
    largest_error: float = 1.0
    """Largest absolute value of KL / target - 1 in the integral term; beyond it is clipped."""
    reach: float = 3.0
    """Largest absolute value of log(KL / target) in the differences of the proportional and derivative terms; beyond it
    is clipped. By default it is larger than ``largest_error``."""

    def __post_init__(self) -> None:
        """Raise OptionError if a field is out of range."""
        super().__post_init__()
        require_at_least(0.0, integral=self.integral, derivative=self.derivative)
        require_above(0.0, largest_error=self.largest_error, reach=self.reach)

    def respond(self, ratio: float, error: float, sequences: int) -> "tuple[PIDBeta, float]":
        """The filtered controller, and the factor of beta: the change of the PID output since the last step, as exp."""
        controller, ratio = self.filtered(ratio, error)
        growth = controller.growth(self.reach)
        log_factor = self.integral * clip(ratio - 1, self.largest_error) + self.proportional * growth
        if len(self.levels) > 1:
            log_factor += self.derivative * (growth - self.growth(self.reach))
        return controller, bounded_exp(log_factor)


@dataclass(frozen=True, kw_only=True)
class EarlyStop:
    """Stop an update once KL(old policy || new policy) exceeds ``factor`` times the target.

    The old policy is the one at the beginning of the update, not the reference. It drew the tokens, so the mean of
    k3 of ``old_logp - new_logp`` estimates this KL. Check before each minibatch step; on several ranks, reduce the
    KL first, so that all stop together.
    """

    target_nats: float
    """The KL that one update may cause, above 0, in the unit of ``per``."""
    factor: float = 1.5
    """The multiple of the target at which to stop; at least 1."""
    per: Per = "token"
    """"token": means over tokens; "sequence": mean sums over responses."""

    def __post_init__(self) -> None:
        """Raise OptionError if a field is out of range."""
        require_above(0.0, target_nats=self.target_nats)
        require_at_least(1.0, factor=self.factor)
        require_choice(KL_UNITS, per=self.per)

    def stops(self, measured_nats: SupportsFloat) -> bool:
        """Whether to stop the update; also true if the KL is NaN."""
        return not float(measured_nats) <= self.factor * self.target_nats
