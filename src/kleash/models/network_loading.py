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

NON_TEXT_PARTS = ("vision", "audio", "image", "video", "vq")
"""Words in the names of sub-configurations of models that read more than text."""


def load_networks(
    checkpoints: dict[str, Checkpoint],
    *,
    dtype: torch.dtype | str,
    device: torch.device,
    device_map: str | None,
    trust_remote_code: bool,
) -> tuple[dict[str, LoadedNetwork], tuple[str, ...]]:
    """Load the network of each role, in evaluation mode; checkpoints in one folder share it if adapters allow it.

    Args:
        checkpoints: by role.
        dtype: of the weights; "auto" for the checkpoint's own.
        device: where the networks run, without a ``device_map``.
        device_map: how transformers spreads a model over devices; None for ``device``.
        trust_remote_code: whether the checkpoint's own Python code may run.

    Returns:
        The networks by role, and notes on which bases are shared and which are loaded twice.

    Raises:
        ModelError: if a network cannot be loaded, is not a decoder-only text model, or lacks weights.
    """
    checkpoints_by_folder: dict[Path, dict[str, Checkpoint]] = {}
    for role, checkpoint in checkpoints.items():
        checkpoints_by_folder.setdefault(checkpoint.folder.resolve(), {})[role] = checkpoint
    networks: dict[str, LoadedNetwork] = {}
    notes: list[str] = []

    def load_base(role: str) -> BaseNetwork:
        network, base_notes = _load_base(checkpoints[role], role, dtype, device_map, trust_remote_code)
        if device_map is None:
            network.to(device)
        network.eval()
        return BaseNetwork(
            network=network, parameters=sum(p.numel() for p in network.parameters()), notes=base_notes
        )

    for checkpoints_of_folder in checkpoints_by_folder.values():
        networks_of_folder, note = load_over_one_base(checkpoints_of_folder, load_base)
        networks |= networks_of_folder
        notes += [note] if note else []
    has_adapters = any(checkpoint.adapter is not None for checkpoint in checkpoints.values())
    if len(checkpoints_by_folder) > 1 and has_adapters:
        notes.append("policy and reference have different bases, which are both loaded")
    return networks, tuple(notes)


def _load_base(
    checkpoint: Checkpoint,
    role: str,
    dtype: torch.dtype | str,
    device_map: str | None,
    trust_remote_code: bool,
) -> tuple[Any, tuple[str, ...]]:
    """Load a transformers network without adapters; also return notes on tensors that it does not use."""
    transformers = import_extra("transformers", "models")
    subject = f"the {role} {checkpoint.name}"
    check_config_sizes(subject, checkpoint.folder)
    try:
        config = transformers.AutoConfig.from_pretrained(
            checkpoint.folder, trust_remote_code=trust_remote_code
        )
        _check_decoder_only(config, subject)
        check_network_size(
            subject,
            checkpoint.folder,
            config,
            partial(transformers.AutoModelForCausalLM.from_config, trust_remote_code=trust_remote_code),
        )
        network, report = transformers.AutoModelForCausalLM.from_pretrained(
            checkpoint.folder,
            config=config,
            dtype=dtype,
            device_map=device_map,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported by _check_shapes instead
        )
    except ModelError:
        raise
    except Exception as error:  # the exception type depends on the configuration, down to AssertionError
        hint = "; add --trust-remote-code if you trust the code it brings" if "remote" in str(error) else ""
        raise ModelError(f"{subject} cannot be loaded: {summarise_error(error)}{hint}") from error
    _check_shapes(report, subject)
    missing_weights = sorted(report["missing_keys"])
    if missing_weights:
        raise ModelError(
            f"{subject} lacks {len(missing_weights)} of its weights, which would be random: "
            f"{', '.join(missing_weights[:3])}; fetch the checkpoint again, or save it whole"
        )
    unused_tensors = sorted(report["unexpected_keys"])
    if not unused_tensors:
        return network, ()
    return network, (
        f"{len(unused_tensors)} tensors of {subject} are not used by its architecture, such as {unused_tensors[0]}",
    )


def _check_shapes(report: Any, subject: str) -> None:
    """Check that the weights have the shapes of the configuration."""
    mismatches = sorted(report.get("mismatched_keys", ()))
    if mismatches:
        # transformers 5 reports each name with two shapes, transformers 4 names alone.
        name, *shapes = [mismatches[0]] if isinstance(mismatches[0], str) else mismatches[0]
        difference = ": {}, and not {}".format(*map(tuple, shapes)) if shapes else ""
        raise ModelError(
            f"{subject} has {len(mismatches)} weights of other shapes than its config.json says, such as "
            f"{name}{difference}; correct config.json, or fetch the checkpoint again"
        )


def _check_decoder_only(config: Any, subject: str) -> None:
    """Check that a configuration is of a decoder-only model that reads text alone."""
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(
            f"{subject} is an encoder-decoder ({config.model_type}); kleash measures decoder-only models"
        )
    sub_configs = sorted(getattr(config, "sub_configs", {}))
    non_text_parts = [name for name in sub_configs if any(part in name for part in NON_TEXT_PARTS)]
    if non_text_parts:
        raise ModelError(
            f"{subject} is a multi-modal model ({config.model_type}, with {', '.join(non_text_parts)}); kleash "
            "measures models of text alone"
        )
