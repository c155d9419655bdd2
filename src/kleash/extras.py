"""Importing what only some installations have."""

from importlib import import_module
from types import ModuleType

from kleash.errors import MissingExtraError


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
