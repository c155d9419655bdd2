"""The types of a job's options, checked where the job is made: from Python anything can be given."""

from dataclasses import fields
from operator import index
from pathlib import PurePath
from types import NoneType
from typing import Any, SupportsFloat, SupportsIndex, get_args, get_origin

from kleash.errors import OptionError

NAMES = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    tuple: "a tuple of texts",
}


def check_option_types(job: Any) -> None:
    """Give each field of a job the type that its annotation says, or refuse it.

    A ``Path`` becomes the text that it is on the command line and in records, a list a tuple, a NumPy integer an int.

    Raises:
        OptionError: naming the option, what it was and what it may be.
    """
    for field in fields(job):
        value = getattr(job, field.name)
        # In Python 3.10 and later both spellings of a union give their members to get_args.
        union = () if get_origin(field.type) is tuple else get_args(field.type)
        types = tuple(get_origin(kind) or kind for kind in (union or (field.type,)))
        if value is None and NoneType in types:
            continue
        object.__setattr__(job, field.name, _converted(field.name, value, types))


def _converted(name: str, value: Any, types: tuple[Any, ...]) -> Any:
    """``value`` as the first of the types that takes it; NaN and infinity pass, and each job refuses them by itself."""
    option = "--" + name.replace("_", "-")
    for kind in types:
        if kind is tuple and (texts := _texts(value)) is not None:
            return texts
        if kind is str and isinstance(value, str | PurePath):
            return str(value)
        if kind is bool and isinstance(value, bool):
            return value
        if kind is int and not isinstance(value, bool) and isinstance(value, SupportsIndex):
            return index(value)
        if kind is float and not isinstance(value, bool | str) and isinstance(value, SupportsFloat):
            return value if isinstance(value, int | float) else float(value)
    expected = " or ".join("None" if kind is NoneType else NAMES.get(kind, str(kind)) for kind in types)
    raise OptionError(
        f"{option} must be {expected}; it is {str(value)[:60]!r}, of type {type(value).__name__}"
    )


def _texts(value: Any) -> tuple[str, ...] | None:
    """A list or tuple of texts as a tuple; None of anything else."""
    if type(value) not in (list, tuple) or not all(isinstance(entry, str) for entry in value):
        return None
    return tuple(value)
