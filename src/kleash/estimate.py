"""An estimate with its standard error, confidence interval and warnings, and functions of it."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """An estimated quantity with its standard error, 95 % interval and warnings.

    >>> print(kleash.Estimate(value=0.25, unit="nats", standard_error=0.01, ci95=(0.23, 0.27), clusters=96))
    0.250 ± 0.010 nats over 96 clusters
    """

    value: float
    """The estimate; may be infinite, and is NaN over no observations."""
    unit: str
    """"nats", "probability" or "none"."""
    standard_error: float
    """Cluster-robust standard error, in the same unit. NaN if it is not defined. 0 if all clusters have the same mean:
    for an exact constant the interval also has width 0; for a sample that happens to be constant it does not."""
    ci95: tuple[float, float]
    """The lower and the upper end of the 95 % confidence interval."""
    clusters: int = 0
    """Number of independent groups behind the error: prompts, documents or blocks of windows; 0 if not known."""
    warnings: tuple[str, ...] = ()
    """Reasons not to trust the estimate or its error, in sentences."""

    def __str__(self) -> str:
        """The estimate with its error and unit, and one line for each warning."""
        unit = "" if self.unit == "none" else f" {self.unit}"
        noun = "cluster" if self.clusters == 1 else "clusters"
        over = f" over {self.clusters} {noun}" if self.clusters else ""
        low, high = map(self.format, self.ci95)
        if self.is_exact:
            line = f"{self.rounded}{unit} exactly{',' if over else ''}{over}"
        elif self.has_error:
            line = f"{self.rounded} ± {self.format(self.standard_error)}{unit}{over}"
        else:
            interval = "" if "nan" in (low, high) else f", 95 % interval {low} to {high}"
            line = f"{self.rounded}{unit}{over}, error unknown{interval}"
        return "\n".join([line, *(f"  warning: {warning}" for warning in self.warnings)])

    @property
    def is_exact(self) -> bool:
        """Whether the value is a constant without any error."""
        return self.standard_error == 0 and self.ci95[0] == self.ci95[1]

    @property
    def has_error(self) -> bool:
        """Whether the error is known: not that of a single cluster, nor of clusters that happen to be alike."""
        return self.is_exact or not (self.standard_error == 0 or math.isnan(self.standard_error))

    @property
    def rounded(self) -> str:
        """The value to the digits that its error supports."""
        return self.format(self.value)

    def format(self, value: float) -> str:
        """``value`` to the second significant digit of this error, at most the ninth decimal: "0.1234" or "3.2e-07".

        Where the error is ten million or more, as of weights of long responses, with a power of ten: "2.00e+21".
        """
        if not math.isfinite(value):
            return str(value)
        if value == 0:
            return "0"
        error = self.standard_error if self.standard_error > 0 else abs(self.value) / 1000
        if not math.isfinite(error) or error == 0:
            return f"{value:.4g}"
        digits = 1 - math.floor(math.log10(error))
        if digits < -5 or (digits > 7 and abs(value) < 1e-4):
            leading = max(1, math.floor(math.log10(abs(value))) + digits)
            return f"{value:.{min(leading, 6)}e}"
        return f"{value:.{min(max(0, digits), 9)}f}"

    @property
    def relative_error(self) -> float:
        """Standard error divided by the absolute value; 0 for an exact constant, including 0.

        Infinite if the clusters happen to be equal, since the error is then unknown.
        """
        if self.standard_error == 0:
            return 0.0 if self.is_exact else math.inf
        return math.inf if self.value == 0 else self.standard_error / abs(self.value)


def transformed(
    estimate: Estimate,
    function: Callable[[float], float],
    derivative: Callable[[float], float],
    *,
    unit: str = "none",
) -> Estimate:
    """Apply a monotone function to an estimate: the perplexity of a mean cross-entropy, the RMS of a mean square.

    The ends of the interval are mapped, so its coverage does not change. The standard error is multiplied by
    |derivative| (the delta method). An exact constant stays exact, and its derivative is not evaluated.

        transformed(cross_entropy, math.exp, math.exp)
        transformed(mean_square, math.sqrt, lambda x: 0.5 / math.sqrt(x))

    Args:
        estimate: the estimate to transform.
        function: increasing or decreasing over the whole interval; counts as infinite where it overflows
            (``math.exp``).
        derivative: its derivative; infinite where it overflows or divides by zero (of a root at 0).
        unit: of the result.
    """
    error = estimate.standard_error
    if error != 0:
        error *= abs(_value_or_inf(derivative, estimate.value))
    ends = sorted(_value_or_inf(function, end) for end in estimate.ci95)
    value = _value_or_inf(function, estimate.value)
    return replace(estimate, value=value, unit=unit, standard_error=error, ci95=(ends[0], ends[1]))


def _value_or_inf(function: Callable[[float], float], x: float) -> float:
    """``function(x)``; infinite if it overflows or divides by zero."""
    try:
        return function(x)
    except (OverflowError, ZeroDivisionError):
        return math.inf
