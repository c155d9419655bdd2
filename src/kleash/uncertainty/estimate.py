"""A measured number with its error, and what there is to doubt about it."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A number that was measured, with how far to trust it."""

    value: float
    """The number itself; may be infinite, and is NaN over nothing."""
    unit: str
    """"nats", "probability" or "none"."""
    standard_error: float
    """Cluster-robust standard error, in the same unit. 0 for an exact constant, NaN where there is none."""
    clusters: int
    """How many independent groups stand behind the error: prompts, documents or blocks of windows."""
    ci95: tuple[float, float]
    """The 95 % confidence interval: its lower and its upper end."""
    doubts: tuple[str, ...] = ()
    """What a careful reader would hold against it, in sentences."""

    def __str__(self) -> str:
        """The number with its error, its unit and its doubts, a line each."""
        unit = "" if self.unit == "none" else f" {self.unit}"
        line = f"{self.value:.4g} ± {self.standard_error:.2g}{unit} over {self.clusters} clusters"
        return "\n".join([line, *(f"  doubt: {doubt}" for doubt in self.doubts)])

    @property
    def relative_error(self) -> float:
        """Standard error over the size of the value; 0 for an exact constant, 0 included."""
        if self.standard_error == 0:
            return 0.0
        return math.inf if self.value == 0 else self.standard_error / abs(self.value)
