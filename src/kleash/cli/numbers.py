"""Numbers as they stand on a terminal: the report's names, units and digits."""

import math

from kleash.reports.formatting import to_display_unit
from kleash.store import Number
from kleash.store.statistics import label_of


def named(name: str) -> str:
    """A column's or a mean's name in the report; the bars of KL(p ‖ q) as everybody types them."""
    return label_of(name).replace("‖", "||")


def cells(number: Number) -> tuple[str, str, str, str]:
    """Value, 95 % interval, standard error and unit as text; empty where it is not known."""
    number, unit = to_display_unit(number)
    low, high = (number.format(end) for end in number.ci95)
    alone = math.isnan(number.standard_error) and any(map(math.isinf, number.ci95))
    known = not alone and not any(map(math.isnan, number.ci95))
    error = number.format(number.standard_error) if number.has_error else ""
    return number.rounded, f"{low} to {high}" if known else "", error, unit


def with_error(number: Number) -> str:
    """The value with its standard error, if it has one, and its unit."""
    value, _, error, unit = cells(number)
    return f"{value} ± {error} {unit}".rstrip() if error else f"{value} {unit}".rstrip()
