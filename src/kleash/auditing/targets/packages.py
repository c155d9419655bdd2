"""Audited packages: how to install, import and version them, with stand-ins for missing unused dependencies."""

import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import MappingProxyType, ModuleType
from typing import Any

from kleash import dotted
from kleash.extras import is_installed

INSTALL_COMMANDS = MappingProxyType(
    {
        "trl": "pip install trl",
        "verl": (
            "pip install --no-deps verl && pip install accelerate cachetools codetiming datasets hydra-core orjson "
            "ray tensordict torchdata transformers"
        ),
        "openrlhf": "pip install --no-deps openrlhf && pip install datasets peft ray transformers",
        "liger_kernel": "pip install liger-kernel",
    }
)
"""Package -> the command that installs it; ``--no-deps`` where its pins conflict with other packages."""


def import_target(name: str) -> ModuleType:
    """The module called ``name``.

    Raises:
        MissingExtraError: if its package, or one that it imports, is not installed.
        UnknownNameError: if the package has no such module.
        CannotRunError: if importing the module raises.
    """
    return dotted.import_by_name(name, INSTALL_COMMANDS)


def version_of(package: str) -> dict[str, str]:
    """The package with the version of its installed distribution; empty for a file that belongs to none."""
    try:
        return {package: metadata.version(package)}
    except metadata.PackageNotFoundError:
        return {}


@contextmanager
def stand_ins(packages: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Make those of ``packages`` that are not installed importable inside the context.

    They are empty modules, from which an empty class of any name can be imported. They are removed from
    ``sys.modules`` on exit, so that they cannot be taken for installed packages.

    Yields:
        The packages that are not installed.
    """
    missing = tuple(name for name in packages if not is_installed(name))
    finder = StandInFinder(missing)
    sys.meta_path.append(finder)
    try:
        yield missing
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name, module in sys.modules.items() if isinstance(module, StandIn)]:
            del sys.modules[name]


class StandIn(ModuleType):
    """An empty module that has an empty class of any name, which can be inherited from."""

    def __getattr__(self, name: str) -> type:
        """A class of this name."""
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__module__": self.__name__})


@dataclass(frozen=True, eq=False)
class StandInFinder(MetaPathFinder, Loader):
    """Finds an empty module for every module of some packages."""

    packages: Sequence[str]

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """A package, so that its submodules are looked up as well."""
        if fullname.partition(".")[0] not in self.packages:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module empty."""
        module.__class__ = StandIn


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress warnings and log messages of imported packages inside the context."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
