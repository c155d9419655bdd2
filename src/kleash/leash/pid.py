"""A PID controller of beta, in log space."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, SupportsFloat

from kleash.errors import OptionError
from kleash.leash.steering import Steered, growth, moved, read, require_above, require_gains, within


@dataclass(frozen=True, kw_only=True)
class PIDBeta(Steered):
    """Beta steered so that the measured KL settles at a target, soon and without overshooting much.

        e_k = clip(log(KL_k / target), -largest_error, largest_error)
        log beta <- log beta + proportional (e_k - e_k-1) + integral e_k + derivative (e_k - 2 e_k-1 + e_k-2)

    Logarithms, because KL goes roughly as 1 / beta: half the target is answered like twice the target, and
    the gains have no unit. This is the velocity form: beta itself is the integrator, so what the bounds
    cut off is never wound up, and a beta that somebody sets (``dataclasses.replace``) is where it goes on from. The
    differences are of the measured KL alone: a target that moves gives no kick.

    The default gains are for a KL that answers beta within 3 to 20 updates, seen up to 3 updates
    late, with 10 % noise: from a beta ten times off, overshoot 9 % at most, and within 10 % of the
    target 200 updates later. What they cannot undo is a KL that has run away before it was first seen.

    ``sequences`` plays no part, but that none is no measurement.
    """

    kind: ClassVar[str] = "pid"

    proportional: float = 0.3
    """What a KL that grew e-fold since the last update adds to log beta."""
    integral: float = 0.03
    """What a KL of e times the target adds to log beta, every update."""
    derivative: float = 0.0
    """What a KL whose growth has changed adds; 0 because it answers noise before all else."""
    largest_error: float = 1.0
    """The most of log(KL / target) that is answered, to either side."""
    levels: tuple[float, ...] = ()
    """The log of the last two KLs, as they were answered; newest first."""

    def __post_init__(self) -> None:
        """Raise OptionError where a number means nothing."""
        super().__post_init__()
        require_gains(proportional=self.proportional, integral=self.integral, derivative=self.derivative)
        require_above(0.0, largest_error=self.largest_error)
        if len(self.levels) > 2 or not all(map(math.isfinite, self.levels)):
            raise OptionError(
                f"levels are {self.levels}; give the logs of at most two KLs, or leave them out"
            )

    def after(self, measured_nats: SupportsFloat, *, sequences: int = 1) -> "PIDBeta":
        """The leash for the next update, having measured this KL in this one.

        Raises:
            OptionError: if ``sequences`` is negative.
        """
        ratio, event = read(measured_nats, self.target_nats, sequences)
        if ratio is None:
            return replace(self, event=event)
        log_target = math.log(self.target_nats)
        error = within(math.log(ratio) if ratio > 0 else -math.inf, self.largest_error)
        before = [within(level - log_target, self.largest_error) for level in self.levels]
        push = self.integral * error
        if before:
            push += self.proportional * (error - before[0])
        if len(before) > 1:
            push += self.derivative * (error - 2 * before[0] + before[1])
        answered = replace(self, levels=(log_target + error, *self.levels[:1]))
        return moved(answered, growth(push), event)
