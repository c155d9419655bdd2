"""A PID controller of beta, in log space."""

from dataclasses import dataclass, replace
from typing import ClassVar, SupportsFloat

from kleash.leash.steering import Anticipating, growth, read, require_above, require_gains, within


@dataclass(frozen=True, kw_only=True)
class PIDBeta(Anticipating):
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
        ratio, event = read(measured_nats, self.target_nats, sequences)
        if ratio is None:
            return replace(self, event=event)
        course = self.course(ratio, self.reach)
        level, before = course.level, course.earlier
        push = self.integral * within(level, self.largest_error)
        if before:
            push += self.proportional * (level - before[0])
        if len(before) > 1:
            push += self.derivative * (level - 2 * before[0] + before[1])
        return self.answered(course, growth(push), event)
