"""How a GGUF architecture stands for a transformers model: settings become a configuration, and tensors parameters.

Source: llama.cpp, ``conversion/`` and ``src/models/``, which write and read the files.
"""

from collections import UserDict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import log
from typing import Any

from torch import Tensor

from kleash.errors import ModelError

Settings = Mapping[str, Any]
RMS_NORM = "attention.layer_norm_rms_epsilon"
SHAPE_SETTINGS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    RMS_NORM: "rms_norm_eps",
}
"""Settings that most decoders have → attribute of the configuration."""
ROPE_FACTORS = "rope_freqs.weight"
"""Tensor of divisors of the rotary frequencies."""
LONG_ROPE = ("rope_factors_short.weight", "rope_factors_long.weight")
"""Tensors of divisors of the rotary frequencies for short and for long texts."""
POOLING = "pooling_type"
"""How the hidden states of an embedding model become one vector; 0 is not at all."""
DRAFT_LAYERS = "nextn_predict_layers"
"""Number of the last layers, which predict further tokens (MTP)."""
ROPE_SETTINGS = frozenset(
    f"rope.{name}"
    for name in (
        "dimension_count",
        "dimension_sections",
        "freq_base",
        "scale_linear",
        "scaling.type",
        "scaling.factor",
        "scaling.original_context_length",
        "scaling.finetuned",
        "scaling.attn_factor",
        "scaling.yarn_beta_fast",
        "scaling.yarn_beta_slow",
        "scaling.yarn_log_multiplier",
    )
)
"""Settings of the rotary embedding that are read, or that change nothing here."""
SETTINGS_WITHOUT_EFFECT = frozenset(("vocab_size", POOLING, DRAFT_LAYERS))
"""Settings that are checked elsewhere or that change nothing here."""
PROJECTIONS = ("attn_q", "attn_k", "attn_v", "attn_output")
FUSED_PROJECTIONS, FUSED_EXPERTS = "attn_qkv", "ffn_gate_up_exps"
"""Queries, keys and values in one tensor, and gate and up projections of experts, as some files have them."""
MLP_PROJECTIONS = ("ffn_up", "ffn_down", "ffn_gate")
LLAMA_BIASES = {"attention_bias": PROJECTIONS, "mlp_bias": MLP_PROJECTIONS}
EXPERTS = {f"ffn_{part}_exps": f"mlp.experts.{{expert}}.{part}_proj" for part in ("gate", "up", "down")}
EXPERT_SETTINGS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
ROUTED_SETTINGS = {
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
}
"""Settings of experts that are chosen by scores with a bias."""
GATING, LEADING_DENSE = "expert_gating_func", "leading_dense_block_count"
SOFTMAX, SIGMOID = 1, 2
"""``expert_gating_func``."""


