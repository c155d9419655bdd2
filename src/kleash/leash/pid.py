"""A PID controller of beta, in log space."""

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar, SupportsFloat

from kleash.errors import OptionError
from kleash.leash.steering import Steered, growth, moved, read, require_above, require_gains, within


@dataclass(frozen=True, kw_only=True)
class PIDBeta(Steered):
    """Beta steered so that the measured KL settles at a target, soon and without overshooting much.

        l_k = clip(log(KL_k / target), -reach, reach),    e_k = clip(l_k, -largest_error, largest_error)
        d_k = l_k - l_k-1,    trend_k = trend_k-1 + (d_k - trend_k-1) / smoothing
        log beta <- log beta + proportional trend_k + integral e_k + derivative (d_k - d_k-1)

    Logarithms, because KL goes roughly as a power of 1 / beta: half the target is answered like twice the target, and
    the gains have no unit. This is the velocity form: beta itself is the integrator, so what the bounds
    cut off is never wound up, and a beta that somebody sets (``dataclasses.replace``) is where it goes on from. The
    differences are of the measured KL alone: a target that moves gives no kick.

    A run begins with a KL of 0 that is on its way whatever beta is. So what the error takes from beta meanwhile, the
    rise gives back: the differences reach further than the error, and where the two cancel the KL arrives
    ``proportional / integral`` updates later. Smoothed, since so large a gain would answer noise.

    ``sequences`` plays no part, but that none is no measurement.
    """

    kind: ClassVar[str] = "pid"

    proportional: float = 1.0
    """What a KL that has grown e-fold adds to log beta in the end, as the trend takes it in."""
    integral: float = 0.05
    """What a KL of e times the target adds to log beta, with every update."""
    derivative: float = 0.0
    """What a KL whose growth has changed adds; 0 because it answers noise before all else."""
    smoothing: float = 3.0
    """Updates over which the changes of the log KL are averaged, at least 1."""
    largest_error: float = 1.0
    """The most of log(KL / target) that is answered, to either side."""
    reach: float = 4.5
    """Beyond so many e-folds from the target, to either side, changes of the KL are not answered."""
    levels: tuple[float, ...] = ()
    """The log of the last two KLs, as they were answered; newest first."""
    trend: float = 0.0
    """The change of the log KL per update, averaged."""

    def __post_init__(self) -> None:
        """Raise OptionError where a number means nothing."""
        super().__post_init__()
        require_gains(proportional=self.proportional, integral=self.integral, derivative=self.derivative)
        require_above(0.0, largest_error=self.largest_error, reach=self.reach)
        if not 1 <= self.smoothing < math.inf:
            raise OptionError(f"smoothing is {self.smoothing}; give a finite number of updates, at least 1")
        if not math.isfinite(self.trend):
            raise OptionError(f"trend is {self.trend}; give a finite number, or leave it out")
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
        level = within(math.log(ratio) if ratio > 0 else -math.inf, self.reach)
        levels = [level, *(within(earlier - log_target, self.reach) for earlier in self.levels)]
        changes = [newer - older for newer, older in pairwise(levels)]
        trend = self.trend
        if changes:
            trend += (changes[0] - trend) / self.smoothing
        push = self.integral * within(level, self.largest_error) + self.proportional * trend
        if len(changes) > 1:
            push += self.derivative * (changes[0] - changes[1])
        answered = replace(self, levels=(log_target + level, *self.levels[:1]), trend=trend)
        return moved(answered, growth(push), event)
