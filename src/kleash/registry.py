"""Looking up the entries of a table by name."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import TypeVar

from kleash.errors import UnknownNameError

T = TypeVar("T")
MOST_LISTED = 40
"""Larger tables are not listed in an error."""


def look_up(table: Mapping[str, T], name: str, kind: str) -> T:
    """Return the entry of ``table`` called ``name``.

    Args:
        table: names and their entries.
        name: of the entry.
        kind: what the entries are, for the error message: "divergence", "estimator".

    Raises:
        UnknownNameError: if there is no entry of this name; it suggests the nearest, and lists them if they are few.
    """
    if name in table:
        return table[name]
    near = get_close_matches(name, table, n=1)
    listed = f"; there are {', '.join(table)}" if len(table) <= MOST_LISTED else ""
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise UnknownNameError(f"no {kind} is called {name!r}{listed}{hint}")
