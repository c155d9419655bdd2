"""From what was typed to a function: ``package.module:function``."""

import sys
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from importlib import import_module, invalidate_caches
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from kleash.errors import CannotRunError, MissingExtraError, OptionError, UnknownNameError

Function = Callable[..., Any]
NO_LINES: Mapping[str, str] = MappingProxyType({})


def function_at(path: str, what: str = "a function", installations: Mapping[str, str] = NO_LINES) -> Function:
    """The function at ``package.module:function``; a dot after the colon goes into a class.

    The current folder is put first on ``sys.path``, as ``python -m`` does, and stays there, so
    that a file of one's own is found too.

    Args:
        path: as it was typed.
        what: what it names, for errors: "a target", "a reward".
        installations: the line that installs a package, for those that have one of their own.

    Raises:
        OptionError: if ``path`` is not written so, or what is there cannot be called.
        MissingExtraError: if the package, or something that it imports, is not installed.
        UnknownNameError: if the package has no such module, or the module no such name.
        CannotRunError: if importing the module raises.
    """
    module_name, colon, name = path.partition(":")
    parts = [*module_name.split("."), *name.split(".")]
    hint = _hint(path)
    if hint or not colon or not all(part.isidentifier() for part in parts):
        raise OptionError(f"{what} is written package.module:function, and {path!r} is not{hint}")
    find_what_lies_here()
    found: Any = import_target(module_name, installations)
    for part in name.split("."):
        found = attribute(found, part, module_name)
    if not callable(found):
        raise OptionError(
            f"{path} is of type {type(found).__name__}, which cannot be called; name a function"
        )
    return found


def _hint(path: str) -> str:
    """How a function in a file is named."""
    file, _, name = path.partition(":")
    if not file.endswith(".py") or not Path(file).is_file():
        return ""
    module = ".".join(Path(file).with_suffix("").parts)
    return f"; of a file below the current folder it is {module}:{name or 'function'}"


def import_target(name: str, installations: Mapping[str, str] = NO_LINES) -> ModuleType:
    """The module called ``name``, or a sentence about why there is none."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise without_module(name, error.name or "", installations) from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a module is other people's code, and may raise anything
        said = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        raise CannotRunError(f"{name} cannot be imported; it raises {said}") from error


def find_what_lies_here() -> None:
    """Put the current folder first on ``sys.path``, and look at it afresh."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    invalidate_caches()


def without_module(
    name: str, missing: str, installations: Mapping[str, str]
) -> MissingExtraError | UnknownNameError:
    """Which part of ``name``, or of what it imports, is not there."""
    package = name.partition(".")[0]
    if missing == package and package in installations:
        return MissingExtraError(f"{package} is not installed; run: {installations[package]}")
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
