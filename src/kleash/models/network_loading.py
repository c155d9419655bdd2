"""Loading networks from checkpoints, with checks of their configuration and weights."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from kleash.errors import CannotRunError, ModelError, summarise_error
from kleash.extras import import_extra
from kleash.models.adapters.shared_base import BaseNetwork, LoadedNetwork, load_over_one_base
from kleash.models.checkpoints.config_checks import check_config_sizes, check_network_size
from kleash.models.checkpoints.files import (
    check_repeated_tensors,
    list_weight_files,
    read_safetensors_header,
)
from kleash.models.checkpoints.resolution import Checkpoint
from kleash.models.compat import run_uncompiled, use_exact_experts
from kleash.models.gguf.network import load_gguf_network
from kleash.models.quantised.packed_formats import PackedCheckpoint, find_packed_modules
from kleash.models.quantised.transformers_formats import (
    check_stored_types,
    check_unused_parts,
    describe_quantisation,
    explain_refusal,
    has_kernels,
    is_packed,
)
from kleash.models.quantised.unpacking import load_unpacked_network
from kleash.models.text_towers import (
    NetworkClass,
    has_other_parts,
    is_of_other_part,
    list_network_classes,
    needs_other_parts,
)

PARALLEL_MAPS = {"fsdp": "fsdp_size", "tensor": "tp_size"}
"""Device maps that spread a model over the ranks of torch.distributed, and transformers' name of their number."""


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
        device_map: how transformers spreads a model over devices, or one of ``PARALLEL_MAPS``; None for ``device``.
        trust_remote_code: whether the checkpoint's own Python code may run.

    Returns:
        The networks by role, and notes on which bases are shared and which are loaded twice.

    Raises:
        ModelError: if a network cannot be loaded, is not a decoder-only model, or lacks weights.
    """
    checkpoints_by_folder: dict[tuple[Path, ...], dict[str, Checkpoint]] = {}
    for role, checkpoint in checkpoints.items():
        files = tuple(path.resolve() for path in checkpoint.gguf or (checkpoint.folder,))
        checkpoints_by_folder.setdefault(files, {})[role] = checkpoint
    networks: dict[str, LoadedNetwork] = {}
    notes: list[str] = []

    def load_base(role: str) -> BaseNetwork:
        checkpoint = checkpoints[role]
        if device_map in PARALLEL_MAPS:
            _require_ranks(checkpoint, role, device_map)
        if checkpoint.gguf:
            network, base_notes = load_gguf_network(
                checkpoint.gguf, f"the {role} {checkpoint.name}", dtype=dtype, device_map=device_map
            )
            parameters = _count(network)
        else:
            network, base_notes, parameters = _load_base(
                checkpoint, role, dtype, device, device_map, trust_remote_code
            )
        if device_map is None:
            network.to(device)
        network.eval()
        if network.dtype == torch.float64:
            use_exact_experts(network)
        return BaseNetwork(network=network, parameters=parameters, notes=base_notes)

    for checkpoints_of_folder in checkpoints_by_folder.values():
        networks_of_folder, note = load_over_one_base(checkpoints_of_folder, load_base)
        networks |= networks_of_folder
        notes += [note] if note else []
    has_adapters = any(checkpoint.adapter is not None for checkpoint in checkpoints.values())
    if len(checkpoints_by_folder) > 1 and has_adapters:
        notes.append("policy and reference have different bases, which are both loaded")
    return networks, tuple(notes)


def _require_ranks(checkpoint: Checkpoint, role: str, device_map: str) -> None:
    """Check that a checkpoint can be spread over the ranks of torch.distributed.

    Raises:
        CannotRunError: if there are no ranks, or transformers is too old.
        ModelError: if it is an adapter.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        raise CannotRunError(
            f"--device-map {device_map} spreads a model over the processes of torchrun … -m kleash measure, and this "
            "is one process; start several, or take another --device-map"
        )
    if checkpoint.adapter is not None or checkpoint.gguf:
        kind = "an adapter" if checkpoint.adapter is not None else "a GGUF file"
        raise ModelError(
            f"the {role} {checkpoint.name} is {kind}, which --device-map {device_map} does not take; merge or convert "
            "it into a folder of safetensors"
        )
    import_extra("transformers.distributed.configuration_utils", "models")


