"""Numbers as text: in the unit in which they are displayed, with their errors and intervals."""

import math
from dataclasses import replace

from kleash.estimate import Estimate

NO_INTERVAL = "no interval: one cluster alone does not show how much clusters differ"


def bare_number(value: float, standard_error: float) -> Estimate:
    """A value with its error, to be shown: without a unit and an interval."""
    return Estimate(value=value, unit="none", standard_error=standard_error, ci95=(math.nan, math.nan))


def to_display_unit(number: Estimate) -> tuple[Estimate, str]:
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


def cells(number: Estimate) -> tuple[str, str, str, str]:
    """Value, 95 % interval, standard error and unit as text; unknown ones are empty."""
    number, unit = to_display_unit(number)
    low, high = (number.format(end) for end in number.ci95)
    is_one_cluster = math.isnan(number.standard_error) and any(map(math.isinf, number.ci95))
    has_interval = not is_one_cluster and not any(map(math.isnan, number.ci95))
    error = number.format(number.standard_error) if number.has_error else ""
    return number.rounded, f"{low} to {high}" if has_interval else "", error, unit


def with_error(number: Estimate) -> str:
    """The value with its standard error, if it has one, and its unit: "0.218 ± 0.0097 nats"."""
    value, _, error, unit = cells(number)
    return f"{value} ± {error} {unit}".rstrip() if error else f"{value} {unit}".rstrip()


def with_interval(number: Estimate) -> str:
    """The value with its unit and its 95 % interval: "0.218 nats (95 % interval 0.199 to 0.237)"."""
    value, interval, _, unit = cells(number)
    text = f"{value} {unit}".rstrip()
    return f"{text} (95 % interval {interval})" if interval else f"{text} ({NO_INTERVAL})"
