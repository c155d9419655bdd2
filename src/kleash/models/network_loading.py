"""Loading networks from checkpoints, with checks of their configuration and weights."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from kleash.checkpoints.files import INDEX, SINGLE_FILE
from kleash.checkpoints.quantised.packed_formats import PackedCheckpoint, find_packed_modules
from kleash.checkpoints.resolution import Checkpoint
from kleash.errors import CannotRunError, ModelError
from kleash.extras import import_extra
from kleash.models.compat import class_of_config, forget_renaming, run_uncompiled, use_exact_experts
from kleash.models.filling import (
    ON_META,
    check_complete,
    check_network_size,
    fill_network,
    load_unpacked_network,
    loading,
)
from kleash.models.gguf_network import load_gguf_network
from kleash.models.heads import has_tied_embeddings
from kleash.models.sharded_networks import shard_storage, view_of_shards
from kleash.models.shared_base import LoadedNetwork, load_over_one_base
from kleash.models.transformers_formats import (
    check_stored_types,
    check_unused_parts,
    describe_quantisation,
    has_kernels,
    is_packed,
    quantisation_advice,
)
from kleash.registry import grouped

PARALLEL_MAPS = {"fsdp": "fsdp_size", "tensor": "tp_size"}
"""Device maps that spread a model over the ranks of torch.distributed, and transformers' name of their number."""

TEXT_NAMES = {
    r"^(model\.)?(language_model|text_model)\.model\.": "model.",
    r"^model\.(language_model|text_model)\.": "model.",
    r"^(model\.)?(language_model|text_model)\.lm_head\.": "lm_head.",
}
"""Beginnings of the names of a text part's tensors in files of a whole model → those of its causal class."""