def _placement(device_map: str | None) -> dict[str, Any]:
    """The arguments of ``from_pretrained`` that say where the weights are."""
    if device_map not in PARALLEL_MAPS:
        return {"device_map": device_map}
    configuration = import_extra("transformers.distributed.configuration_utils", "models").DistributedConfig
    size = {PARALLEL_MAPS[device_map]: torch.distributed.get_world_size()}
    return {"distributed_config": configuration(**size)}


def _count(network: Any) -> int:
    """The number of a network's parameters."""
    return sum(parameter.numel() for parameter in network.parameters())


def _find_unpacked(
    checkpoint: Checkpoint, subject: str, device: torch.device, device_map: str | None
) -> PackedCheckpoint | None:
    """The packed modules of a checkpoint that is unpacked when it is loaded; None for any other.

    Raises:
        ModelError: if they are damaged, or would have to be spread over ranks.
    """
    if has_kernels(checkpoint.folder, device):
        return None
    packed = find_packed_modules(checkpoint.folder, subject)
    if packed is not None and device_map in PARALLEL_MAPS:
        raise ModelError(
            f"{subject} is quantised ({packed.method}) and unpacked when it is loaded, which --device-map {device_map} "
            "does not take; save it dequantised"
        )
    return packed


def _load_base(
    checkpoint: Checkpoint,
    role: str,
    dtype: torch.dtype | str,
    device: torch.device,
    device_map: str | None,
    trust_remote_code: bool,
) -> tuple[Any, tuple[str, ...], int]:
    """Load a transformers network without adapters, with notes on it and the number of its parameters."""
    subject = f"the {role} {checkpoint.name}"
    check_config_sizes(subject, checkpoint.folder)
    check_repeated_tensors(subject, checkpoint.folder)
    packed = _find_unpacked(checkpoint, subject, device, device_map)
    try:
        config = read_config(checkpoint, trust_remote_code)
        _check_decoder_only(config, subject)
        if not has_kernels(checkpoint.folder, device):
            decoded = None if packed is None else {part for module in packed.modules for part in module.parts}
            check_stored_types(checkpoint.folder, config, subject, decoded)
        network_class, skeleton = _choose_class(
            checkpoint, config, subject, trust_remote_code, is_packed=packed is not None
        )
        if packed is not None:
            network, report = load_unpacked_network(
                packed, network_class, skeleton, checkpoint.folder, dtype=dtype, device_map=device_map
            )
        else:
            # some formats unpack weights by compiled functions
            with torch.compiler.set_stance("force_eager"):
                network, report = network_class.from_pretrained(
                    checkpoint.folder,
                    config=network_class.config,
                    dtype=dtype,
                    **_placement(device_map),
                    use_safetensors=True,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # reported by _check_shapes instead
                )
            run_uncompiled(network)
    except ModelError:
        raise
    except Exception as error:  # the exception type depends on the configuration, down to AssertionError
        hint = "; add --trust-remote-code if you trust the code it brings" if "remote" in str(error) else ""
        hint = ("" if packed is not None else explain_refusal(checkpoint.folder)) or hint
        raise ModelError(f"{subject} cannot be loaded: {summarise_error(error)}{hint}") from error
    _check_complete(report, subject, "" if packed is not None else explain_refusal(checkpoint.folder))
    if packed is not None:
        notes = (packed.describe(subject),)
    else:
        notes = describe_quantisation(checkpoint.folder, network, subject)
    unused_tensors = sorted(name for name in report["unexpected_keys"] if not is_of_other_part(config, name))
    packed_modules = () if packed is None else [module.name for module in packed.modules]
    check_unused_parts(unused_tensors, checkpoint.folder, subject, packed_modules)
    if unused_tensors:
        count, first = len(unused_tensors), unused_tensors[0]
        notes += (f"{count} tensors of {subject} are not used by its architecture, such as {first}",)
    if not trust_remote_code and not has_other_parts(config):
        notes += _describe_replaced_class(config, network, subject)
    return network, notes, _count(skeleton if is_packed(network) else network)


