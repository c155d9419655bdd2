"""Building a transformers network from the files of a GGUF model."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kleash.errors import ModelError, summarise_error
from kleash.extras import import_extra
from kleash.models.checkpoints.config_checks import ALWAYS_ALLOWED_SIZE, check_built_size
from kleash.models.checkpoints.gguf_files import GGUFFiles, open_gguf
from kleash.models.compat import find_backbone
from kleash.models.gguf.architecture_table import find_architecture
from kleash.models.gguf.architectures import DRAFT_LAYERS, POOLING, GGUFArchitecture, config_attributes
from kleash.models.gguf.block_tensors import BLOCK_NUMBER
from kleash.models.gguf.family_settings import TensorSummary
from kleash.models.gguf.tensor_decoding import LONG_ROPE, ROPE_FACTORS, read_parameters, rope_factors
from kleash.models.gguf.vocabulary import END_TOKENS

MAX_SHOWN_NAMES = 4
SAMPLING = "general.sampling."
SAMPLING_NAMES = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}
"""Settings of a sampler in a GGUF file that have another name in a generation configuration."""


def load_gguf_network(
    paths: tuple[Path, ...], subject: str, *, dtype: torch.dtype | str, device_map: str | None
) -> tuple[Any, tuple[str, ...]]:
    """Load a GGUF model as a transformers network with its weights decoded into ``dtype``.

    The network is that of the same architecture in transformers, so its matrix products are done on decoded weights
    with unrounded activations, where llama.cpp rounds them to 8 bits.

    Args:
        paths: all files of the model.
        subject: the model, for errors.
        dtype: of the parameters; "auto" is bfloat16.
        device_map: how transformers spreads the model over devices; None for the CPU.

    Returns:
        The network in evaluation mode, and notes on how it is quantised and which settings are not mapped.

    Raises:
        ModelError: if the architecture is not supported, the settings contradict the tensors, a parameter is missing,
            or a tensor has no parameter.
    """
    files = open_gguf(paths)
    try:
        name, architecture = find_architecture(files.settings, [tensor.name for tensor in files.tensors])
        attributes, unmapped = read_attributes(files, name, architecture)
    except ModelError as error:
        raise ModelError(f"{subject} cannot be loaded: {error}") from error
    config, network_class = _build_config(files, architecture, attributes, subject)
    resolved = torch.bfloat16 if isinstance(dtype, str) else dtype
    tensors = [tensor for tensor in files.tensors if not _is_draft(tensor.name, name, files)]
    parameters, unused = read_parameters(tensors, architecture, attributes, resolved)
    if unused:
        raise ModelError(
            f"{subject} has {len(unused)} tensors that the architecture {name!r} does not have here, such as "
            f"{', '.join(unused[:MAX_SHOWN_NAMES])}; give the model as a folder of safetensors"
        )
    network, report = _fill_network(network_class, config, parameters, resolved, device_map, subject)
    _check_complete(report, subject)
    if not architecture.config_has_rope_factors:
        _divide_rope(network, files, subject)
    for setting, value in files.settings.items():
        if setting.startswith(SAMPLING):
            key = setting.removeprefix(SAMPLING)
            setattr(network.generation_config, SAMPLING_NAMES.get(key, key), value)
    notes = [describe_types(files, subject)]
    pooling = files.settings.get(f"{name}.{POOLING}", 0)
    if pooling:
        notes.append(
            f"{subject} is a model of embeddings (its pooling_type is {str(pooling)[:20]}), whose head may not "
            "have been trained to predict tokens"
        )
    if unmapped:
        notes.append(
            f"{subject} has {len(unmapped)} settings that are not mapped to transformers and may matter: "
            f"{', '.join(unmapped[:MAX_SHOWN_NAMES])}"
        )
    return network, tuple(notes)


def describe_types(files: GGUFFiles, subject: str) -> str:
    """A note on how many tensors a model has of each type."""
    kinds = ", ".join(f"{count} {kind}" for kind, count in files.kinds.items())
    return (
        f"{subject} has tensors of {8 * files.num_bytes / files.elements:.2f} bits a weight ({kinds}), which are "
        "decoded before the model runs; llama.cpp also rounds activations"
    )


def read_attributes(
    files: GGUFFiles, name: str, architecture: GGUFArchitecture
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The attributes of the configuration, checked against the tensors, and settings that are not mapped.

    Raises:
        ModelError: if a setting is missing, contradicts the tensors or cannot be expressed in transformers.
    """
    embedding = files.find("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError("it has no matrix token_embd.weight")
    factors = rope_factors(files.tensors)
    summary = TensorSummary(
        shapes={tensor.name: tensor.shape for tensor in files.tensors},
        rope_factors=None if factors is None else tuple(factors.tolist()),
        long_rope=_read_long_rope(files, architecture),
    )
    attributes, unmapped = config_attributes(name, architecture, files.settings, summary)
    largest = max(ALWAYS_ALLOWED_SIZE, files.elements)
    for attribute, value in attributes.items():
        is_size = attribute not in ("rope_theta", "max_position_embeddings")
        if is_size and isinstance(value, int | float) and not abs(value) <= largest:
            raise ModelError(f"its {attribute} is {value:.6g}, and it has {files.elements} weights")
    return attributes | _special_tokens(files), unmapped


def _read_long_rope(files: GGUFFiles, architecture: GGUFArchitecture) -> tuple[tuple[float, ...], ...] | None:
    """The divisors of the rotary frequencies for short and for long texts; None if there are none.

    Raises:
        ModelError: if one list is missing, or the architecture has none.
    """
    factors = [rope_factors(files.tensors, name) for name in LONG_ROPE]
    lists = [tuple(values.tolist()) for values in factors if values is not None]
    if not lists:
        return None
    if len(lists) != len(LONG_ROPE) or not architecture.has_long_rope:
        raise ModelError(
            "its positions are scaled by lists of factors (LongRoPE), which is not read of its architecture"
        )
    return tuple(lists)


def _is_draft(tensor: str, name: str, files: GGUFFiles) -> bool:
    """Whether a tensor belongs to the layers that predict further tokens (MTP), which come after the others."""
    drafts = files.settings.get(f"{name}.{DRAFT_LAYERS}", 0)
    match = BLOCK_NUMBER.match(tensor)
    if match is None or type(drafts) is not int:
        return False
    return drafts > 0 and int(match[1]) >= files.settings[f"{name}.block_count"] - drafts


def _special_tokens(files: GGUFFiles) -> dict[str, Any]:
    """The begin, end and padding tokens, as attributes of a configuration."""
    ids = {name: files.settings.get(f"tokenizer.ggml.{name}") for name in ("bos_token_id", *END_TOKENS)}
    ends = list(dict.fromkeys(ids[name] for name in END_TOKENS if type(ids[name]) is int))
    begin = ids["bos_token_id"]
    return {
        "bos_token_id": begin if type(begin) is int else None,
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": None,
    }


def _build_config(
    files: GGUFFiles, architecture: GGUFArchitecture, attributes: dict[str, Any], subject: str
) -> tuple[Any, Any]:
    """The configuration, and transformers' class of the network; checks the network's size."""
    transformers = import_extra("transformers", "models")
    try:
        config = transformers.AutoConfig.for_model(architecture.model_type, **attributes)
        build = transformers.AutoModelForCausalLM.from_config
        skeleton = check_built_size(subject, len(files.tensors), files.elements, config, build)
    except ModelError:
        raise
    except Exception as error:  # the exception type depends on the configuration
        raise ModelError(f"{subject} cannot be loaded: {summarise_error(error)}") from error
    return config, type(skeleton)


def _fill_network(
    network_class: Any,
    config: Any,
    parameters: dict[str, Tensor],
    dtype: torch.dtype,
    device_map: str | None,
    subject: str,
) -> tuple[Any, Any]:
    """The network with the parameters, and transformers' report of how they fit."""
    load = partial(network_class.from_pretrained, None, config=config, state_dict=parameters, dtype=dtype)
    try:
        return load(device_map=device_map, output_loading_info=True, ignore_mismatched_sizes=True)
    except Exception as error:  # the exception type depends on the configuration
        raise ModelError(f"{subject} cannot be loaded: {summarise_error(error)}") from error


def _check_complete(report: Any, subject: str) -> None:
    """Check that the file's tensors are the parameters of the network: all of them, in its shapes, and no others."""
    for key, what in (
        ("mismatched_keys", "have other shapes than its settings say"),
        ("missing_keys", "are missing and would be random"),
        ("unexpected_keys", "are not used by its architecture"),
    ):
        names = sorted(str(name[0] if isinstance(name, tuple) else name) for name in report.get(key, ()))
        if names:
            raise ModelError(
                f"{subject} cannot be loaded: {len(names)} of its weights {what}, such as "
                f"{', '.join(names[:MAX_SHOWN_NAMES])}; fetch or convert the model again"
            )


def _divide_rope(network: Any, files: GGUFFiles, subject: str) -> None:
    """Divide the rotary frequencies by the factors in the file, as llama.cpp does for Llama 3.1 and later."""
    factors = rope_factors(files.tensors)
    if factors is None:
        return
    rotary = getattr(find_backbone(network), "rotary_emb", None)
    frequencies = getattr(rotary, "inv_freq", None)
    is_valid = bool(factors.isfinite().all() and (factors > 0).all())
    if not isinstance(frequencies, Tensor) or frequencies.shape != factors.shape or not is_valid:
        raise ModelError(
            f"{subject} has a tensor {ROPE_FACTORS} that is no list of factors of its rotary embedding"
        )
    divided = frequencies / factors.to(frequencies.device, frequencies.dtype)
    for name in ("inv_freq", "original_inv_freq"):
        if isinstance(getattr(rotary, name, None), Tensor):
            setattr(rotary, name, divided.clone())