class RecordedSettings(UserDict[str, Any]):
    """Settings by their names without the architecture, which remember those that were read."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        """Hold ``values``, of which none has been read."""
        super().__init__(values)
        self.read: set[str] = set()
        """Names of settings that were read."""

    def __getitem__(self, key: str) -> Any:
        """The value of a setting; ``get`` reads it here, too."""
        self.read.add(key)
        return super().__getitem__(key)


@dataclass(frozen=True, kw_only=True)
class TensorSummary:
    """What a configuration follows from beside the settings."""

    shapes: Mapping[str, tuple[int, ...]]
    """Of all tensors."""
    factors: Mapping[str, tuple[float, ...]]
    """The tensors ``ROPE_FACTORS`` and ``LONG_ROPE`` that the file has."""


@dataclass(frozen=True, kw_only=True)
class GGUFArchitecture:
    """How a GGUF architecture is mapped to a transformers model."""

    model_type: str
    """transformers' name of the configuration."""
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    """Names of parameters that do not follow from the table of the package gguf: ``ParameterNames.exceptions``."""
    shapes: Mapping[str, str] = field(default_factory=lambda: SHAPE_SETTINGS)
    """Settings that a file must have, as numbers above 0 → attribute of the configuration."""
    settings: Mapping[str, str] = field(default_factory=dict[str, str])
    """Settings beside those of ``shapes`` → attribute of the configuration."""
    adjusted: frozenset[str] = frozenset()
    """Further settings that have no effect here, or one that ``adjust`` checks by the tensors."""
    biases: Mapping[str, Collection[str]] = field(default_factory=dict[str, Collection[str]])
    """Attribute of the configuration → parts of a block; it is whether one of them has a bias."""
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Attributes of the configuration where a file has no setting for them."""
    present: Mapping[str, str] = field(default_factory=dict[str, str])
    """Attribute of the configuration → end of a tensor's name; it is whether a layer has that tensor."""
    constants: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Attributes of the configuration that the architecture implies."""
    adjust: Sequence[Callable[[dict[str, Any], Settings, TensorSummary], None]] = ()
    """Functions that change the attributes in turn, where they follow from several settings, or from tensors."""
    listed: frozenset[str] = frozenset()
    """Settings of ``shapes`` that may be a list with a number for each layer; ``adjust`` checks them."""
    interleaved_rope: bool = False
    """Whether rows of the query and key projections are stored in the order of llama.cpp's rotary embedding."""
    norm_offset: float = 0.0
    """What the file's norm weights have in excess of the parameters."""
    norms_without_offset: frozenset[str] = frozenset()
    """Parts of a block whose norm weights are stored as they are."""
    functions: Mapping[str, Callable[[Tensor], Tensor]] = field(
        default_factory=dict[str, Callable[[Tensor], Tensor]]
    )
    """Part of a block → function of the decoded values in float32 that gives the parameter's."""
    arrange: Sequence[Callable[[dict[str, Tensor], Mapping[str, Any]], None]] = ()
    """Functions that change decoded parameters into those of a checkpoint in turn; arguments are the parameters and the
    attributes."""
    factors: Sequence[str] = ()
    """Tensors of divisors of the rotary frequencies that ``adjust`` turns into attributes: ``LONG_ROPE``, or
    ``ROPE_FACTORS``, which otherwise divide those of the network."""
    has_latent_attention: bool = False
    """Whether keys and values come from a latent vector, so that the sizes of heads are others."""


