"""From what was typed to a function: ``package.module:function``, and ``name=value`` after it."""

import ast
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module, invalidate_caches, metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from kleash.auditing.targets.installing import INSTALLATIONS
from kleash.errors import CannotRunError, MissingExtraError, OptionError, UnknownNameError

Function = Callable[..., Any]


def function_at(path: str) -> Function:
    """The function at ``package.module:function``; a dot after the colon goes into a class.

    The current folder is put first on ``sys.path``, as ``python -m`` does, and stays there, so
    that a file of one's own is found too.

    Raises:
        OptionError: if ``path`` is not written so, or what is there cannot be called.
        MissingExtraError: if the package, or something that it imports, is not installed.
        UnknownNameError: if the package has no such module, or the module no such name.
        CannotRunError: if importing the module raises.
    """
    module_name, colon, name = path.partition(":")
    if not colon or not all(part.isidentifier() for part in [*module_name.split("."), *name.split(".")]):
        raise OptionError(f"a target is written package.module:function, and {path!r} is not")
    find_what_lies_here()
    found: Any = import_target(module_name)
    for part in name.split("."):
        found = attribute(found, part, module_name)
    if not callable(found):
        raise OptionError(
            f"{path} is of type {type(found).__name__}, which cannot be called; name a function"
        )
    return found


def import_target(name: str) -> ModuleType:
    """The module called ``name``, or a sentence about why there is none."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise without_module(name, error.name or "") from error
    except (Exception, SystemExit) as error:
        said = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        raise CannotRunError(f"{name} cannot be imported; it raises {said}") from error


def find_what_lies_here() -> None:
    """Put the current folder first on ``sys.path``, and look at it afresh."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    invalidate_caches()


def without_module(name: str, missing: str) -> MissingExtraError | UnknownNameError:
    """Which part of ``name``, or of what it imports, is not there."""
    package = name.partition(".")[0]
    if missing == package and package in INSTALLATIONS:
        return MissingExtraError(f"{package} is not installed; run: {INSTALLATIONS[package]}")
    if missing == package:
        return UnknownNameError(f"{package} is not installed, and no {package}.py lies in the current folder")
    if name == missing or name.startswith(f"{missing}."):
        parent = missing.rpartition(".")[0]
        return UnknownNameError(f"{parent} is installed and has no module {missing.rpartition('.')[2]!r}")
    return MissingExtraError(f"{name} imports {missing}, which is not installed")


def attribute(holder: Any, name: str, where: str) -> Any:
    """What ``holder`` calls ``name``, or the names that are nearest."""
    if hasattr(holder, name):
        return getattr(holder, name)
    near = get_close_matches(name, dir(holder), n=3)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    owner = where if isinstance(holder, ModuleType) else f"{holder.__name__} in {where}"
    raise UnknownNameError(f"{owner} has no {name!r}{hint}")


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
