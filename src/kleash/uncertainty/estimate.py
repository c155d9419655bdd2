"""A measured number with its error, and its warnings."""

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
    """Cluster-robust standard error, in the same unit. NaN where there is none. 0 where all clusters have the same
    mean: of an exact constant the interval has no width either, of a sample that only happens to be constant it has."""
    clusters: int
    """How many independent groups stand behind the error: prompts, documents or blocks of windows."""
    ci95: tuple[float, float]
    """The 95 % confidence interval: its lower and its upper end."""
    warnings: tuple[str, ...] = ()
    """What a careful reader would hold against it, in sentences."""

    def __str__(self) -> str:
        """The number with its error, its unit and its warnings, a line each; words where there is no error."""
        unit = "" if self.unit == "none" else f" {self.unit}"
        over = f"over {self.clusters} {'cluster' if self.clusters == 1 else 'clusters'}"
        if self.standard_error > 0:
            line = f"{self.value:.4g} ± {self.standard_error:.2g}{unit} {over}"
        elif self.is_exact:
            line = f"{self.value:.4g}{unit} exactly, {over}"
        else:
            low, high = self.ci95
            known = "" if math.isnan(low) or math.isnan(high) else f", 95 % interval {low:.4g} to {high:.4g}"
            line = f"{self.value:.4g}{unit} {over}, error unknown{known}"
        return "\n".join([line, *(f"  warning: {warning}" for warning in self.warnings)])

    @property
    def is_exact(self) -> bool:
        """Whether it is a constant without any error."""
        return self.standard_error == 0 and self.ci95[0] == self.ci95[1]

    @property
    def relative_error(self) -> float:
        """Standard error over the size of the value; 0 for an exact constant, 0 included.

        Infinite where the clusters only happen to be alike: then the error is not known.
        """
        if self.standard_error == 0:
            return 0.0 if self.is_exact else math.inf
        return math.inf if self.value == 0 else self.standard_error / abs(self.value)
