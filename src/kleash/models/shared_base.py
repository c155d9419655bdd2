"""Policy and reference over one base, which is shared if attaching adapters leaves it bit for bit unchanged."""

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from kleash.checkpoints.quantised.packed_modules import PackedModule
from kleash.checkpoints.resolution import Checkpoint
from kleash.models.adapters import (
    attach_adapter,
    check_acts_by_weights,
    check_adapter,
    describe_unknown_settings,
    make_probe,
    probe_logits,
    reason_not_to_share,
    trained_token_ids,
)
from kleash.models.heads import has_tied_embeddings
from kleash.models.sharded_networks import ShardStorage
from kleash.precision import bitwise_equal
from kleash.registry import grouped

CHUNK_BYTES = 1 << 25
"""Bytes of a tensor per checksum step; a step takes four times this in memory."""


@dataclass(frozen=True, eq=False, kw_only=True)
class LoadedNetwork:
    """A network as loaded from its files, with the adapter that its role activates."""

    network: Any
    """Without PEFT's wrapper."""
    parameters: int
    """Number of parameters of the network and the adapter."""
    notes: tuple[str, ...] = ()
    packed: tuple[PackedModule, ...] = ()
    """The modules that were unpacked."""
    storage: ShardStorage | None = None
    """The ranks of whose shards the network is a view; None for a whole network."""
    adapters: Any = None
    """The PEFT model around the network; None if no role has an adapter on it."""
    adapter: str | None = None
    """Name of this role's adapter in the PEFT model; None for the base."""


class _ChangedBaseError(Exception):
    """An adapter changes its base, or the output of another adapter on it."""


def load_over_one_base(
    checkpoints: Mapping[str, Checkpoint], load_base: Callable[[Checkpoint], LoadedNetwork]
) -> tuple[dict[str, LoadedNetwork], str]:
    """Load checkpoints that have the same base, with the base in memory once if it can be shared.

    The base is shared if every tensor of it, and its logits for a probe with all adapters disabled, are bit for bit
    the same before and after attaching the adapters, and if no adapter changes the output of another. Otherwise the
    base is loaded once for each distinct adapter.

    Args:
        checkpoints: by role.
        load_base: loads the base of a checkpoint, in evaluation mode.

    Returns:
        The networks by role, and a note on how often the base is in memory ("" for a single adapter or base).

    Raises:
        ModelError: if an adapter cannot be attached to its base, or is of a kind that cannot be measured.
    """
    adapters = [checkpoint for checkpoint in checkpoints.values() if checkpoint.adapter is not None]
    for checkpoint in adapters:
        check_adapter(checkpoint)
    reason = reason_not_to_share(adapters)
    roles_by_adapter = _roles_by_adapter(checkpoints)
    if len(roles_by_adapter) == 1:
        return _load_on_one_base(checkpoints, load_base), ""
    if reason is None:
        relation = "two adapters over one base" if len(adapters) > 1 else "an adapter and its base"
        try:
            networks = _load_on_one_base(checkpoints, load_base)
        except _ChangedBaseError as error:
            reason = str(error)
        else:
            return networks, f"policy and reference are {relation}, which is loaded once and switched"
        gc.collect()  # the discarded PEFT model has reference cycles
    networks = {}
    for roles in roles_by_adapter.values():
        networks |= _load_on_one_base({role: checkpoints[role] for role in roles}, load_base)
    parameters = networks[next(iter(checkpoints))].network.parameters()
    size = sum(p.numel() * p.element_size() for p in parameters)
    times = f"{len(roles_by_adapter)} times ({len(roles_by_adapter)} x {size / 1e9:.3g} GB)"
    return networks, f"policy and reference have one base, which is in memory {times}, since {reason}"


def _roles_by_adapter(checkpoints: Mapping[str, Checkpoint]) -> dict[Path | None, list[str]]:
    """The roles that use each adapter folder; None stands for the base."""
    return grouped(
        (None if checkpoint.adapter is None else checkpoint.adapter.resolve(), role)
        for role, checkpoint in checkpoints.items()
    )


