"""Leaving an update early, once the policy has moved far enough from the one that drew the samples."""

import math
from dataclasses import dataclass
from typing import SupportsFloat

from kleash.errors import OptionError
from kleash.leash.steering import Per, require_above, require_per


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
