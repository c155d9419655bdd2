"""Formatting of numbers for the terminal, with the names, units and digits of the report."""

from kleash.store.number import Number, cells
from kleash.store.statistics import label_of


def terminal_label(name: str) -> str:
    """The report's label of a column or mean, with "||" in place of "‖"."""
    return label_of(name).replace("‖", "||")


def terminal_sentence(text: str) -> str:
    """A sentence of the report in the characters of the terminal's tables."""
    for typographic, plain in (("‖", "||"), ("\u202f%", " %"), ("\u202f", ","), ("−", "-")):
        text = text.replace(typographic, plain)
    return text


def with_error(number: Number) -> str:
    """The value with its standard error, if it has one, and its unit."""
    value, _, error, unit = cells(number)
    return f"{value} ± {error} {unit}".rstrip() if error else f"{value} {unit}".rstrip()
