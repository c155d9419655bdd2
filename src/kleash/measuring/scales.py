"""The numbers that are written: their units, and the bounds between which they lie."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import log
from types import MappingProxyType


@dataclass(frozen=True)
class Scale:
    """The unit of a quantity, and the values it cannot pass."""

    unit: str = "nats"
    lower: float | None = None
    upper: float | None = None


NATS = Scale()
NON_NEGATIVE = Scale(lower=0.0)
PROBABILITY = Scale("probability", 0.0, 1.0)

SCALES: Mapping[str, Scale] = MappingProxyType(
    {
        **dict.fromkeys(("kl_policy_reference", "kl_reference_policy"), NON_NEGATIVE),
        "jensen_shannon": Scale(lower=0.0, upper=log(2)),
        **dict.fromkeys(("logp_policy", "logp_reference"), Scale(upper=0.0)),
        **dict.fromkeys(("entropy_policy", "entropy_reference", "abs", "k2", "k3"), NON_NEGATIVE),
        **dict.fromkeys(("total_variation", "top1_agreement", "probability_change_squared"), PROBABILITY),
        "probability_change": Scale("probability", -1.0, 1.0),
    }
)
"""Of what is not here: nats, without bounds."""


OF_EACH_MODEL = ("entropy_policy", "entropy_reference", "logp_policy", "logp_reference")
"""What belongs to one model; all other quantities compare two."""


def value_of_itself(name: str) -> float | None:
    """What a quantity is, token by token, of a model and itself; None for what is not known beforehand."""
    if name in OF_EACH_MODEL:
        return None
    return 1.0 if name == "top1_agreement" else 0.0


def scale_of(name: str) -> Scale:
    """The scale of a quantity."""
    return SCALES.get(name, NATS)