def _choose_class(
    checkpoint: Checkpoint, config: Any, subject: str, trust_remote_code: bool, *, is_packed: bool
) -> tuple[NetworkClass, Any]:
    """The first class for a configuration that fits the files and whose forward pass on text needs nothing but text.

    Also return the network on the meta device.

    Raises:
        ModelError: if there is none, with the reason of the first.
    """
    names = {name for path in list_weight_files(checkpoint.folder) for name in read_safetensors_header(path)}
    refusal: ModelError | None = None
    for network_class in list_network_classes(config, names, trust_remote_code=trust_remote_code):
        try:
            skeleton = check_network_size(
                subject,
                checkpoint.folder,
                network_class.config,
                network_class.from_config,
                is_quantised=is_packed,
            )
        except ModelError as error:
            refusal = refusal or error
            continue
        if not has_other_parts(config) or not needs_other_parts(skeleton):
            return network_class, skeleton
    raise refusal or ModelError(
        f"{subject} ({config.model_type}) runs more than its language model on text, and transformers has no class of "
        "its text part alone; kleash measures language models"
    )


def read_config(checkpoint: Checkpoint, trust_remote_code: bool) -> Any:
    """The configuration of a checkpoint, as transformers reads it."""
    transformers = import_extra("transformers", "models")
    return transformers.AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=trust_remote_code)


def _check_complete(report: Any, subject: str, explanation: str) -> None:
    """Check that all weights were in the files, in the shapes of the configuration."""
    mismatches = sorted(report.get("mismatched_keys", ()))
    if mismatches:
        # transformers 5 reports each name with two shapes, transformers 4 names alone.
        name, *shapes = [mismatches[0]] if isinstance(mismatches[0], str) else mismatches[0]
        difference = ": {}, and not {}".format(*map(tuple, shapes)) if shapes else ""
        raise ModelError(
            f"{subject} has {len(mismatches)} weights of other shapes than its config.json says, such as "
            f"{name}{difference}; correct config.json, or fetch the checkpoint again"
        )
    missing_weights = sorted(report["missing_keys"])
    if missing_weights:
        advice = explanation or _explain_missing(missing_weights, report["unexpected_keys"])
        raise ModelError(
            f"{subject} lacks {len(missing_weights)} of its weights, which would be random: "
            f"{', '.join(missing_weights[:3])}{advice}"
        )


def _describe_replaced_class(config: Any, network: Any, subject: str) -> tuple[str, ...]:
    """A note on a checkpoint that names a class of its own code, in place of which transformers' class is run."""
    names = getattr(config, "architectures", None) or []
    if not getattr(config, "auto_map", None) or not names or type(network).__name__ in names:
        return ()
    note = (
        f"{subject} names the class {str(names[0])[:60]} of its own code, and transformers' {type(network).__name__} "
        "is measured; --trust-remote-code runs that code"
    )
    return (note,)


def _explain_missing(missing: Sequence[str], unused: Collection[str]) -> str:
    """What to do about weights that are missing: by a prefix that all tensors have, or since there is no head."""
    prefixes = {name.removesuffix(missing[0]) for name in unused if name.endswith(f".{missing[0]}")}
    for prefix in sorted(prefixes):
        if all(f"{prefix}{name}" in unused for name in missing):
            return (
                f"; all of them are there with the prefix {prefix[:60]!r}, so save the model without its wrapper "
                "(torch.compile, DistributedDataParallel, a value head)"
            )
    if list(missing) == ["lm_head.weight"]:
        return (
            "; fetch the checkpoint again, unless it is a model of embeddings or rewards, which have no head"
        )
    return "; fetch the checkpoint again, or save it whole"


def _check_decoder_only(config: Any, subject: str) -> None:
    """Check that a configuration is of a decoder-only model."""
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(
            f"{subject} is an encoder-decoder ({config.model_type}); kleash measures decoder-only models"
        )
