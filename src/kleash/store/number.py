"""A measured number as it stands in the files."""

import math
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable


@runtime_checkable
class Estimated(Protocol):
    """An estimate, wherever it was made: what ``kleash.uncertainty.Estimate`` has."""

    @property
    def value(self) -> float: ...  # noqa: D102
    @property
    def unit(self) -> str: ...  # noqa: D102
    @property
    def standard_error(self) -> float: ...  # noqa: D102
    @property
    def ci95(self) -> tuple[float, float]: ...  # noqa: D102
    @property
    def warnings(self) -> tuple[str, ...]: ...  # noqa: D102


@dataclass(frozen=True, kw_only=True)
class Number:
    """A number with its unit, its error and its warnings."""

    value: float
    """The number itself; may be infinite, and is NaN over nothing."""
    unit: str
    """"nats", "probability" or "none"."""
    standard_error: float
    """Cluster-robust standard error, in the same unit; NaN, or 0 with an interval that has a width, if not known."""
    ci95: tuple[float, float]
    """The 95 % confidence interval: its lower and its upper end."""
    warnings: tuple[str, ...] = ()
    """What a careful reader would hold against it, in sentences."""

    @classmethod
    def of(cls, estimate: Estimated) -> "Number":
        """What of an estimate is written."""
        return cls(
            value=estimate.value,
            unit=estimate.unit,
            standard_error=estimate.standard_error,
            ci95=estimate.ci95,
            warnings=estimate.warnings,
        )

    @classmethod
    def with_error(cls, value: float, standard_error: float) -> "Number":
        """One that is there to be shown: with no unit and no interval."""
        return cls(value=value, unit="none", standard_error=standard_error, ci95=(math.nan, math.nan))

    def __str__(self) -> str:
        """The number to the digits that its error supports, with the error and the unit; words where there is none."""
        unit = f" {self.unit}" if self.unit == "nats" else ""
        if not math.isfinite(self.value):
            return f"{self.value}{unit}"
        if not self.has_error:
            return f"{self.rounded}{unit}, error unknown"
        return f"{self.rounded} ± {self.format(self.standard_error)}{unit}"

    @property
    def has_error(self) -> bool:
        """Whether its error is known: not that of a single cluster, nor of clusters that only happen to be alike."""
        if self.standard_error == 0:
            return not self.ci95[0] < self.ci95[1]
        return not math.isnan(self.standard_error)

    @property
    def rounded(self) -> str:
        """The value to the digits that its error supports."""
        return self.format(self.value)

    def format(self, value: float) -> str:
        """``value`` to the second significant digit of this number's error, "0.1234" or "3.2e-07"."""
        if not math.isfinite(value):
            return str(value)
        if value == 0:
            return "0"
        error = self.standard_error if self.standard_error > 0 else abs(self.value) / 1000
        if not math.isfinite(error) or error == 0:
            return f"{value:.4g}"
        digits = 1 - math.floor(math.log10(error))
        if digits > 7:
            leading = max(1, math.floor(math.log10(abs(value))) + digits)
            return f"{value:.{min(leading, 6)}e}"
        return f"{value:.{max(0, digits)}f}"


def to_display_unit(number: Number) -> tuple[Number, str]:
    """``number`` in the unit in which it is displayed, and that unit: probabilities in percent."""
    if number.unit != "probability":
        return number, "" if number.unit == "none" else number.unit
    low, high = number.ci95
    percentages = replace(
        number,
        value=100 * number.value,
        standard_error=100 * number.standard_error,
        ci95=(100 * low, 100 * high),
    )
    return percentages, "%"


def cells(number: Number) -> tuple[str, str, str, str]:
    """Value, 95 % interval, standard error and unit as text; unknown ones are empty."""
    number, unit = to_display_unit(number)
    low, high = (number.format(end) for end in number.ci95)
    is_one_cluster = math.isnan(number.standard_error) and any(map(math.isinf, number.ci95))
    has_interval = not is_one_cluster and not any(map(math.isnan, number.ci95))
    error = number.format(number.standard_error) if number.has_error else ""
    return number.rounded, f"{low} to {high}" if has_interval else "", error, unit


def with_error(number: Number) -> str:
    """The value with its standard error, if it has one, and its unit: "0.218 ± 0.0097 nats"."""
    value, _, error, unit = cells(number)
    return f"{value} ± {error} {unit}".rstrip() if error else f"{value} {unit}".rstrip()


def with_interval(number: Number) -> str:
    """The value with its unit and its 95 % interval: "0.218 nats (95 % interval 0.199 to 0.237)"."""
    value, interval, _, unit = cells(number)
    text = f"{value} {unit}".rstrip()
    return f"{text} (95 % interval {interval})" if interval else text
