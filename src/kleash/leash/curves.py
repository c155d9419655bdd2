"""The forms in which Gao et al. found the true reward to rise and fall with KL."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
LARGEST_EXPONENT = 700.0


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A form of the reward: ``d (a - b bend(d))`` with ``d = sqrt(KL)``."""

    bend: Callable[[Array], Array]
    """What multiplies b; rises with d."""
    peak: Callable[[float], float]
    """The d at which the reward is highest, from the ratio a / b, where b is above 0; at least 0."""
    peak_slope: Callable[[float], float]
    """Its derivative."""


def _exp(x: float) -> float:
    return math.exp(x) if x < LARGEST_EXPONENT else math.inf


CURVES: Mapping[str, Curve] = MappingProxyType(
    {
        "best_of_n": Curve(
            bend=lambda d: d,
            peak=lambda ratio: max(ratio, 0.0) / 2,
            peak_slope=lambda ratio: 0.5 if ratio > 0 else 0.0,
        ),
        "rl": Curve(
            bend=lambda d: np.log(np.where(d > 0, d, 1.0)),
            peak=lambda ratio: _exp(ratio - 1),
            peak_slope=lambda ratio: _exp(ratio - 1),
        ),
    }
)
"""Name -> form, as Gao et al. found them for best-of-n sampling and for reinforcement learning."""
