"""Importing what only some installations have, and seeing that it is what kleash was written for."""

import inspect
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module, metadata
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from kleash.errors import CannotRunError, MissingExtraError

NOT_THERE = object()


def need(module: str, extra: str) -> ModuleType:
    """Import ``module``, or say which extra of kleash brings it.

    Args:
        module: dotted name of an optional dependency, "pyarrow.parquet".
        extra: the extra of kleash that installs it, "models".

    Raises:
        MissingExtraError: if it is not installed.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != module.partition(".")[0]:
            raise
        package = module.partition(".")[0]
        raise MissingExtraError(f"{package} is not installed; run: pip install 'kleash[{extra}]'") from error


def need_all(modules: Iterable[str], install: str) -> None:
    """See that all of ``modules`` are installed, without importing them.

    Args:
        modules: top-level names of optional dependencies.
        install: what pip is to be given: "'kleash[models]'".

    Raises:
        MissingExtraError: naming all that are not, in one sentence.
    """
    missing = [module for module in dict.fromkeys(modules) if not is_installed(module)]
    if missing:
        names = " and ".join(filter(None, (", ".join(missing[:-1]), missing[-1])))
        raise MissingExtraError(
            f"{names} {'is' if len(missing) == 1 else 'are'} not installed; run: pip install {install}"
        )


def is_installed(module: str) -> bool:
    """Whether the top-level ``module`` can be imported."""
    try:
        return module in sys.modules or find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def check_version(package: str, *, at_least: str, below: str) -> str | None:
    """What has to be said about the installed version of ``package``; None if it is a known one.

    Versions in ``[at_least, below)`` are those that kleash was run with. Another one may work: whoever asks
    warns with the sentence (``warn_of_version``) and then looks at what it needs (``require_seams``).

    Raises:
        MissingExtraError: if it is not installed.
    """
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError as error:
        raise MissingExtraError(f"{package} is not installed; run: pip install {package}") from error
    if _numbers(at_least) <= _numbers(found) < _numbers(below):
        return None
    return (
        f"{package} {found} is installed, and kleash was run with {at_least} and what follows up to, not "
        f"including, {below}: it may work, and is not known to"
    )


def warn_of_version(package: str, *, at_least: str, below: str) -> None:
    """Warn, once for each place it is called from, if the version is not a known one.

    Raises:
        MissingExtraError: if it is not installed.
    """
    said = check_version(package, at_least=at_least, below=below)
    if said is not None:
        warnings.warn(said, stacklevel=2)


def require_seams(package: str, seams: Mapping[str, tuple[str, ...]]) -> None:
    """See that what kleash takes hold of is there and takes the arguments it is called with.

    Args:
        package: whose they are, for the error.
        seams: "module:name" or "module:Class.name" -> names of arguments that it must have; none for
            anything, function or not.

    Raises:
        CannotRunError: naming all that is missing.
    """
    missing: list[str] = []
    for place, arguments in seams.items():
        found = _found(place)
        if found is NOT_THERE:
            missing.append(place)
        elif arguments:
            there = _arguments(found)
            missing += [f"argument {name!r} of {place}" for name in arguments if name not in there]
    if missing:
        raise CannotRunError(
            f"the installed {package} lacks what kleash takes hold of: {', '.join(missing)}; install a version "
            "that its documentation names"
        )


def after_import(module: str, then: Callable[[ModuleType], None]) -> None:
    """Call ``then`` with ``module``: now if it is imported, else as soon as somebody imports it.

    For whoever has to change something in a process that may never need it, and that importing it would burden.
    """
    if module in sys.modules:
        then(sys.modules[module])
    else:
        sys.meta_path.insert(0, _Afterwards(module, then))


class _Afterwards(MetaPathFinder):
    """Finds one module as everybody does, and calls a function once it was executed."""

    def __init__(self, module: str, then: Callable[[ModuleType], None]) -> None:
        self.module, self.then, self.asking = module, then, False

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname != self.module or self.asking:
            return None
        self.asking = True
        try:
            spec = find_spec(fullname)
        finally:
            self.asking = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                sys.meta_path.remove(self)
                self.then(module)

            vars(spec.loader)["exec_module"] = exec_module
        return spec


def _found(place: str) -> Any:
    module, _, path = place.partition(":")
    try:
        found: Any = import_module(module)
    except ModuleNotFoundError:
        return NOT_THERE
    for name in filter(None, path.split(".")):
        found = getattr(found, name, NOT_THERE)
    return found


def _arguments(function: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def _numbers(version: str) -> tuple[int, ...]:
    """The release of a version, as numbers: (1, 16, 0) of "1.16.0.dev1"."""
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in release.group().split(".")) if release else ()