def config_attributes(
    name: str, architecture: GGUFArchitecture, settings: Settings, tensors: TensorSummary
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The attributes of a transformers configuration, and the settings of the architecture that are not mapped.

    Args:
        name: ``general.architecture``.
        architecture: its mapping.
        settings: of the file.
        tensors: of the file, with token_embd.weight; the embedding is tied if there is no output.weight.

    Raises:
        ModelError: if a setting is missing or has a value that transformers cannot express.
    """
    values = RecordedSettings(
        {key.removeprefix(f"{name}."): value for key, value in settings.items() if key.startswith(f"{name}.")}
    )
    names = dict(architecture.shapes) | dict(architecture.settings)
    attributes = {attribute: values[key] for key, attribute in names.items() if key in values}
    attributes.setdefault("num_key_value_heads", attributes.get("num_attention_heads"))
    _read_shapes(name, architecture, attributes)
    attributes["num_hidden_layers"] = _count_layers(values, attributes, tensors)
    heads, hidden_size = attributes["num_attention_heads"], attributes["hidden_size"]
    attributes["head_dim"] = head_dim = values.get("attention.key_length", hidden_size // heads)
    value_length = values.get("attention.value_length", head_dim)
    if value_length != head_dim and not architecture.has_latent_attention:
        raise ModelError(f"its keys have {head_dim} numbers a head and its values {value_length}")
    if values.get("attention.causal", True) is not True:
        raise ModelError("its attention is not causal; kleash measures causal language models")
    rotary = values.get("rope.dimension_count", head_dim)
    if architecture.interleaved_rope and rotary != head_dim:
        raise ModelError(
            f"it rotates {str(rotary)[:20]} of {head_dim} numbers of a head, which {name} does not"
        )
    attributes |= _attributes_of_tensors(architecture, tensors) | _rope(values, attributes)
    attributes = {**architecture.defaults, **attributes, **architecture.constants}
    try:
        for adjust in architecture.adjust:
            adjust(attributes, values, tensors)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ModelError(
            f"its settings have values that {name} cannot have ({error}); convert the model again"
        ) from error
    known = {*values.read, *names, *ROPE_SETTINGS, *SETTINGS_WITHOUT_EFFECT, *architecture.adjusted}
    return attributes, tuple(sorted(key for key in values if key not in known))


def _attributes_of_tensors(architecture: GGUFArchitecture, tensors: TensorSummary) -> dict[str, Any]:
    """The attributes that say which tensors there are: of the embeddings, biases and optional parts."""
    with_bias = {key.split(".")[-2] for key in tensors.shapes if key.endswith(".bias")}
    if FUSED_PROJECTIONS in with_bias:
        with_bias.update(PROJECTIONS[:3])
    return {
        "vocab_size": tensors.shapes["token_embd.weight"][0],
        "tie_word_embeddings": "output.weight" not in tensors.shapes,
        **{name: not with_bias.isdisjoint(parts) for name, parts in architecture.biases.items()},
        **{
            name: any(key.endswith(f".{end}") for key in tensors.shapes)
            for name, end in architecture.present.items()
        },
    }


def _read_shapes(name: str, architecture: GGUFArchitecture, attributes: dict[str, Any]) -> None:
    """Check that the settings of an architecture's shapes are there, and take one number for a list of equal ones.

    Raises:
        ModelError: naming the first that is missing or no number above 0.
    """
    for key, attribute in architecture.shapes.items():
        value, count = attributes.get(attribute), attributes.get("num_hidden_layers")
        if isinstance(value, list) and key in architecture.listed:
            continue
        # files of Granite 4 without state-space layers have a list with one number for all layers
        if isinstance(value, list) and len(value) == count and len(set(map(str, value))) == 1:
            value = attributes[attribute] = value[0]
        is_needed = attribute != "intermediate_size" or "moe_intermediate_size" not in attributes
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_needed and not (is_number and value > 0):
            raise ModelError(
                f"its setting {name}.{key} is {str(value)[:60]}, and should be one number above 0"
            )


def _count_layers(values: Settings, attributes: Mapping[str, Any], tensors: TensorSummary) -> int:
    """The number of layers, without those that predict further tokens.

    Raises:
        ModelError: if it is not that of a model with these tensors.
    """
    count, drafts = attributes["num_hidden_layers"], values.get(DRAFT_LAYERS, 0)
    if count > len(tensors.shapes):
        raise ModelError(f"it claims {count} layers and has {len(tensors.shapes)} tensors")
    if type(drafts) is not int or not 0 <= drafts < count:
        raise ModelError(f"its {DRAFT_LAYERS} is {str(drafts)[:40]}, and it has {count} layers")
    return count - drafts


def _rope(values: Settings, attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of the rotary embedding."""
    rotary = values.get("rope.dimension_count", attributes["head_dim"])
    rope: dict[str, Any] = {
        "rope_theta": values.get("rope.freq_base", 10_000.0),
        "partial_rotary_factor": rotary / attributes["head_dim"],
    }
    kind = values.get("rope.scaling.type", "linear")
    factor = values.get("rope.scaling.factor") or values.get("rope.scale_linear") or 1.0
    if kind == "linear" and factor != 1:
        rope["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        rope["rope_scaling"] = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": values.get(
                "rope.scaling.original_context_length", attributes["max_position_embeddings"]
            ),
            # yarn_attn_factor is the checkpoint's own attention_factor. llama.cpp multiplies attn_factor by the one
            # that transformers has as its default; a logarithmic multiplier divides it.
            "attention_factor": values.get("rope.scaling.attn_factor", 1.0)
            * values.get("rope.scaling.yarn_attn_factor", 0.1 * log(factor) + 1.0)
            / (0.1 * values.get("rope.scaling.yarn_log_multiplier", 0.0) * log(factor) + 1.0),
            "beta_fast": values.get("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": values.get("rope.scaling.yarn_beta_slow", 1.0),
        }
    elif kind not in ("none", "linear"):
        raise ModelError(f"its positions are scaled by {str(kind)[:40]!r}, which is not read from GGUF files")
    return rope


def layer_norm_shapes(attribute: str) -> dict[str, str]:
    """The settings of shapes of a model with LayerNorms, of which ``attribute`` has the epsilon."""
    shapes = {key: name for key, name in SHAPE_SETTINGS.items() if key != RMS_NORM}
    return shapes | {"attention.layer_norm_epsilon": attribute}


def check_gating(
    attributes: dict[str, Any], settings: Settings, tensors: TensorSummary, *, expected: int
) -> None:
    """Check the function of the scores by which experts are chosen.

    Raises:
        ModelError: if it is another than that of the architecture.
    """
    gating = settings.get(GATING, expected)
    if gating != expected:
        raise ModelError(f"its expert_gating_func is {str(gating)[:40]}, which its architecture has not")


def set_rope(attributes: dict[str, Any], *_: Any, **scaling: Any) -> None:
    """Put the settings of the rotary embedding into ``rope_parameters``, with another scaling if one is given.

    By itself it is for models of which transformers has another default than that all of a head is rotated.
    """
    stored_scaling = attributes.pop("rope_scaling", {"rope_type": "default"})
    attributes["rope_parameters"] = {
        **(scaling or stored_scaling),
        "rope_theta": attributes.pop("rope_theta"),
        "partial_rotary_factor": attributes.pop("partial_rotary_factor"),
    }


def set_layer_types(
    attributes: dict[str, Any], settings: Settings, tensors: TensorSummary, *, period: int | None
) -> None:
    """Set the kind of each layer; without a pattern in the file, every ``period``-th is without a sliding window."""
    count = attributes["num_hidden_layers"]
    pattern = settings.get("attention.sliding_window_pattern", period)
    if type(pattern) is int and pattern > 0:
        pattern = [bool((number + 1) % pattern) for number in range(count)]
    if not isinstance(pattern, list) or len(pattern) != count:
        raise ModelError(f"its attention.sliding_window_pattern is no list of {count} layers")
    attributes["layer_types"] = ["sliding_attention" if each else "full_attention" for each in pattern]


def log_of_negated(values: Tensor) -> Tensor:
    """log(-x): a file has -exp(A_log)."""
    return (-values).log()


def change_parameters(
    parameters: dict[str, Tensor],
    attributes: Mapping[str, Any],
    *,
    ends: tuple[str, ...],
    by: Callable[[Tensor], Tensor],
) -> None:
    """Change the parameters whose names have these ends.

    Args:
        parameters: by name.
        attributes: of the configuration; unused.
        ends: of their names.
        by: the function of the values.
    """
    for name in parameters:
        if name.endswith(ends):
            parameters[name] = by(parameters[name])


restore_convolutions = partial(
    change_parameters, ends=(".conv.weight", ".conv1d.weight"), by=lambda kernels: kernels.unsqueeze(1)
)
"""Puts the kernels of convolutions into their shape: a file has no dimension for the one channel of a group."""
transpose = partial(change_parameters, by=lambda matrix: matrix.mT.contiguous())
"""Transposes the matrices whose names have the ``ends``, which a file has as [outputs, inputs]."""


def join_parameters(
    parameters: dict[str, Tensor],
    attributes: Mapping[str, Any],
    *,
    parts: Sequence[str],
    joined: str,
    join: Callable[..., Tensor],
) -> None:
    """Put one parameter in the place of several that a file has apart.

    Where one of them is missing or does not fit, the joined one is then reported as missing.

    Args:
        parameters: by name.
        attributes: of the configuration; unused.
        parts: what the names of those that are joined have in place of ``joined``, in order.
        joined: part of the name of the result.
        join: makes it of theirs.
    """
    for name in [name for name in parameters if parts[0] in name]:
        values = [parameters.pop(name.replace(parts[0], part), None) for part in parts]
        if all(value is not None for value in values):
            with suppress(RuntimeError):
                parameters[name.replace(parts[0], joined)] = join(*values)
