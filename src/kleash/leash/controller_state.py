"""Saving and restoring beta controllers, a mutable wrapper around one, and explanations of their steps."""

import math
import warnings
from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any, SupportsFloat

from kleash.errors import OptionError
from kleash.leash.controller_base import TargetController
from kleash.leash.controllers import DualBeta, FixedBeta, Leash, PIDBeta, ZieglerBeta
from kleash.registry import look_up

STATE_FIELDS = ("beta", "levels", "variance", "noise", "event")
"""The fields of a controller that measurements change; the others are its configuration."""

CONTROLLERS: Mapping[str, type[Leash]] = MappingProxyType(
    {controller.kind: controller for controller in (FixedBeta, ZieglerBeta, PIDBeta, DualBeta)}
)
"""Name -> class: what ``kind`` in a dict may be."""


def beta_from_dict(record: Mapping[str, Any]) -> Leash:
    """Restore a controller from its ``to_dict``; it continues exactly where the saved one was.

    Args:
        record: ``kind`` and the fields of that controller, for example from JSON or a configuration file. Missing
            fields have their defaults.

    Raises:
        UnknownNameError: if there is no such kind.
        OptionError: if the kind or a required field is missing, a field is unknown, or a value is out of its range.
    """
    if "kind" not in record:
        raise OptionError(f"the dict of a controller has no kind; there are {', '.join(CONTROLLERS)}")
    controller_class: Any = look_up(CONTROLLERS, record["kind"], "beta controller")
    values = {name: value for name, value in record.items() if name != "kind"}
    field_names = {field.name for field in fields(controller_class)}
    if unknown_names := values.keys() - field_names:
        raise OptionError(
            f"{controller_class.__name__} has no {', '.join(sorted(unknown_names))}; it has "
            f"{', '.join(sorted(field_names))}"
        )
    try:
        if "levels" in values:
            values["levels"] = tuple(values["levels"])
        return controller_class(**values)
    except TypeError as error:
        raise OptionError(
            f"fields of {controller_class.__name__} are missing, or no numbers: {error}; give them"
        ) from error


def controller_of(
    settings: Mapping[str, Any],
    options: Mapping[str, Any] = MappingProxyType({}),
    *,
    framework: str = "kleash",
) -> Leash:
    """The controller of a job's or another framework's settings, and of further options of its user.

    Args:
        settings: ``kind`` and others; those that are no field of the controller do nothing.
        options: fields of the controller. Of the settings, ``horizon`` alone may be among them.
        framework: whose settings they are, for errors.

    Raises:
        UnknownNameError, OptionError: as ``beta_from_dict``; or if an option is one that the framework sets.
    """
    duplicates = sorted(settings.keys() & options.keys() - {"horizon"})
    if duplicates:
        raise OptionError(f"{framework} sets {', '.join(duplicates)}; leave it out of the controller")
    record = {**settings, **options}
    controller_class: Any = look_up(CONTROLLERS, record.get("kind"), "beta controller")
    names = {"kind", *options, *(field.name for field in fields(controller_class))}
    return beta_from_dict({name: value for name, value in record.items() if name in names})


def with_state(leash: Leash, saved: Mapping[str, Any]) -> Leash:
    """The controller with the beta and the measured levels of a saved one; bounds, target and gains are its own.

    A beta outside these bounds is the nearest within. A fixed beta is not restored, and neither are levels that were
    measured in another unit.

    Args:
        leash: the controller.
        saved: the result of ``to_dict`` of the saved one, or an empty mapping.
    """
    if isinstance(leash, FixedBeta):
        return leash
    settings = leash.to_dict()
    if saved.get("per") == leash.per:
        settings |= {name: saved[name] for name in STATE_FIELDS if name in saved}
    # NaN stays, and is refused
    settings["beta"] = min(max(saved.get("beta", leash.beta), leash.beta_min), leash.beta_max)
    return beta_from_dict(settings)


class StatefulController:
    """A mutable wrapper around a beta controller, for frameworks that keep one object and update it in place.

    The controllers of kleash are immutable: ``after`` returns the next one. ``leash`` is the current one. By PyTorch's
    names of the state, checkpoints can hold it: ``accelerator.register_for_checkpointing(controller)``.
    """

    def __init__(self, leash: Leash) -> None:
        """Start with ``leash``."""
        self.leash = leash

    @property
    def value(self) -> float:
        """The current beta: nats of reward paid for one nat of KL."""
        return self.leash.beta

    def update(
        self, current_kl: SupportsFloat, n_steps: int, standard_error: SupportsFloat | None = None
    ) -> None:
        """Replace ``leash`` by the controller for the next update; the arguments have verl's names.

        Args:
            current_kl: the measured KL in nats, in the unit of ``leash.per``.
            n_steps: the number of sequences that it was measured on.
            standard_error: of the KL, in nats; None if it is not known.
        """
        self.leash = self.leash.after(current_kl, sequences=n_steps, standard_error=standard_error)

    def state_dict(self) -> dict[str, Any]:
        """The settings and state of ``leash``, as its ``to_dict``."""
        return self.leash.to_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore beta and the measured levels, as ``with_state``; warn if nothing was saved of what moves.

        Args:
            state_dict: the result of ``state_dict()``, or an empty mapping.
        """
        if not state_dict and not isinstance(self.leash, FixedBeta):
            warnings.warn(
                f"the checkpoint has no state of a KL controller, so it begins anew at {self.value}",
                stacklevel=2,
            )
        self.leash = with_state(self.leash, state_dict)


def beta_reason(before: Leash, after: Leash, measured_nats: SupportsFloat) -> str | None:
    """Explain why ``before.after(measured_nats)`` has another beta, with the numbers; None if it has not.

    ::

        beta 0.05 -> 0.0743: KL 5.18 is below its target of 8, and rises
        beta 0.21 -> 0.2157: KL 6.4 (filtered 8.81) is above its target of 8, and comes down

    Args:
        before: the controller whose ``after`` was called.
        after: the controller that it returned.
        measured_nats: the KL.
    """
    if after.beta == before.beta:
        return None
    kl_nats, target = float(measured_nats), before.target_nats
    assert target is not None, "a beta without a target does not change"
    newest, earlier = _filtered_nats(after), _filtered_nats(before)
    filtered = kl_nats if newest is None else newest
    note = (
        "" if math.isclose(filtered, kl_nats, rel_tol=0.005, abs_tol=1e-6) else f" (filtered {filtered:.3g})"
    )
    position = "above" if filtered > target else "below" if filtered < target else "at"
    factor = f", {filtered / target:.2g} times" if filtered > 1.2 * target else ""
    trend = ""
    if earlier is not None and not math.isclose(filtered, earlier, rel_tol=1e-9):
        trend = ", and rises" if filtered > earlier else ", and comes down"
    change = f"beta {before.beta:.4g} -> {after.beta:.4g}"
    return f"{change}: KL {kl_nats:.3g}{note} is {position} its target of {target:g}{factor}{trend}"


def _filtered_nats(leash: Leash) -> float | None:
    """The filtered KL of a controller; None if it keeps none."""
    levels = leash.levels if isinstance(leash, TargetController) else ()
    return math.exp(levels[0]) if levels else None
