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
LARGEST_INT = 2**63
"""Whole numbers that are read are below it in size, so that numpy and Parquet can hold them."""


def parse_json(text: str | bytes) -> Any:
    """The value that JSON text stands for.

    Raises:
        ValueError: if it is not JSON, not UTF-8, nested too deeply, or has a number of too many digits.
    """
    try:
        return json.loads(text if isinstance(text, str) else text.decode("utf-8"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


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
        raise TypeError(f"{kind.__name__} is an object in JSON, not {_kind_of(data)}")
    hints = get_type_hints(kind)
    fields = cast("Mapping[str, Any]", data)
    known = {name: _decode_field(name, hints[name], fields[name]) for name in hints if name in fields}
    return kind(**known)


def _decode_field(name: str, hint: Any, data: Any) -> Any:
    """The value of a field from its type hint and JSON data; errors begin with the field's name."""
    try:
        return _value(hint, data)
    except (TypeError, ValueError, KeyError) as error:
        raise type(error)(f"{name}: {error.args[0] if error.args else error}") from error


def _value(hint: Any, data: Any) -> Any:
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if data is None and type(None) in parts:
            return None
        return _value(next(part for part in parts if part is not type(None)), data)
    if origin is tuple:
        if not isinstance(data, list | tuple):
            raise TypeError(f"expected an array, found {_kind_of(data)}")
        items = cast("list[Any]", data)
        if parts[-1] is Ellipsis:
            return tuple(_value(parts[0], part) for part in items)
        return tuple(_value(part, item) for part, item in zip(parts, items, strict=True))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(data, Mapping):
            raise TypeError(f"expected an object, found {_kind_of(data)}")
        return {key: _value(parts[1], part) for key, part in cast("Mapping[str, Any]", data).items()}
    if is_dataclass(hint):
        return decode(cast("type[Any]", hint), data)
    if hint in (float, int, str, bool):
        return _plain_value(hint, data)
    return data


def _plain_value(hint: Any, data: Any) -> Any:
    if hint is float:
        if isinstance(data, str):
            if data not in NON_FINITE:
                raise ValueError(f"expected a number, found {data[:40]!r}")
            return NON_FINITE[data]
        if isinstance(data, bool) or not isinstance(data, int | float):
            raise TypeError(f"expected a number, found {_kind_of(data)}")
        if isinstance(data, int) and abs(data) >= LARGEST_INT:
            raise ValueError("a whole number beyond 64 bits")
        return float(data)
    if not isinstance(data, hint) or (hint is int and isinstance(data, bool)):
        raise TypeError(f"expected {hint.__name__}, found {_kind_of(data)}")
    if hint is int and abs(data) >= LARGEST_INT:
        raise ValueError("a whole number beyond 64 bits")
    return data


def _kind_of(data: Any) -> str:
    return "null" if data is None else type(data).__name__