def load_networks(
    checkpoints: Mapping[str, Checkpoint],
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
    roles_by_files = grouped(
        (tuple(path.resolve() for path in checkpoint.gguf or (checkpoint.folder,)), role)
        for role, checkpoint in checkpoints.items()
    )
    networks: dict[str, LoadedNetwork] = {}
    notes: list[str] = []

    def base_at_rest(checkpoint: Checkpoint) -> LoadedNetwork:
        """The network without adapters, on the device, in evaluation mode, and sharded if that is asked for."""
        if device_map in PARALLEL_MAPS:
            _require_ranks(checkpoint, device_map)
        base = load_base(checkpoint, dtype, device, device_map, trust_remote_code)
        if device_map is None:
            base.network.to(device)
        base.network.eval()
        run_uncompiled(base.network)
        if base.network.dtype == torch.float64:
            use_exact_experts(base.network)
        storage = shard_storage(base.network, str(checkpoint)) if device_map == "fsdp" else None
        if storage is not None:
            base = replace(base, network=view_of_shards(base.network, storage), storage=storage)
        return base

    for roles in roles_by_files.values():
        networks_of_roles, note = load_over_one_base(
            {role: checkpoints[role] for role in roles}, base_at_rest
        )
        networks |= networks_of_roles
        notes += [note] if note else []
    has_adapters = any(checkpoint.adapter is not None for checkpoint in checkpoints.values())
    if len(roles_by_files) > 1 and has_adapters:
        notes.append("policy and reference have different bases, which are both loaded")
    return networks, tuple(notes)


def _require_ranks(checkpoint: Checkpoint, device_map: str) -> None:
    """Check that a checkpoint can be spread over the ranks of torch.distributed.

    Raises:
        CannotRunError: if there are no ranks.
        ModelError: if it is an adapter.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        raise CannotRunError(
            f"--device-map {device_map} spreads a model over the processes of torchrun … -m kleash measure, and this "
            "is one process; start several, or take another --device-map"
        )
    if checkpoint.adapter is not None or checkpoint.gguf:
        raise ModelError(
            f"{checkpoint} is an adapter or a GGUF file, which --device-map {device_map} does not take; merge or "
            "convert it into a folder of safetensors"
        )


def _placement(device_map: str | None) -> dict[str, Any]:
    """The arguments of ``from_pretrained`` that say where the weights are."""
    if device_map not in PARALLEL_MAPS:
        return {"device_map": device_map}
    configuration = import_extra("transformers.distributed.configuration_utils", "models").DistributedConfig
    size = {PARALLEL_MAPS[device_map]: torch.distributed.get_world_size()}
    return {"distributed_config": configuration(**size)}


def load_base(
    checkpoint: Checkpoint,
    dtype: torch.dtype | str,
    device: torch.device,
    device_map: str | None,
    trust_remote_code: bool,
) -> LoadedNetwork:
    """Load the network of a checkpoint, without adapters, as the first class that has all its weights in the files.

    With the device map ``ON_META`` no weight is read: the network has what settings and headers say, and those of a
    quantised checkpoint or a GGUF file are not looked for.

    Raises:
        ModelError: if there is none, with the reason of the first class.
    """
    if checkpoint.gguf:
        return load_gguf_network(checkpoint, dtype=dtype, device_map=device_map)
    packed = None
    if not has_kernels(checkpoint, device):
        packed = find_packed_modules(checkpoint)
        check_stored_types(checkpoint, packed)
    if packed is None and not any((checkpoint.folder / name).is_file() for name in (SINGLE_FILE, INDEX)):
        raise ModelError(
            f"{checkpoint} has .safetensors files and neither {SINGLE_FILE} nor {INDEX}, by which "
            "transformers finds weights; fetch the checkpoint again, or rename the file if it is one"
        )
    if packed is not None and device_map in PARALLEL_MAPS:
        raise ModelError(
            f"{checkpoint} is quantised ({checkpoint.quant_method}) and unpacked when it is loaded, which "
            f"--device-map {device_map} does not take; save it dequantised"
        )
    advice = quantisation_advice(checkpoint) if packed is None else ""
    with loading(checkpoint, advice):
        config = import_extra("transformers", "models").AutoConfig.from_pretrained(
            checkpoint.folder, trust_remote_code=trust_remote_code
        )
        if getattr(config, "is_encoder_decoder", False):
            raise ModelError(
                f"{checkpoint} is an encoder-decoder ({config.model_type}); kleash measures decoder-only models"
            )
    refusals: list[ModelError] = []
    for candidate in list_candidates(config, trust_remote_code):
        try:
            base = load_as(candidate, checkpoint, packed, advice, dtype, device_map)
        except ModelError as error:
            refusals.append(error)
        else:
            replaced = (
                () if trust_remote_code else _describe_replaced_class(config, base.network, str(checkpoint))
            )
            return replace(base, notes=(*base.notes, *replaced))
    raise refusals[0]


class Candidate(NamedTuple):
    """A class that a checkpoint's network may have."""

    build: Callable[[Any], Any]
    """Builds the network of a configuration."""
    config: Any
    names: Mapping[str, str]
    """Patterns of names of tensors in the files → what the class has in their place."""


def list_candidates(config: Any, trust_remote_code: bool) -> Iterator[Candidate]:
    """Iterate over the classes that a checkpoint's network may have, the preferred first.

    It is the class of ``AutoModelForCausalLM``, or that of a model which reads more than text (``class_of_config``).
    The second is the causal class of the text part: for files of it alone, and where the whole cannot be built here,
    as Gemma 3n without timm.

    Args:
        config: a transformers configuration.
        trust_remote_code: whether the checkpoint's own code may run.
    """
    auto_class = import_extra("transformers", "models").AutoModelForCausalLM
    is_remote = trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    text_config = config.get_text_config(decoder=True)
    whole, text_class = class_of_config(config), class_of_config(text_config)
    if is_remote or whole is None or whole.config_class is type(text_config):
        yield Candidate(partial(auto_class.from_config, trust_remote_code=trust_remote_code), config, {})
        return
    yield Candidate(whole._from_config, config, {})
    if text_config is not config and text_class is not None:
        yield Candidate(text_class._from_config, text_config, TEXT_NAMES)


def load_as(
    candidate: Candidate,
    checkpoint: Checkpoint,
    packed: PackedCheckpoint | None,
    advice: str,
    dtype: torch.dtype | str,
    device_map: str | None,
) -> LoadedNetwork:
    """Load the network of a folder as one class; ``advice`` is what to do if it does not fit the files.

    Raises:
        ModelError: if it does not fit the files.
    """
    with loading(checkpoint, advice):
        skeleton = check_network_size(
            checkpoint, candidate.config, candidate.build, is_quantised=packed is not None
        )
        load = partial(type(skeleton).from_pretrained, key_mapping=dict(candidate.names) or None)
        if device_map == ON_META:
            if checkpoint.quant_method is not None:
                return LoadedNetwork(network=skeleton, parameters=0)
            headers = {
                name: torch.empty(tensor.shape, device=ON_META) for name, tensor in checkpoint.tensors.items()
            }
            network, report = fill_network(load, skeleton.config, headers, torch.float32, ON_META)
        elif packed is not None:
            network, report = load_unpacked_network(
                packed, load, skeleton, dtype=dtype, device_map=device_map
            )
        else:
            # some formats unpack weights by compiled functions
            with torch.compiler.set_stance("force_eager"):
                network, report = load(
                    checkpoint.folder,
                    config=skeleton.config,
                    dtype=dtype,
                    **_placement(device_map),
                    use_safetensors=True,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # reported by check_complete instead
                )
    check_complete(report, str(checkpoint), advice)
    if candidate.names:
        forget_renaming(network)
    unused = sorted(report["unexpected_keys"])
    check_unused_parts(
        unused, checkpoint, () if packed is None else [module.name for module in packed.modules]
    )
    notes = describe_quantisation(checkpoint, packed, network)
    if unused:
        notes += (
            f"{len(unused)} tensors of {checkpoint} are not used by its architecture, such as {unused[0]}",
        )
    if packed is None and not is_packed(network) and device_map not in PARALLEL_MAPS:
        notes += _describe_untied_head(skeleton, network, checkpoint)
    counted = skeleton if is_packed(network) else network
    return LoadedNetwork(
        network=network,
        parameters=sum(parameter.numel() for parameter in counted.parameters()),
        notes=notes,
        packed=() if packed is None else packed.modules,
    )


def _describe_untied_head(skeleton: Any, network: Any, checkpoint: Checkpoint) -> tuple[str, ...]:
    """A note on a head in the files, beside an embedding that the settings tie it to."""
    note = (
        f"{checkpoint} has a head of its own in its files and is tied to its embedding by its settings; the head is "
        "measured, as transformers reads it, and vLLM reads the embedding: set tie_word_embeddings as meant"
    )
    return (note,) if has_tied_embeddings(skeleton) and not has_tied_embeddings(network) else ()


def _describe_replaced_class(config: Any, network: Any, subject: str) -> tuple[str, ...]:
    """A note on a checkpoint that names a class of its own code, in place of which transformers' class is run."""
    names = getattr(config, "architectures", None) or [type(network).__name__]
    is_replaced = getattr(config, "auto_map", None) and type(network).__name__ not in names
    note = (
        f"{subject} names the class {str(names[0])[:60]} of its own code, and transformers' {type(network).__name__} "
        "is measured; --trust-remote-code runs that code"
    )
    return (note,) if is_replaced else ()
