"""Loading networks from checkpoints, with checks of their configuration and weights."""

from functools import partial
from pathlib import Path
from typing import Any

import torch

from kleash.errors import ModelError
from kleash.extras import import_extra
from kleash.models.adapters.shared_base import BaseNetwork, LoadedNetwork, load_over_one_base
from kleash.models.checkpoints.config_checks import check_config_sizes, check_network_size
from kleash.models.checkpoints.resolution import Checkpoint
from kleash.models.compat import summarise_error

OTHER_SENSES = ("vision", "audio", "image", "video", "vq")
"""What the parts of a configuration are called where a model is not of text alone."""


def load_networks(
    sides: dict[str, Checkpoint],
    *,
    dtype: torch.dtype | str,
    device: torch.device,
    device_map: str | None,
    trust_remote_code: bool,
) -> tuple[dict[str, LoadedNetwork], tuple[str, ...]]:
    """The network of each side, in evaluation mode, and notes about what is in memory once and what twice.

    PairReaders over one folder share its network, unless an adapter changes it (``load_over_one_base``).

    Raises:
        ModelError: if one cannot be loaded, is no decoder-only text model, or lacks weights.
    """
    folders: dict[Path, dict[str, Checkpoint]] = {}
    for role, side in sides.items():
        folders.setdefault(side.folder.resolve(), {})[role] = side
    loaded: dict[str, LoadedNetwork] = {}
    notes: list[str] = []
    for over in folders.values():

        def base(role: str) -> BaseNetwork:
            network, said = _load_base(sides[role], role, dtype, device_map, trust_remote_code)
            if device_map is None:
                network.to(device)
            network.eval()
            return BaseNetwork(
                network=network, parameters=sum(p.numel() for p in network.parameters()), notes=said
            )

        networks, note = load_over_one_base(over, base)
        loaded |= networks
        notes += [note] if note else []
    if len(folders) > 1 and any(side.adapter is not None for side in sides.values()):
        notes.append("policy and reference have different bases, which are both loaded")
    return loaded, tuple(notes)


def _load_base(
    side: Checkpoint, role: str, dtype: torch.dtype | str, device_map: str | None, trust_remote_code: bool
) -> tuple[Any, tuple[str, ...]]:
    transformers = import_extra("transformers", "models")
    what = f"the {role} {side.name}"
    check_config_sizes(what, side.folder)
    try:
        config = transformers.AutoConfig.from_pretrained(side.folder, trust_remote_code=trust_remote_code)
        _check_kind(config, what)
        check_network_size(
            what,
            side.folder,
            config,
            partial(transformers.AutoModelForCausalLM.from_config, trust_remote_code=trust_remote_code),
        )
        network, report = transformers.AutoModelForCausalLM.from_pretrained(
            side.folder,
            config=config,
            dtype=dtype,
            device_map=device_map,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # not ignored, but named below
        )
    except ModelError:
        raise
    except Exception as error:  # a configuration decides what is raised, down to AssertionError
        hint = "; add --trust-remote-code if you trust the code it brings" if "remote" in str(error) else ""
        raise ModelError(f"{what} cannot be loaded: {summarise_error(error)}{hint}") from error
    _check_shapes(report, what)
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(
            f"{what} lacks {len(missing)} of its weights, which would be random: {', '.join(missing[:3])}; "
            "fetch the checkpoint again, or save it whole"
        )
    unused = sorted(report["unexpected_keys"])
    if not unused:
        return network, ()
    return network, (
        f"{len(unused)} tensors of {what} are not used by its architecture, such as {unused[0]}",
    )


def _check_shapes(report: Any, what: str) -> None:
    """Check that the weights have the shapes of the configuration."""
    others = sorted(report.get("mismatched_keys", ()))
    if others:
        # transformers 5 tells the shapes with each name, 4 the names alone.
        name, *shapes = [others[0]] if isinstance(others[0], str) else others[0]
        told = ": {}, and not {}".format(*map(tuple, shapes)) if shapes else ""
        raise ModelError(
            f"{what} has {len(others)} weights of other shapes than its config.json says, such as {name}{told}; "
            "mend config.json, or fetch the checkpoint again"
        )


def _check_kind(config: Any, what: str) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(
            f"{what} is an encoder-decoder ({config.model_type}); kleash measures decoder-only models"
        )
    parts = sorted(getattr(config, "sub_configs", {}))
    other = [name for name in parts if any(sense in name for sense in OTHER_SENSES)]
    if other:
        raise ModelError(
            f"{what} is a multi-modal model ({config.model_type}, with {', '.join(other)}); kleash measures "
            "models of text alone"
        )
