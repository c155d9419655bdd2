"""Controllers by name, to be written down and read again."""

from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any

from kleash.errors import OptionError
from kleash.leash.controllers import DualBeta, FixedBeta, Leash, ZieglerBeta
from kleash.leash.pid import PIDBeta
from kleash.leash.schedules import BetaSchedule, TargetSchedule
from kleash.registry import look_up

CONTROLLERS: Mapping[str, type[Leash]] = MappingProxyType(
    {one.kind: one for one in (FixedBeta, ZieglerBeta, PIDBeta, DualBeta, BetaSchedule, TargetSchedule)}
)
"""Name -> class: what ``kind`` in a dict may be."""


def beta_from_dict(record: Mapping[str, Any]) -> Leash:
    """The controller that ``to_dict`` wrote down: it goes on as if it had never been stopped.

    Args:
        record: ``kind`` and the fields of that controller, such as ``json.loads`` gives them. Fields left out
            have their defaults; so a configuration file may name a controller this way.

    Raises:
        UnknownNameError: if there is no such kind.
        OptionError: if there is no kind, a field is unknown or missing, or a number means nothing.
    """
    if "kind" not in record:
        raise OptionError(f"the dict of a controller has no kind; there are {', '.join(CONTROLLERS)}")
    chosen: Any = look_up(CONTROLLERS, record["kind"], "beta controller")
    given = {name: value for name, value in record.items() if name != "kind"}
    known = {field.name for field in fields(chosen)}
    if not given.keys() <= known:
        unknown = ", ".join(sorted(given.keys() - known))
        raise OptionError(f"{chosen.__name__} has no {unknown}; it has {', '.join(sorted(known))}")
    if "levels" in given:
        given["levels"] = tuple(given["levels"])
    if "controller" in given:
        given["controller"] = beta_from_dict(given["controller"])
    try:
        return chosen(**given)
    except TypeError as error:
        raise OptionError(f"{chosen.__name__} is not all there: {error}; give what is missing") from error
