"""Proof that a network whose adapters are switched off is bit for bit the network that it was without them."""

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kleash.models.adapters.network_state import NetworkState, logits_of, same_bits, state_of
from kleash.models.adapters.peft_adapters import (
    _adapter_parameters,
    _check_acts_on_weights,
    _put_on,
    _special_tokens,
    _tied,
    adapter_settings,
)
from kleash.models.adapters.rules import Settings, is_plain, rule_of
from kleash.models.checkpoints.resolution import Checkpoint

UNITS = {"GB": 1e9, "MB": 1e6, "kB": 1e3}


@dataclass(frozen=True, eq=False, kw_only=True)
class Base:
    """A network as its folder holds it."""

    network: Any
    parameters: int
    notes: tuple[str, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class Loaded:
    """A network as one side sees it."""

    network: Any
    adapters: Any
    """The PEFT model around it; None where no side has an adapter on it."""
    adapter: str | None
    """The name of this side's adapter in it; None for the base."""
    parameters: int
    notes: tuple[str, ...]


class _ChangedBaseError(Exception):
    """An adapter that cannot share the base it was put on."""


def networks_over_one_base(
    sides: Mapping[str, Checkpoint], load_base: Callable[[str], Base]
) -> tuple[dict[str, Loaded], str]:
    """The networks of sides that have one base, and a note about how often that is in memory.

    The base is shared where every tensor of it, and its logits for a probe with all adapters switched off, are bit for
    bit what they were before, and where no adapter changes what another gives. Otherwise each side loads it anew.

    Args:
        sides: by role.
        load_base: loads the base for the role, in evaluation mode.

    Raises:
        ModelError: if an adapter cannot be put on its base, or is of a kind that cannot be measured.
    """
    settings = {
        role: adapter_settings(side, role) for role, side in sides.items() if side.adapter is not None
    }
    distinct = _distinct(sides)
    if len(distinct) == 1:
        return _together(sides, load_base), ""
    reason = _static_reason(sides, settings)
    if reason is None:
        what = "two adapters over one base" if len(settings) > 1 else "an adapter and its base"
        try:
            loaded = _together(sides, load_base)
        except _ChangedBaseError as changed:
            reason = str(changed)
        else:
            return loaded, f"policy and reference are {what}, which is loaded once and switched"
        gc.collect()  # what was put on in vain holds itself in circles
    loaded = {}
    for roles in distinct.values():
        loaded |= _together({role: sides[role] for role in roles}, load_base)
    size = sum(p.numel() * p.element_size() for p in loaded[next(iter(sides))].network.parameters())
    times = f"{len(distinct)} times ({len(distinct)} x {_in_words(size)})"
    return loaded, f"policy and reference have one base, which is in memory {times}, since {reason}"


def _distinct(sides: Mapping[str, Checkpoint]) -> dict[Path | None, list[str]]:
    """Roles by the adapter that they have."""
    roles: dict[Path | None, list[str]] = {}
    for role, side in sides.items():
        roles.setdefault(None if side.adapter is None else side.adapter.resolve(), []).append(role)
    return roles


def _static_reason(sides: Mapping[str, Checkpoint], settings: Mapping[str, Settings]) -> str | None:
    """Why a base cannot be shared, as far as the settings of the adapters show it."""
    for role, one in settings.items():
        rule = rule_of(one)
        if rule is not None:
            return f"the adapter {sides[role].name} {rule.reason}"
    if len(settings) > 1:
        for role, one in settings.items():
            if not is_plain(one):
                return f"the adapter {sides[role].name} is no plain LoRA, of which a base can carry several"
    return None


def _together(sides: Mapping[str, Checkpoint], load_base: Callable[[str], Base]) -> dict[str, Loaded]:
    """The networks of these sides on one base.

    Raises:
        _ChangedBaseError: if one adapter changes the base, or what another gives.
    """
    distinct = _distinct(sides)
    base = load_base(next(iter(sides)))
    network, tied = base.network, _tied(base.network)
    before = state_of(network, _special_tokens(sides)) if len(distinct) > 1 else None
    wrapper: Any = None
    names: dict[Path | None, str] = {}
    alone: dict[str, Any] = {}
    for folder, roles in distinct.items():
        if folder is None:
            continue
        side, role = sides[roles[0]], roles[0]
        wrapper = _put_on(network, wrapper, side, role)
        wrapper.eval()
        names[folder] = role
        _check_acts_on_weights(wrapper, network, side, role, tied)
        if before is not None:
            _check_unchanged(before, wrapper, network, side, alone)
            alone[role] = logits_of(network, before.probe)
    loaded = {}
    for role, side in sides.items():
        name = None if side.adapter is None else names[side.adapter.resolve()]
        loaded[role] = Loaded(
            network=network,
            adapters=wrapper,
            adapter=name,
            parameters=base.parameters + _adapter_parameters(side),
            notes=base.notes,
        )
    return loaded


def _check_unchanged(
    before: NetworkState, wrapper: Any, network: Any, side: Checkpoint, alone: Mapping[str, Any]
) -> None:
    """See that the base, and the adapters that were there before, give what they gave; the new one is active after.

    Raises:
        _ChangedBaseError: if not.
    """
    active = wrapper.active_adapter
    with wrapper.disable_adapter():
        logits = logits_of(network, before.probe)
    change = before.change(network, logits)
    for other, logits in alone.items():
        wrapper.set_adapter(other)
        if change is None and not same_bits(logits_of(network, before.probe), logits):
            change = "changes what another adapter on its base gives"
    wrapper.set_adapter(active)
    if change is not None:
        raise _ChangedBaseError(f"the adapter {side.name} {change}")


def _in_words(size_bytes: int) -> str:
    unit = next((unit for unit, size in UNITS.items() if size_bytes >= size), "kB")
    return f"{size_bytes / UNITS[unit]:.3g} {unit}"
