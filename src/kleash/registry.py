"""Looking things up by name, with an error that helps."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import TypeVar

from kleash.errors import UnknownNameError

T = TypeVar("T")


def look_up(table: Mapping[str, T], name: str, what: str) -> T:
    """The entry of ``table`` called ``name``.

    Args:
        table: names and their records.
        name: what was asked for.
        what: the kind of thing, for the error: "divergence", "estimator".

    Raises:
        UnknownNameError: if there is none; it lists the names there are, and the nearest.
    """
    if name in table:
        return table[name]
    near = get_close_matches(name, table, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise UnknownNameError(f"no {what} is called {name!r}; there are {', '.join(table)}{hint}")
