"""From what was typed to what is audited: ``package.module:function``, and ``name=value`` after it."""

import ast
import inspect
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from types import ModuleType
from typing import Any

from kleash import dotted
from kleash.auditing.targets.installing import INSTALLATIONS
from kleash.dotted import Function
from kleash.errors import OptionError


def function_at(path: str) -> Function:
    """The function at ``package.module:function``; a dot after the colon goes into a class.

    Raises:
        OptionError: if ``path`` is not written so, or what is there cannot be called.
        MissingExtraError: if the package, or something that it imports, is not installed.
        UnknownNameError: if the package has no such module, or the module no such name.
        CannotRunError: if importing the module raises.
    """
    return dotted.resolve_function(path, "a target", INSTALLATIONS)


def import_target(name: str) -> ModuleType:
    """The module called ``name``, or a sentence about why there is none."""
    return dotted.import_by_name(name, INSTALLATIONS)


def arguments_of(function: Function, words: Sequence[str]) -> dict[str, Any]:
    """Keyword arguments for ``function`` from ``name=value`` as typed on a command line.

    A value is read as a Python literal (``2``, ``.5``, ``True``, ``None``, ``"k3"``) and, where it
    is none, taken as the string it is.

    Raises:
        OptionError: if a word has no ``=``, a name comes twice, or the function does not take it.
    """
    bound: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name.isidentifier():
            raise OptionError(f"an argument of the target is written name=value, and {word!r} is not")
        if name in bound:
            raise OptionError(f"the target's argument {name} was given twice")
        bound[name] = literal(value)
    check_arguments(function, bound)
    return bound


def check_arguments(function: Function, arguments: Mapping[str, Any]) -> None:
    """Refuse a keyword that ``function`` does not take.

    Raises:
        OptionError: if there is one; it lists what the function takes.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature takes what it takes
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    keywords = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for name in arguments:
        if name not in keywords:
            called = getattr(function, "__name__", type(function).__name__)
            raise OptionError(
                f"{called} takes no argument {name!r}; it takes {', '.join(keywords) or 'none'}"
            )


def literal(text: str) -> Any:
    """The Python literal that ``text`` is, or ``text``."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def version_of(package: str) -> str:
    """The installed version of an importable package, or where it lies if it has none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        pass
    distributions = metadata.packages_distributions().get(package, [])
    if distributions:
        return metadata.version(distributions[0])
    module = sys.modules.get(package)
    return str(getattr(module, "__version__", None) or getattr(module, "__file__", None) or "unknown")
