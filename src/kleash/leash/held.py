"""A leash for those who keep one object and change it, as other frameworks do."""

from collections.abc import Mapping
from typing import Any, SupportsFloat

from kleash.leash.controllers import Leash
from kleash.leash.kinds import beta_from_dict

STEERED_BY = ("beta", "levels", "reached")
"""What measurements have made of a controller; all else is its configuration."""


class HeldLeash:
    """One of kleash's controllers, which are values, in an object that holds the latest one."""

    def __init__(self, leash: Leash) -> None:
        """Begin with ``leash``."""
        self.leash = leash

    @property
    def value(self) -> float:
        """Nats of reward paid for one nat of KL, now."""
        return self.leash.beta

    def steer(self, measured_nats: SupportsFloat, sequences: int) -> None:
        """Go on to the leash after this measurement."""
        self.leash = self.leash.after(measured_nats, sequences=sequences)

    def take_up(self, saved: Mapping[str, Any]) -> None:
        """Go on with a saved beta and what it was steered by; bounds, target and gains stay as they are here.

        Args:
            saved: what ``leash.to_dict()`` gave, or nothing; a beta that is fixed stays the one that is here.
        """
        settings = self.leash.to_dict()
        if settings["kind"] != "fixed":
            known = {name: saved[name] for name in STEERED_BY if name in saved.keys() & settings}
            if saved.get("target_nats") != settings.get("target_nats"):
                known.pop("reached", None)  # the target that was reached is another one
            self.leash = beta_from_dict(settings | known)
