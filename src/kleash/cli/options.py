"""Makes the arguments of a command's parser from the fields of its record."""

import ast
import inspect
import textwrap
from argparse import Action, ArgumentError, ArgumentTypeError, Namespace
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

POSITIONAL = ("target", "folder", "folders")
METAVARS: Mapping[str, str] = {
    **dict.fromkeys(("policy", "reference", "teacher"), "MODEL"),
    **dict.fromkeys(("prompts", "text", "responses", "pairs"), "FILE"),
    **dict.fromkeys(("reference_cache", "out", "folder"), "FOLDER"),
    "folders": "FOLDER FOLDER ...",
    **dict.fromkeys(("revision_policy", "revision_reference"), "REVISION"),
    "set": "NAME=VALUE",
    "fail_on": "KIND",
    "report_to": "TRACKER",
    "reward": "REWARD",
    "device": "DEVICE",
    "target": "TARGET",
}
METAVARS_OF_TYPES: Mapping[Any, str] = {int: "N", float: "X", str: "WORD", Path: "FILE"}
PATHS = frozenset({"FILE", "FOLDER", "MODEL"})
"""Metavars of values that are completed as paths."""
GROUPS: Mapping[str, str] = {
    "essentials": "policy reference teacher prompts text responses pairs reward steps out",
    "how much is read": "limit until_relative_error prompts_per_step pairs_per_step",
    "KL and beta": "kl kl_place kl_scope divergence beta controller target_nats target_per horizon beta_min "
    "beta_max early_stop_nats",
    "sampling": "samples_per_prompt max_new_tokens temperature top_p top_k min_p seed",
    "text that is read": "window stride max_tokens",
    "updates": "learning_rate lora_rank epochs minibatches clip_range max_gradient_norm gamma gae_lambda whiten "
    "vf_coef clip_range_value ent_coef",
    "precision, device and memory": "dtype device device_map batch_tokens reference_cache",
    "loading": "revision_policy revision_reference trust_remote_code",
    "running and output": "resume checkpoint_every on_hacking report_to metric_names json quiet",
}
"""Headings of the help and the fields under each, in order. Other fields are listed under "options"."""
LARGEST_INTEGER = 2**63


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
    hints, docstrings = get_type_hints(record, include_extras=True), field_docstrings(record)
    groups = {name: title for title, names in GROUPS.items() for name in names.split()}
    ranks = {name: rank for rank, name in enumerate([*POSITIONAL, *groups])}
    fields_in_order = sorted(fields(record), key=lambda field: ranks.get(field.name, len(ranks)))
    return [
        _argument(field, hints[field.name], docstrings.get(field.name, ""), groups.get(field.name, "options"))
        for field in fields_in_order
    ]


def _argument(field: "Field[Any]", hint: Any, docstring: str, group: str) -> tuple[str, str, dict[str, Any]]:
    """Heading, flag or name, and keyword arguments of ``add_argument`` for one field."""
    while get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    is_optional = get_origin(hint) in (Union, UnionType) and NoneType in get_args(hint)
    if is_optional:
        (hint,) = (inner for inner in get_args(hint) if inner is not NoneType)
    is_list = get_origin(hint) is tuple
    value_type = get_args(hint)[0] if is_list else hint
    shows_default = field.default not in (None, False, True, MISSING, ())
    help_words = [*docstring.split(), *([f"[{field.default}]"] if shows_default else [])]
    settings: dict[str, Any] = {"help": " ".join(help_words).replace("%", "%%")}
    flag = "--" + field.name.replace("_", "-")
    if value_type is bool:
        flag = flag.replace("--", "--no-", 1) if field.default else flag
        settings |= {"dest": field.name, "action": "store_false" if field.default else "store_true"}
        return group, flag, settings
    settings |= {
        "type": _converter(value_type, is_optional),
        "metavar": METAVARS.get(field.name, METAVARS_OF_TYPES.get(value_type, "WORD")),
    }
    if field.name in POSITIONAL:
        settings |= {"nargs": "+"} if is_list else {}
        settings |= {"nargs": "?", "default": field.default} if field.default is not MISSING else {}
        return "arguments", field.name, settings
    if value_type is Path:
        settings["metavar"] = METAVARS_OF_TYPES[Path]
    settings |= {"nargs": "*", "action": "extend"} if is_list else {"action": StoreOnce}
    return group, flag, settings


def _converter(value_type: Any, is_optional: bool) -> Callable[[str], Any]:
    """The function that argparse calls to convert a word of the command line."""

    def convert(word: str) -> Any:
        if is_optional and word == "None":
            return None
        try:
            value = value_type(word)
        except ValueError as error:
            expected = "a whole number" if value_type is int else "a number"
            raise ArgumentTypeError(f"takes {expected}; it is {word!r}") from error
        if value_type is int and not -LARGEST_INTEGER <= value < LARGEST_INTEGER:
            raise ArgumentTypeError(f"must be a whole number below 2^63; it is {word}")
        return value

    return convert


@cache
def field_docstrings(record: type) -> dict[str, str]:
    """The docstrings under the fields of a record and of its base classes, by field name."""
    docstrings: dict[str, str] = {}
    for base in reversed(record.__mro__[1:-1]):
        docstrings |= field_docstrings(base)
    try:
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(record))).body
    except OSError:  # the source is not installed; help then has names only
        return docstrings
    for field, text in zip(getattr(body, "body", []), getattr(body, "body", [])[1:], strict=False):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(docstring))):
                docstrings[name] = docstring
            case _:
                pass
    return docstrings
