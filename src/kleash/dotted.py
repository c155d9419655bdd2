"""Resolving ``package.module:function`` from a command line to the function."""

import re
import sys
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from importlib import import_module, invalidate_caches
from inspect import getattr_static
from pathlib import Path
from types import FunctionType, MappingProxyType, ModuleType
from typing import Any

from kleash.errors import CannotRunError, MissingExtraError, OptionError, UnknownNameError

Function = Callable[..., Any]
NO_INSTALLATIONS: Mapping[str, str] = MappingProxyType({})


def resolve_function(
    path: str,
    kind: str = "a function",
    installations: Mapping[str, str] = NO_INSTALLATIONS,
    advice: str = "",
) -> Function:
    """Import the function at ``package.module:function``; a dot after the colon names a static method of a class.

    ``folder/file.py:function`` is ``folder.file:function`` of the working directory, which is put first on
    ``sys.path``, as by ``python -m``, and stays there. Folders and files may have hyphens, or begin with a digit.

    Args:
        path: from the command line.
        kind: what it names, for error messages: "a target", "a reward".
        installations: package -> command that installs it, for packages with a special command.
        advice: the end of the message where the module cannot be imported.

    Raises:
        OptionError: if ``path`` does not have this form, or the object is not callable.
        MissingExtraError: if the package, or something that it imports, is not installed.
        UnknownNameError: if the package has no such module, or the module no such name.
        CannotRunError: if importing the module raises an exception.
    """
    module_name, _, name = split_path(path)
    if not (re.fullmatch(r"[\w-]+(\.[\w-]+)*", module_name) and all(map(str.isidentifier, name.split(".")))):
        raise OptionError(
            f"{kind} is written package.module:function, or folder/file.py:function of a file below the current "
            f"folder; it is {path!r}"
        )
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    invalidate_caches()
    resolved = get_attribute(import_by_name(module_name, installations, advice), name, module_name)
    if not callable(resolved):
        raise OptionError(
            f"{path} is of type {type(resolved).__name__}, which cannot be called; name a function"
        )
    return resolved


def split_path(path: str) -> tuple[str, str, str]:
    """The module, the colon and the function of a path as ``resolve_function`` takes it."""
    return path.removeprefix("./").replace(".py:", ":").replace("/", ".").partition(":")


def import_by_name(
    name: str, installations: Mapping[str, str] = NO_INSTALLATIONS, advice: str = ""
) -> ModuleType:
    """Import the module called ``name``, with an error message that says why it cannot be imported."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        package, missing = name.partition(".")[0], error.name or ""
        if missing == package and package in installations:
            raise MissingExtraError(f"{package} is not installed; run: {installations[package]}") from error
        if f"{name}.".startswith(f"{missing}."):
            raise UnknownNameError(
                f"there is no module {missing}, neither installed nor in the current folder"
            ) from error
        raise MissingExtraError(f"{name} imports {missing}, which is not installed{advice}") from error
    except (Exception, SystemExit) as error:  # third-party code may raise anything on import
        message = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        raise CannotRunError(f"{name} cannot be imported; it raises {message}{advice}") from error


def get_attribute(holder: Any, path: str, module: str) -> Any:
    """The attribute of a module at a dotted path: "function", "Class.method" for a static or class method.

    Raises:
        UnknownNameError: if there is none; it suggests the nearest names.
        OptionError: for a method that takes ``self``, which would be the first tensor.
    """
    for name in path.split("."):
        owner = module if isinstance(holder, ModuleType) else f"{holder.__name__} in {module}"
        if not hasattr(holder, name):
            near = get_close_matches(name, dir(holder), n=3)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise UnknownNameError(f"{owner} has no {name!r}{hint}")
        if isinstance(holder, type) and isinstance(getattr_static(holder, name), FunctionType):
            raise OptionError(
                f"{name} of {owner} takes self; wrap it in a function that makes the object, or in an audit name the "
                f"class and write the call: f(…).{name}(…)"
            )
        holder = getattr(holder, name)
    return holder
