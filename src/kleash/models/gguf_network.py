"""Building a transformers network from the files of a GGUF model."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kleash.checkpoints.gguf.architectures import (
    DRAFT_LAYERS,
    POOLING,
    ROPE_FACTORS,
    SIGMOID,
    GGUFArchitecture,
    Settings,
    TensorSummary,
    config_attributes,
)
from kleash.checkpoints.gguf.dense import DENSE_FAMILIES, LLAMA_FAMILY
from kleash.checkpoints.gguf.gemma import GEMMA_FAMILY
from kleash.checkpoints.gguf.hybrids import HYBRID_FAMILIES
from kleash.checkpoints.gguf.qwen import QWEN_FAMILY
from kleash.checkpoints.gguf.routed import ROUTED_FAMILIES
from kleash.checkpoints.gguf.tensor_decoding import (
    BLOCK_NUMBER,
    ParameterNames,
    read_factors,
    read_parameters,
)
from kleash.checkpoints.gguf.vocabulary import END_TOKENS
from kleash.checkpoints.gguf_files import GGUFFiles
from kleash.checkpoints.resolution import Checkpoint
from kleash.errors import ModelError
from kleash.extras import import_extra
from kleash.models.compat import find_backbone
from kleash.models.filling import ON_META, check_complete, check_network_size, fill_network, loading
from kleash.models.shared_base import LoadedNetwork

ARCHITECTURES: Mapping[str, GGUFArchitecture] = {
    **LLAMA_FAMILY,
    **QWEN_FAMILY,
    **GEMMA_FAMILY,
    **HYBRID_FAMILIES,
    **ROUTED_FAMILIES,
    **DENSE_FAMILIES,
}
"""``general.architecture``, or the kind of it that ``find_architecture`` tells apart → mapping."""
SCORE_BIAS = ".exp_probs_b.bias"
KINDS_OF_ARCHITECTURES: Mapping[str, tuple[str, Callable[[Settings, Collection[str]], Any]]] = {
    "mixtral": ("llama", lambda settings, tensors: settings.get("llama.expert_count")),
    "ministral3": (
        "mistral3",
        lambda settings, tensors: settings.get("mistral3.attention.temperature_scale"),
    ),
    "olmo3": ("olmo2", lambda settings, tensors: settings.get("olmo2.attention.sliding_window")),
    "glm4v": ("glm4", lambda settings, tensors: settings.get("glm4.rope.dimension_sections")),
    "deepseek3": (
        "deepseek2",
        lambda settings, tensors: (
            settings.get("deepseek2.expert_gating_func") == SIGMOID
            or any(tensor.endswith(SCORE_BIAS) for tensor in tensors)
        ),
    ),
}
"""Entries that are no ``general.architecture`` → the one that their files name, and whether a file is of this kind."""
MAX_SHOWN_NAMES = 4
SAMPLING = "general.sampling."
SAMPLING_NAMES = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}
"""Settings of a sampler in a GGUF file that have another name in a generation configuration."""


def find_architecture(settings: Settings, tensors: Collection[str]) -> tuple[str, GGUFArchitecture]:
    """The prefix of a file's settings, and the mapping of its architecture.

    Args:
        settings: of the file.
        tensors: names of its tensors.

    Raises:
        ModelError: if it is not supported, with the list of those that are.
    """
    name = str(settings.get("general.architecture"))
    kinds = (
        kind
        for kind, (named, is_of_kind) in KINDS_OF_ARCHITECTURES.items()
        if named == name and is_of_kind(settings, tensors)
    )
    kind = next(kinds, name)
    if kind not in ARCHITECTURES or name in KINDS_OF_ARCHITECTURES:
        listed = ", ".join(sorted(set(ARCHITECTURES) - set(KINDS_OF_ARCHITECTURES)))
        raise ModelError(
            f"it is of the architecture {name[:40]!r}, and kleash reads GGUF files of {listed}; give the model as a "
            "folder of safetensors"
        )
    return name, ARCHITECTURES[kind]


def load_gguf_network(
    checkpoint: Checkpoint, *, dtype: torch.dtype | str, device_map: str | None
) -> LoadedNetwork:
    """Load a GGUF model as a transformers network with its weights decoded into ``dtype``.

    The network is that of the same architecture in transformers, so its matrix products are done on decoded weights
    with unrounded activations, where llama.cpp rounds them to 8 bits.

    Args:
        checkpoint: of a GGUF model.
        dtype: of the parameters; "auto" is bfloat16.
        device_map: how transformers spreads the model over devices; None for the CPU; ``ON_META`` to decode nothing.

    Raises:
        ModelError: if the architecture is not supported, the settings contradict the tensors, a parameter is missing,
            or a tensor has no parameter.
    """
    files, subject = checkpoint.gguf_files, str(checkpoint)
    try:
        name, architecture = find_architecture(files.settings, [tensor.name for tensor in files.tensors])
        attributes, unmapped = read_attributes(files, name, architecture)
    except ModelError as error:
        raise ModelError(f"{subject} cannot be loaded: {error}") from error
    transformers = import_extra("transformers", "models")
    resolved = torch.bfloat16 if isinstance(dtype, str) else dtype
    tensors = [tensor for tensor in files.tensors if not _is_draft(tensor.name, name, files)]
    with loading(checkpoint):
        config = transformers.AutoConfig.for_model(architecture.model_type, **attributes)
        skeleton = check_network_size(checkpoint, config, transformers.AutoModelForCausalLM.from_config)
        if device_map == ON_META:
            return LoadedNetwork(network=skeleton, parameters=0)
        names = ParameterNames.of(name, architecture.names, skeleton)
        parameters, unused = read_parameters(tensors, architecture, names, attributes, resolved)
        if unused:
            raise ModelError(
                f"{subject} has {len(unused)} tensors that the architecture {name!r} does not have here, such as "
                f"{', '.join(unused[:MAX_SHOWN_NAMES])}; give the model as a folder of safetensors"
            )
        network, report = fill_network(
            type(skeleton).from_pretrained, config, parameters, resolved, device_map
        )
    check_complete(report, subject)
    if report["unexpected_keys"]:
        names = ", ".join(sorted(report["unexpected_keys"])[:MAX_SHOWN_NAMES])
        raise ModelError(
            f"{subject} has tensors that its architecture does not use: {names}; convert it again"
        )
    if ROPE_FACTORS not in architecture.factors:
        _divide_rope(network, files, subject)
    for setting, value in files.settings.items():
        if setting.startswith(SAMPLING):
            key = setting.removeprefix(SAMPLING)
            setattr(network.generation_config, SAMPLING_NAMES.get(key, key), value)
    return LoadedNetwork(
        network=network,
        parameters=sum(parameter.numel() for parameter in network.parameters()),
        notes=_notes(files, name, subject, unmapped),
    )


def _notes(files: GGUFFiles, architecture: str, subject: str, unmapped: Sequence[str]) -> tuple[str, ...]:
    """What is said of a GGUF model: its types, whether it is one of embeddings, and settings that are not mapped."""
    num_bytes = sum(tensor.num_bytes for tensor in files.tensors)
    elements = sum(tensor.elements for tensor in files.tensors)
    counts = Counter(tensor.kind for tensor in sorted(files.tensors, key=lambda tensor: -tensor.elements))
    kinds = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    notes = [
        f"{subject} has tensors of {8 * num_bytes / elements:.2f} bits a weight ({kinds})",
        (
            f"the tensors of {subject} are decoded before the model runs; llama.cpp on a CPU also rounds activations "
            "for quantised ones, in larger blocks for K types: its KL is larger, and near ones may change places"
        ),
    ]
    pooling = files.settings.get(f"{architecture}.{POOLING}", 0)
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
    return tuple(notes)


def read_attributes(
    files: GGUFFiles, name: str, architecture: GGUFArchitecture
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The attributes of the configuration, checked against the tensors, and settings that are not mapped.

    Raises:
        ModelError: if a setting is missing, contradicts the tensors or cannot be expressed in transformers.
    """
    shapes = {tensor.name: tensor.shape for tensor in files.tensors}
    if len(shapes.get("token_embd.weight", ())) != 2:
        raise ModelError("it has no matrix token_embd.weight")
    factors = read_factors(files.tensors)
    if not factors.keys() - architecture.factors <= {ROPE_FACTORS}:
        raise ModelError(
            "its positions are scaled by lists of factors (LongRoPE), which is not read of its architecture"
        )
    attributes, unmapped = config_attributes(
        name, architecture, files.settings, TensorSummary(shapes=shapes, factors=factors)
    )
    return attributes | _special_tokens(files), unmapped


def _is_draft(tensor: str, name: str, files: GGUFFiles) -> bool:
    """Whether a tensor belongs to the layers that predict further tokens (MTP), which come after the others."""
    drafts = files.settings.get(f"{name}.{DRAFT_LAYERS}", 0)
    match = BLOCK_NUMBER.match(tensor)
    first_draft = files.settings[f"{name}.block_count"] - drafts
    return drafts > 0 and match is not None and int(match[1]) >= first_draft


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


def _divide_rope(network: Any, files: GGUFFiles, subject: str) -> None:
    """Divide the rotary frequencies by the factors in the file, as llama.cpp does for Llama 3.1 and later."""
    factors = torch.tensor(read_factors(files.tensors).get(ROPE_FACTORS, ()))
    if not len(factors):
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
