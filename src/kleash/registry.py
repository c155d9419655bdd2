"""Looking up by name: entries of a table, values of a key, names that are gone; choices and ranges of arguments."""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, SupportsFloat, TypeVar

from kleash.errors import OptionError, UnknownNameError

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
MOST_LISTED = 40
"""Larger tables are not listed in an error."""


def look_up(table: Mapping[str, T], name: str | T, kind: str) -> T:
    """Return the entry of ``table`` called ``name``, or the entry itself.

    Args:
        table: names and their entries.
        name: of the entry, or an entry of one's own, of the type of one in the table.
        kind: what the entries are, for the error message: "divergence", "estimator".

    Raises:
        UnknownNameError: if there is no entry of this name; it suggests the nearest, and lists them if they are few.
    """
    is_entry = name is not None and isinstance(name, tuple(map(type, table.values())))
    if is_entry and not isinstance(name, str):
        return name
    if str(name) in table:
        return table[str(name)]
    near = get_close_matches(str(name), table, n=1, cutoff=0.65)
    listed = f"; there are {', '.join(table)}" if 0 < len(table) <= MOST_LISTED else ""
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise UnknownNameError(f"no {kind} is called {name!r}{listed}{hint}")


def grouped(pairs: Iterable[tuple[K, T]]) -> dict[K, list[T]]:
    """The values of each key, in their order."""
    groups: dict[K, list[T]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def require_choice(choices: Sequence[object], **named: object) -> None:
    """Raise OptionError unless each value is one of ``choices``; an argument's name is that in the error."""
    for name, value in named.items():
        if value not in choices:
            raise OptionError(f"{name} is {value!r}; there are {', '.join(map(str, choices))}")


def require_above(least: float | int, **numbers: float | int) -> None:
    """Raise OptionError unless each number is finite and above ``least``."""
    _require(lambda x: least < x < math.inf, f"give a finite number above {least:g}", numbers)


def require_at_least(least: float | int, **numbers: float | int) -> None:
    """Raise OptionError unless each number is finite and at least ``least``."""
    _require(lambda x: least <= x < math.inf, f"give a finite number, at least {least:g}", numbers)


def require_share(**shares: float | int) -> None:
    """Raise OptionError unless each number is from 0 to 1."""
    _require(lambda x: 0 <= x <= 1, "it is a share, from 0 to 1", shares)


def require_positive_share(**shares: float | int) -> None:
    """Raise OptionError unless each number is above 0 and at most 1."""
    _require(lambda x: 0 < x <= 1, "it is a share above 0, at most 1", shares)


def options_given(**options: T | None) -> dict[str, T]:
    """The options that are not None."""
    return {name: value for name, value in options.items() if value is not None}


def _require(holds: Callable[[float], bool], advice: str, numbers: Mapping[str, float | int]) -> None:
    """Raise OptionError with ``advice`` unless ``holds`` is true of each number; NaN and texts are in no range."""
    for name, value in numbers.items():
        if not (isinstance(value, SupportsFloat) and holds(value)):
            raise OptionError(f"{name} is {value!r}; {advice}")


def refuse_former(package: str, former: Mapping[str, str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package whose former names are refused with what to use instead.

    Args:
        package: its name.
        former: names that are gone, each with what to use instead.
    """

    def get(name: str) -> Any:
        if name in former:
            raise ImportError(f"{package}.{name} is gone: {former[name]}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get