def _load_on_one_base(
    checkpoints: Mapping[str, Checkpoint], load_base: Callable[[Checkpoint], LoadedNetwork]
) -> dict[str, LoadedNetwork]:
    """Load one base and attach the adapters of all these checkpoints to it.

    Raises:
        _ChangedBaseError: if an adapter changes the base, or the output of another.
    """
    roles_by_adapter = _roles_by_adapter(checkpoints)
    base = load_base(next(iter(checkpoints.values())))
    network = base.network
    is_tied = has_tied_embeddings(network)
    probe = make_probe(network, trained_token_ids(checkpoints.values()))
    logits: dict[str | None, Tensor] = {}
    tensors: list[tuple[str, Tensor, int]] = []
    if len(roles_by_adapter) > 1:
        logits[None] = probe_logits(network, probe)
        tensors += [
            (name, tensor, _checksum(tensor))
            for name, tensor in (*network.named_parameters(), *network.named_buffers())
        ]
    wrapper: Any = None
    networks: dict[str, LoadedNetwork] = {}
    for folder, (role, *other_roles) in roles_by_adapter.items():
        checkpoint = checkpoints[role]
        loaded = base
        if folder is not None:
            wrapper = attach_adapter(network, wrapper, checkpoint)
            notes = describe_unknown_settings(checkpoint)
            check_acts_by_weights(wrapper, network, checkpoint, probe, tied=is_tied)
            if logits:
                _check_tensors(network, tensors, checkpoint)
                _check_logits(wrapper, network, probe, logits, checkpoint)
                logits[role] = probe_logits(network, probe)
            loaded = replace(
                base,
                adapter=role,
                parameters=base.parameters + sum(x.elements for x in checkpoint.adapter_tensors.values()),
                notes=(*base.notes, *notes),
            )
        networks |= dict.fromkeys((role, *other_roles), loaded)
    return {role: replace(networks[role], adapters=wrapper) for role in checkpoints}


def _check_tensors(network: Any, tensors: list[tuple[str, Tensor, int]], checkpoint: Checkpoint) -> None:
    """Check that every tensor of a base is there as it was before the adapter of a checkpoint was attached.

    Args:
        network: the base.
        tensors: name, parameter or buffer itself, and its checksum before.
        checkpoint: of the adapter.

    Raises:
        _ChangedBaseError: naming one that is not, or that is on the meta device and cannot be read.
    """
    present = {id(tensor) for tensor in (*network.parameters(), *network.buffers())}
    for name, tensor, before in tensors:
        if tensor.is_meta or id(tensor) not in present or _checksum(tensor) != before:
            raise _ChangedBaseError(f"the adapter {checkpoint.name} changes {name} of its base")


def _checksum(tensor: Tensor) -> int:
    """A 64-bit checksum of a tensor's bytes, computed on its device; 0 on the meta device.

        sum over i of x_i (2 i + 1)   mod 2^64

    x are the bytes as 64-bit integers. One changed integer always changes the checksum, and so do two that are swapped.
    """
    if tensor.is_meta:
        return 0
    flat, total = tensor.detach().reshape(-1).contiguous().view(torch.uint8), 0
    for start in range(0, flat.numel(), CHUNK_BYTES):
        part = flat[start : start + CHUNK_BYTES]
        numbers = torch.nn.functional.pad(part, (0, -len(part) % 8)).clone().view(torch.int64)
        places = torch.arange(start // 8, start // 8 + len(numbers), device=tensor.device)
        total += int((numbers * (2 * places + 1)).sum())
    return total % 2**64


def _check_logits(
    wrapper: Any,
    network: Any,
    probe: Int[Tensor, "rows time"],
    logits: Mapping[str | None, Tensor],
    checkpoint: Checkpoint,
) -> None:
    """Check that the last adapter changed neither the base nor the logits of the adapters attached before it.

    Afterwards the last adapter is active again.

    Args:
        wrapper: the PEFT model.
        network: its base.
        probe: token ids.
        logits: for the probe before, by adapter; None for the base.
        checkpoint: of the last adapter.

    Raises:
        _ChangedBaseError: naming the adapter and the change.
    """
    active = wrapper.active_adapter
    for name, before in logits.items():
        if name is None:
            with wrapper.disable_adapter():
                after = probe_logits(network, probe)
        else:
            wrapper.set_adapter(name)
            after = probe_logits(network, probe)
        if not bitwise_equal(before, after):
            what = "the logits of its base" if name is None else "what another adapter on its base gives"
            raise _ChangedBaseError(f"the adapter {checkpoint.name} changes {what}")
    wrapper.set_adapter(active)
