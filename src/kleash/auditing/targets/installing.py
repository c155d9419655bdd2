"""How to install what is audited, and how to import what is not wholly installed."""

import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import MappingProxyType, ModuleType
from typing import Any

from kleash.errors import CannotRunError

INSTALLATIONS = MappingProxyType(
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
"""The line that installs each package that is audited by name; ``--no-deps`` where its pins keep others out."""


@contextmanager
def stand_ins(packages: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """While it is open, those of ``packages`` that are not installed can be imported all the same.

    What is imported is an empty module: any name can be taken from it, and using one raises. All
    of them are taken out of ``sys.modules`` again, so that nobody else takes them for installed.

    Yields:
        Those that are not installed.
    """
    absent = tuple(name for name in packages if not is_installed(name))
    finder = StandInFinder(absent)
    sys.meta_path.append(finder)
    try:
        yield absent
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name, module in sys.modules.items() if isinstance(module, StandIn)]:
            del sys.modules[name]


def is_installed(package: str) -> bool:
    """Whether any finder knows the package, without importing it."""
    return package in sys.modules or any(
        finder.find_spec(package, None) is not None
        for finder in sys.meta_path
        if hasattr(finder, "find_spec")
    )


class StandIn(ModuleType):
    """An empty module that gives out a class for any name."""

    def __getattr__(self, name: str) -> type:
        """Something that can be named and inherited from, and not used."""
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (Unusable,), {"__module__": self.__name__})


class Unusable:
    """What a stand-in gives out."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Say what is missing.

        Raises:
            CannotRunError: always.
        """
        package = type(self).__module__.partition(".")[0]
        raise CannotRunError(
            f"{type(self).__module__}.{type(self).__name__} is needed here; install {package}"
        )


class StandInFinder(MetaPathFinder, Loader):
    """Finds an empty module for everything inside the packages that are not installed."""

    def __init__(self, packages: Sequence[str]) -> None:
        """Stand in for ``packages``."""
        self.packages = packages

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """A package, so that anything below it is found as well."""
        if fullname.partition(".")[0] not in self.packages:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """An empty module."""
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


@contextmanager
def quiet() -> Iterator[None]:
    """While it is open, what other people's packages warn of and log while they are imported is not heard."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
