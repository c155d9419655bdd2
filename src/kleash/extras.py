"""Optional dependencies: importing them, testing their versions, and checking the attributes that kleash uses."""

import inspect
import re
import sys
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from functools import wraps
from importlib import import_module, metadata
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pkgutil import resolve_name
from types import ModuleType
from typing import Any, TypeAlias

from kleash.errors import CannotRunError, MissingExtraError, joined_names

Wrappers: TypeAlias = Mapping[str, tuple[tuple[str, ...], Callable[..., Any]]]
"""A function "name" or method "Class.name" -> the arguments that it must accept, and its wrapper (``wrap_once``)."""


def import_extra(module: str, extra: str) -> ModuleType:
    """Import an optional dependency.

    Args:
        module: dotted name of the module, "pyarrow.parquet".
        extra: the extra of kleash that installs it, "models".

    Raises:
        MissingExtraError: if it is not installed, with the command that installs it.
    """
    package = module.partition(".")[0]
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise  # something else is missing, which the package imports
        raise MissingExtraError(f"{package} is not installed; run: pip install 'kleash[{extra}]'") from error


def hub_errors() -> tuple[type[Exception], ...]:
    """The errors of the hub's client: of answers, and of a network that fails, which in httpx are no OSErrors."""
    # the base is of the client that its version takes: httpx, or httpx2
    http_error, *_ = import_extra("huggingface_hub.errors", "models").HfHubHTTPError.__bases__
    return http_error, ConnectionError


@contextmanager
def suppress_library_output() -> Generator[None]:
    """Context without log messages, progress bars and warnings of transformers and other libraries."""
    log = import_extra("transformers.utils.logging", "models")
    verbosity, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.set_verbosity(verbosity)
        if bars:
            log.enable_progress_bar()


def require_installed(modules: Iterable[str], install: str) -> None:
    """Raise an error unless all of ``modules`` are installed; nothing is imported.

    Args:
        modules: top-level names of optional dependencies.
        install: the arguments of pip that install them: "'kleash[models]'".

    Raises:
        MissingExtraError: naming all modules that are missing.
    """
    missing = [module for module in dict.fromkeys(modules) if not is_installed(module)]
    if missing:
        raise MissingExtraError(
            f"{joined_names(missing)} {'is' if len(missing) == 1 else 'are'} not installed; run: pip install {install}"
        )


def is_installed(module: str) -> bool:
    """Whether the top-level ``module`` can be imported."""
    try:
        return sys.modules.get(module) is not None or find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def warn_if_untested(package: str, *, at_least: str, below: str) -> None:
    """Warn if the installed version is outside the tested range ``[at_least, below)``, once per calling line.

    An untested version may work; callers then check the attributes that they use (``require_attributes``).

    Raises:
        MissingExtraError: if the package is not installed.
    """
    try:
        installed = metadata.version(package)
    except metadata.PackageNotFoundError as error:
        raise MissingExtraError(f"{package} is not installed; run: pip install {package}") from error
    if not _release(at_least) <= _release(installed) < _release(below):
        warnings.warn(
            f"{package} {installed} is installed; kleash is tested with versions from {at_least} up to, not including, "
            f"{below}, and may not work with this one",
            stacklevel=2,
        )


def require_attributes(package: str, attributes: Mapping[str, tuple[str, ...]]) -> None:
    """Raise an error unless the attributes that kleash uses exist and accept the arguments that it passes.

    Args:
        package: the package, for the error message.
        attributes: "module:name" or "module:Class.name" -> names of arguments that it must accept; an empty tuple for
            any attribute, function or not.

    Raises:
        CannotRunError: naming everything that is missing.
    """
    missing: list[str] = []
    for path, arguments in attributes.items():
        try:
            attribute = resolve_name(path)
        except (ModuleNotFoundError, AttributeError):
            missing.append(path)
            continue
        if arguments:
            parameters = inspect.signature(attribute).parameters
            # as a wrapper does
            takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
            missing += [
                f"argument {name!r} of {path}" for name in arguments if not (takes_any or name in parameters)
            ]
    if missing:
        raise CannotRunError(
            f"the installed {package} lacks what kleash uses: {', '.join(missing)}; install a version "
            "that the documentation names"
        )


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Generator[Any]:
    """Context in which an attribute of an object has another value, which it gives."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield value
    finally:
        setattr(owner, name, before)


def replace_everywhere(owner: ModuleType, name: str, replacement: Any) -> None:
    """Replace a function of the module ``owner``, there and in all modules of its package that imported it by name."""
    original, package = getattr(owner, name), owner.__name__.partition(".")[0]
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith(f"{package}.") and vars(module).get(name) is original:
            setattr(module, name, replacement)


def wrap_once(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace a function of a module, as ``replace_everywhere``, or a method of a class; a second call does nothing.

    Args:
        owner: the module or the class.
        name: of the function.
        wrapper: called in its place, with the function and its arguments.
    """
    original = getattr(owner, name)
    if hasattr(original, "kleash"):
        return

    @wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    vars(replacement)["kleash"] = True
    if isinstance(owner, ModuleType):
        replace_everywhere(owner, name, replacement)
    else:
        setattr(owner, name, replacement)


def call_after_import(module: str, function: Callable[[ModuleType], None]) -> None:
    """Call ``function`` with ``module`` as soon as it is imported, or now if it already is.

    This patches an expensive module without importing it in processes that do not use it.
    """
    if module in sys.modules:
        function(sys.modules[module])
    else:
        sys.meta_path.insert(0, _PostImportFinder(module, function))


def wrap_after_import(
    module: str, wrappers: Wrappers, *, put: Callable[[Any, str, Callable[..., Any]], None] = wrap_once
) -> None:
    """Wrap functions and methods of a module, each once, as soon as it is imported; or replace them.

    Args:
        module: dotted name.
        wrappers: what is wrapped.
        put: ``replace_everywhere`` for functions and classes in their place, which a second call replaces again.

    Raises:
        CannotRunError: at that import, naming the functions and arguments that are missing.
    """

    def wrap(_imported: ModuleType) -> None:
        needed = {f"{module}:{path}": arguments for path, (arguments, _) in wrappers.items()}
        require_attributes(module.partition(".")[0], needed)
        for path, (_, wrapper) in wrappers.items():
            owner, _, name = path.rpartition(".")
            put(resolve_name(f"{module}:{owner}"), name, wrapper)

    call_after_import(module, wrap)


class _PostImportFinder(MetaPathFinder):
    """Finds one module by the other finders, and calls a function after the module was executed."""

    def __init__(self, module: str, function: Callable[[ModuleType], None]) -> None:
        self.module, self.function, self.is_finding = module, function, False

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The spec of the module, whose loader then calls the function; None for other modules."""
        if fullname != self.module or self.is_finding:
            return None
        self.is_finding = True
        try:
            spec = find_spec(fullname)
        finally:
            self.is_finding = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                sys.meta_path.remove(self)
                self.function(module)

            vars(spec.loader)["exec_module"] = exec_module
        return spec


def _release(version: str) -> tuple[int, ...]:
    """The release of a version as numbers: (1, 16, 0) of "1.16.0.dev1"."""
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in release.group().split(".")) if release else ()
