"""Makes the arguments of a command's parser from the fields of its record."""

import ast
import inspect
import textwrap
from argparse import SUPPRESS, Action, ArgumentError, ArgumentTypeError, Namespace
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_origin

from kleash.jobs.option_groups import OPTION_HEADINGS, POSITIONAL, in_order_of_help
from kleash.jobs.options import TYPE_NAMES, flag

METAVARS: Mapping[str, str] = {
    **dict.fromkeys(("policy", "reference", "teacher"), "MODEL"),
    **dict.fromkeys(("prompts", "eval_prompts", "text", "responses", "pairs"), "FILE"),
    **dict.fromkeys(("reference_cache", "teacher_cache", "out", "folder", "source"), "FOLDER"),
    "folders": "FOLDER FOLDER ...",
    "rollouts": "FILE ...",
    "candidates": "MODEL",
    "attribute": "layers|modules",
    **dict.fromkeys(("revision_policy", "revision_reference"), "REVISION"),
    "set": "NAME=VALUE",
    "fail_on": "KIND",
    "format": "FORMAT",
    "report_to": "TRACKER",
    **dict.fromkeys(("reward", "eval_reward"), "REWARD"),
    "device": "DEVICE",
    "engine": "local|ray",
    "address": "HOST:PORT",
    "resources_per_worker": "NAME=AMOUNT",
    "target": "TARGET",
}
METAVARS_OF_TYPES: Mapping[Any, str] = {int: "N", float: "X", str: "WORD", Path: "FILE"}
PATHS = frozenset({"FILE", "FOLDER", "MODEL"})
"""Metavars of values that a shell completes as paths."""


class StoreOnce(Action):
    """Store the value of an option that takes one; a second value is an error."""

    def __call__(self, parser: Any, namespace: Namespace, values: Any, option_string: Any = None) -> None:
        """Store ``values``.

        Raises:
            ArgumentError: if the option was given before.
        """
        if hasattr(namespace, self.dest):
            first = getattr(namespace, self.dest)
            raise ArgumentError(self, f"takes one value, and was given two: {first} and {values}")
        setattr(namespace, self.dest, values)


def arguments_of(record: type) -> list[tuple[str, str, dict[str, Any]]]:
    """The fields of a record in the order of the help: heading, flag or name, keyword arguments of ``add_argument``."""
    docstrings = field_docstrings(record)
    headings = {name: title for title, names in OPTION_HEADINGS.items() for name in names.split()}
    return [
        _argument(field, docstrings.get(field.name, ""), headings.get(field.name, "options"))
        for field in in_order_of_help(record)
    ]


def _argument(field: "Field[Any]", docstring: str, group: str) -> tuple[str, str, dict[str, Any]]:
    """Heading, flag or name, and keyword arguments of ``add_argument`` for one field."""
    is_optional = NoneType in get_args(field.type)
    hint: Any = get_args(field.type)[0] if is_optional else field.type
    is_list = get_origin(hint) is tuple
    value_type = get_args(hint)[0] if is_list else hint
    if get_origin(value_type) is Annotated:
        value_type = get_args(value_type)[0]
    has_default = field.default not in (None, MISSING, ())
    shows_default = has_default and value_type is not bool
    help_words = [*docstring.split(), *([f"[{field.default}]"] if shows_default else [])]
    settings: dict[str, Any] = {"help": " ".join(help_words).replace("%", "%%")}
    if value_type is bool:
        settings |= {"dest": field.name, "action": "store_false" if field.default else "store_true"}
        return group, flag(f"no_{field.name}" if field.default else field.name), settings
    settings["metavar"] = METAVARS.get(field.name, METAVARS_OF_TYPES.get(value_type, "WORD"))
    if field.name in POSITIONAL:
        # --config may give it, and the record converts it: argparse would convert SUPPRESS
        settings |= {"nargs": "*" if is_list else "?", "default": SUPPRESS}
        return "arguments", field.name, settings
    settings["type"] = _converter(value_type, is_optional)
    if value_type is Path:
        settings["metavar"] = METAVARS_OF_TYPES[Path]
    settings |= {"nargs": "*", "action": "extend"} if is_list else {"action": StoreOnce}
    return group, flag(field.name), settings


def _converter(value_type: Any, is_optional: bool) -> Callable[[str], Any]:
    """The function that argparse calls to convert a word of the command line."""

    def convert(word: str) -> Any:
        if is_optional and word == "None":
            return None
        try:
            return value_type(word)
        except ValueError as error:
            raise ArgumentTypeError(f"takes {TYPE_NAMES[value_type]}; it is {word!r}") from error

    return convert


@cache
def field_docstrings(record: type) -> dict[str, str]:
    """The docstrings under the fields of a record and of its base classes, by field name."""
    bases = map(field_docstrings, reversed(record.__mro__[1:-1]))
    docstrings = {name: text for of_base in bases for name, text in of_base.items()}
    try:
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(record))).body
    except OSError:  # the source is not installed; help then has names only
        return docstrings
    for field, text in zip(getattr(body, "body", []), getattr(body, "body", [])[1:], strict=False):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(docstring))):
                docstrings[name] = docstring
    return docstrings
