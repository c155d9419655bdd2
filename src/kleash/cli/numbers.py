"""Formatting of numbers for the terminal, with the names, units and digits of the report."""

import math

from kleash.reports.formatting import to_display_unit
from kleash.store import Number
from kleash.store.statistics import label_of


def terminal_label(name: str) -> str:
    """The report's label of a column or mean, with "||" in place of "‖"."""
    return label_of(name).replace("‖", "||")


def cells(number: Number) -> tuple[str, str, str, str]:
    """Value, 95 % interval, standard error and unit as text; unknown ones are empty."""
    number, unit = to_display_unit(number)
    low, high = (number.format(end) for end in number.ci95)
    is_one_cluster = math.isnan(number.standard_error) and any(map(math.isinf, number.ci95))
    has_interval = not is_one_cluster and not any(map(math.isnan, number.ci95))
    error = number.format(number.standard_error) if number.has_error else ""
    return number.rounded, f"{low} to {high}" if has_interval else "", error, unit


def with_error(number: Number) -> str:
    """The value with its standard error, if it has one, and its unit."""
    value, _, error, unit = cells(number)
    return f"{value} ± {error} {unit}".rstrip() if error else f"{value} {unit}".rstrip()
