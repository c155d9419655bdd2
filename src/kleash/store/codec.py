"""Records to JSON and back: dataclasses, mappings and tuples of plain values.

JSON has no word for what is not finite, so those three numbers are the strings "Infinity",
"-Infinity" and "NaN", as DESIGN.md says of every file of kleash.
"""

import json
import math
import types
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from itertools import repeat
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")
MakeObject = Callable[[list[tuple[str, Any]]], Any]

NOT_WRITTEN = {"written": False}
"""Metadata of a field that is no part of the file."""


def parse_json(text: str | bytes, make_object: MakeObject | None = None) -> Any:
    """The value that JSON text stands for.

    Args:
        text: of JSON.
        make_object: makes an object of its names and values; None for a dictionary, of equal names with the last.

    Raises:
        ValueError: if it is not JSON, not UTF-8, nested too deeply, or has a number of too many digits.
    """
    try:
        return json.loads(
            text if isinstance(text, str) else text.decode("utf-8"), object_pairs_hook=make_object
        )
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def encode(value: Any) -> Any:
    """``value`` as what ``json.dumps(…, allow_nan=False)`` takes."""
    if isinstance(value, (str, int)):  # nearly all values of a page: asked first
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, (list, tuple)):
        return [encode(part) for part in cast("list[Any]", value)]
    if isinstance(value, Mapping):
        return {str(key): encode(part) for key, part in cast("Mapping[Any, Any]", value).items()}
    if is_dataclass(value) and not isinstance(value, type):
        written = [field.name for field in fields(value) if field.metadata.get("written", True)]
        return {name: encode(getattr(value, name)) for name in written}
    return value


def to_json(value: Any) -> str:
    """``value`` as indented JSON text with a line break at its end."""
    return json.dumps(encode(value), indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def decode(kind: type[T], data: Any) -> T:
    """A ``kind`` made from what ``encode`` made of one, such as a file whose checksum fits. Other keys are ignored.

    The default of its field ``schema``, if it has one, is the only schema that is read.

    Raises:
        TypeError, ValueError, KeyError, AttributeError: if ``data`` is something else.
    """
    schema = getattr(kind, "schema", None)
    if schema is not None and data.get("schema") != schema:
        raise ValueError(
            f"it has schema {data.get('schema')} and this kleash reads {schema}, so another version wrote it"
        )
    hints = _hints_of(kind)
    return kind(**{name: _value(hints[name], data[name]) for name in hints if name in data})


_hints_of = cache(get_type_hints)
"""The evaluated annotations of a record."""


def _value(hint: Any, data: Any) -> Any:
    """What ``encode`` made ``data`` of, by the annotation of the field that it belongs to."""
    origin, parts = get_origin(hint), get_args(hint)
    if data is None:
        return None
    if origin in (Union, types.UnionType):
        return _value(next(part for part in parts if part is not type(None)), data)
    if origin is tuple:
        kinds = repeat(parts[0]) if parts[-1] is Ellipsis else parts
        return tuple(map(_value, kinds, data))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {key: _value(parts[1], part) for key, part in data.items()}
    if is_dataclass(hint):
        return decode(cast("type[Any]", hint), data)
    return float(data) if hint is float else data  # which takes "Infinity", "-Infinity" and "NaN"
