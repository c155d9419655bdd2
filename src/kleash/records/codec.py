"""Records to JSON and back: dataclasses, mappings and tuples of plain values.

JSON has no word for what is not finite, so those three numbers are the strings "Infinity",
"-Infinity" and "NaN", as DESIGN.md says of every file of kleash.
"""

import json
import math
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")

NON_FINITE = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def encode(value: Any) -> Any:
    """``value`` as what ``json.dumps(…, allow_nan=False)`` takes."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: encode(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): encode(part) for key, part in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        return [encode(part) for part in cast("list[Any]", value)]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def to_json(value: Any) -> str:
    """``value`` as indented JSON text with a line break at its end."""
    return json.dumps(encode(value), indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def decode(kind: type[T], data: Any) -> T:
    """A ``kind`` made from what ``encode`` made of one. Keys that it does not know are ignored.

    Raises:
        TypeError, ValueError, KeyError: if ``data`` is something else.
    """
    if not isinstance(data, Mapping):
        raise TypeError(f"{kind.__name__} is an object in JSON, not {type(data).__name__}")
    hints = get_type_hints(kind)
    given = cast("Mapping[str, Any]", data)
    known = {name: _value(hints[name], given[name]) for name in hints if name in given}
    return kind(**known)


def _value(hint: Any, data: Any) -> Any:
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if data is None and type(None) in parts:
            return None
        return _value(next(part for part in parts if part is not type(None)), data)
    if origin is tuple:
        if parts[-1] is Ellipsis:
            return tuple(_value(parts[0], part) for part in data)
        return tuple(_value(part, given) for part, given in zip(parts, data, strict=True))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {key: _value(parts[1], part) for key, part in data.items()}
    if is_dataclass(hint):
        return decode(cast("type[Any]", hint), data)
    if hint is float:
        return NON_FINITE[data] if isinstance(data, str) else float(data)
    if hint in (int, str, bool) and not isinstance(data, hint):
        raise TypeError(f"expected {hint.__name__}, found {type(data).__name__}")
    return data
