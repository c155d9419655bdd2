"""Attributes of a configuration that follow from several settings of a GGUF file, or from its tensors.

Source: llama.cpp, ``conversion/`` and ``src/models/``, which write and read the settings.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import erf, sqrt
from typing import Any

from kleash.errors import ModelError

Settings = Mapping[str, Any]
OLMO_EPSILON = 1e-5


@dataclass(frozen=True, kw_only=True)
class TensorSummary:
    """What a configuration follows from beside the settings."""

    shapes: Mapping[str, tuple[int, ...]]
    """Of all tensors."""
    rope_factors: tuple[float, ...] | None
    """Divisors of the rotary frequencies, if the file has them."""
    long_rope: tuple[tuple[float, ...], ...] | None = None
    """Divisors of the rotary frequencies for short and for long texts, if the file has them."""


def adjust_gemma2(attributes: dict[str, Any], settings: Settings, tensors: TensorSummary) -> None:
    """Attention is scaled by the head's size, and in the 27B models by hidden size / heads."""
    is_27b = attributes["num_hidden_layers"] in (46, 62)
    per_head = attributes["hidden_size"] // attributes["num_attention_heads"]
    attributes["query_pre_attn_scalar"] = per_head if is_27b else attributes["head_dim"]


def adjust_gemma3(attributes: dict[str, Any], settings: Settings, tensors: TensorSummary) -> None:
    """Layers with a window have another base of the rotary embedding."""
    adjust_gemma2(attributes, settings, tensors)
    attributes["final_logit_softcapping"] = attributes.get("final_logit_softcapping") or None
    attributes["rope_local_base_freq"] = settings.get("rope.freq_base_swa", 10_000.0)
    if not attributes.get("sliding_window"):
        attributes["layer_types"] = ["full_attention"] * attributes["num_hidden_layers"]


def adjust_phi3(attributes: dict[str, Any], settings: Settings, tensors: TensorSummary) -> None:
    """A sliding window of 0 is none; two lists of factors scale the positions (LongRoPE)."""
    attributes["sliding_window"] = attributes.get("sliding_window") or None
    if tensors.long_rope is None:
        return
    short, long = tensors.long_rope
    length = settings.get("rope.scaling.original_context_length", attributes["max_position_embeddings"])
    attributes["original_max_position_embeddings"] = length
    _set_rope(
        attributes,
        rope_type="longrope",
        short_factor=list(short),
        long_factor=list(long),
        attention_factor=settings.get("rope.scaling.attn_factor", 1.0),
        original_max_position_embeddings=length,
    )


def _set_rope(attributes: dict[str, Any], **scaling: Any) -> None:
    """Put the settings of the rotary embedding into ``rope_parameters``, with another scaling if one is given."""
    stored_scaling = attributes.pop("rope_scaling", {"rope_type": "default"})
    attributes["rope_parameters"] = {
        **(scaling or stored_scaling),
        "rope_theta": attributes.pop("rope_theta"),
        "partial_rotary_factor": attributes.pop("partial_rotary_factor"),
    }


def adjust_partial_rope(attributes: dict[str, Any], settings: Settings, tensors: TensorSummary) -> None:
    """The part of a head that is rotated, for which transformers has another default than all of it."""
    _set_rope(attributes)


def adjust_gpt2(attributes: dict[str, Any], settings: Settings, tensors: TensorSummary) -> None:
    """Positions are embeddings."""
    attributes["n_inner"] = attributes.pop("intermediate_size")
    for name in ("head_dim", "num_key_value_heads", "rope_theta", "rope_scaling", "partial_rotary_factor"):
        attributes.pop(name, None)


def adjust_olmo(attributes: dict[str, Any], settings: Settings, tensors: TensorSummary) -> None:
    """Norms have no weights, and an epsilon that transformers does not let be set."""
    epsilon = attributes.pop("layer_norm_eps")
    if abs(epsilon - OLMO_EPSILON) > OLMO_EPSILON / 1000:
        raise ModelError(
            f"its attention.layer_norm_epsilon is {epsilon:.3g}, and that of OLMo {OLMO_EPSILON}"
        )


def adjust_olmo3(attributes: dict[str, Any], settings: Settings, tensors: TensorSummary) -> None:
    """Layers with a sliding window do not scale positions."""
    attributes["layer_types"] = _layer_types(settings, attributes["num_hidden_layers"], 4)
    local = settings.get("rope.freq_base_swa", attributes["rope_theta"])
    _set_rope(attributes)
    attributes["rope_parameters"] = {
        "sliding_attention": {"rope_type": "default", "rope_theta": local},
        "full_attention": attributes["rope_parameters"],
    }


def adjust_exaone4(attributes: dict[str, Any], settings: Settings, tensors: TensorSummary) -> None:
    """Small models have no sliding window."""
    count = attributes["num_hidden_layers"]
    window = attributes.get("sliding_window") or None
    attributes["sliding_window"] = window
    attributes["layer_types"] = (
        _layer_types(settings, count, 4) if window is not None else ["full_attention"] * count
    )


def adjust_cohere2(attributes: dict[str, Any], settings: Settings, tensors: TensorSummary) -> None:
    """Every fourth layer has neither a sliding window nor positions."""
    attributes["layer_types"] = _layer_types(settings, attributes["num_hidden_layers"], 4)
    if not attributes.get("sliding_window"):
        raise ModelError("it has no attention.sliding_window")


def refuse_sliding_window(attributes: dict[str, Any], settings: Settings, tensors: TensorSummary) -> None:
    """A sliding window is refused."""
    if settings.get("attention.sliding_window"):
        raise ModelError("its layers have a sliding window, which is read of other architectures only")


def adjust_granite(attributes: dict[str, Any], settings: Settings, tensors: TensorSummary) -> None:
    """Attention is scaled by the size of a head unless a file says otherwise.

    Raises:
        ModelError: if the file switches positions off, which transformers' Granite cannot.
    """
    attributes.setdefault("attention_multiplier", attributes["head_dim"] ** -0.5)
    if not settings.get("rope.scaling.finetuned", True):
        raise ModelError(
            "its positions are switched off (rope.scaling.finetuned), which is read of granitehybrid only"
        )


def adjust_gpt_oss(attributes: dict[str, Any], settings: Settings, tensors: TensorSummary) -> None:
    """Every second layer has a sliding window; the bounds of YaRN are not rounded."""
    if settings.get("rope.freq_base_swa", attributes["rope_theta"]) != attributes["rope_theta"]:
        raise ModelError(
            "its layers with a sliding window have another rope.freq_base_swa, which gpt-oss has not"
        )
    attributes["layer_types"] = _layer_types(settings, attributes["num_hidden_layers"], 2)
    scaling: dict[str, Any] = attributes.pop("rope_scaling", None) or {"rope_type": "default"}
    if scaling["rope_type"] == "yarn":
        scaling["truncate"] = False
    attributes["rope_parameters"] = {**scaling, "rope_theta": attributes.pop("rope_theta")}


def adjust_qwen35(attributes: dict[str, Any], settings: Settings, tensors: TensorSummary) -> None:
    """Layers of two kinds."""
    _set_linear_attention(attributes, settings)
    if "rope_scaling" in attributes:
        raise ModelError("its positions are scaled, which is not read of Qwen 3.5")
    _set_rope(
        attributes,
        rope_type="default",
        # Text has one position for all three sections.
        mrope_section=list(settings.get("rope.dimension_sections", (11, 11, 10)))[:3],
        mrope_interleaved=True,
    )


def adjust_qwen3_next(attributes: dict[str, Any], settings: Settings, tensors: TensorSummary) -> None:
    """Layers of two kinds."""
    _set_linear_attention(attributes, settings)
    _set_rope(attributes)


def _set_linear_attention(attributes: dict[str, Any], settings: Settings) -> None:
    """Which layers have a gated delta net, and the size of its heads."""
    count = attributes["num_hidden_layers"]
    interval = settings.get("full_attention_interval", 4)
    recurrent = settings.get("attention.recurrent_layers")
    if recurrent is None:
        recurrent = [(number + 1) % interval != 0 for number in range(count)]
    if not isinstance(recurrent, list) or len(recurrent) < count:
        raise ModelError(f"its attention.recurrent_layers is no list of {count} layers")
    attributes["layer_types"] = [
        "linear_attention" if each else "full_attention" for each in recurrent[:count]
    ]
    heads = attributes.get("linear_num_value_heads", 0)
    if not heads or settings.get("ssm.inner_size", 0) % heads:
        raise ModelError(f"its ssm.inner_size is not that of {heads} heads (ssm.time_step_rank)")
    attributes["linear_value_head_dim"] = settings["ssm.inner_size"] // heads


def adjust_ministral3(attributes: dict[str, Any], settings: Settings, tensors: TensorSummary) -> None:
    """Queries are multiplied by 1 + beta log(1 + floor(position / original context))."""
    scaling = attributes.pop("rope_scaling", {})
    if scaling.get("rope_type") != "yarn" or not scaling["original_max_position_embeddings"]:
        raise ModelError(
            "it has attention.temperature_scale without YaRN and rope.scaling.original_context_length, on which it "
            "depends"
        )
    attributes["rope_parameters"] = {
        **scaling,
        "rope_theta": attributes.pop("rope_theta"),
        "llama_4_scaling_beta": settings["attention.temperature_scale"],
    }
    attributes["sliding_window"] = None


def adjust_gemma3n(attributes: dict[str, Any], settings: Settings, tensors: TensorSummary) -> None:
    """Sparse activations, the rank of the low-rank branch (LAuReL), and layers of two kinds."""
    count = attributes["num_hidden_layers"]
    attributes["layer_types"] = _layer_types(settings, count, 5)
    attributes["laurel_rank"] = tensors.shapes["blk.0.laurel_l.weight"][0]
    attributes["vocab_size_per_layer_input"] = tensors.shapes["per_layer_token_embd.weight"][0]
    scales = settings.get("activation_sparsity_scale")
    if scales is not None:
        # A file has quantiles of the normal distribution, in float32; transformers has their probabilities.
        attributes["activation_sparsity_pattern"] = [
            round(0.5 + 0.5 * erf(scale / sqrt(2)), 6) for scale in scales
        ]
    if "rope_scaling" in attributes or attributes.pop("partial_rotary_factor", 1) != 1:
        raise ModelError("its positions are scaled, which is not read of Gemma 3n")
    local = settings.get("rope.freq_base_swa", 10_000.0)
    attributes["rope_parameters"] = {
        "sliding_attention": {"rope_type": "default", "rope_theta": local},
        "full_attention": {"rope_type": "default", "rope_theta": attributes.pop("rope_theta")},
    }


def adjust_gemma4(attributes: dict[str, Any], settings: Settings, tensors: TensorSummary) -> None:
    """Layers with a window and without one, with heads of two sizes, shared keys and values, and experts."""
    count = attributes["num_hidden_layers"]
    attributes["layer_types"] = types = _layer_types(settings, count, None)
    attributes["global_head_dim"] = attributes["head_dim"]
    attributes["head_dim"] = local = settings.get("attention.key_length_swa", attributes["head_dim"])
    if {
        settings.get("attention.value_length_swa", local),
        settings.get("rope.dimension_count_swa", local),
    } != {local}:
        raise ModelError(
            "its layers with a sliding window have heads of several sizes (attention.value_length_swa)"
        )
    _gemma4_heads(attributes, types, tensors)
    _gemma4_mlp(attributes)
    attributes["enable_moe_block"] = bool(attributes.get("num_experts"))
    attributes["final_logit_softcapping"] = attributes.get("final_logit_softcapping") or None
    per_layer = tensors.shapes.get("per_layer_token_embd.weight", (attributes["vocab_size"],))
    attributes["vocab_size_per_layer_input"] = per_layer[0]
    if "rope_scaling" in attributes or attributes.pop("partial_rotary_factor", 1) != 1:
        raise ModelError("its positions are scaled, which is not read of Gemma 4")
    attributes["rope_parameters"] = {
        "sliding_attention": {
            "rope_type": "default",
            "rope_theta": settings.get("rope.freq_base_swa", 10_000.0),
        },
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": _rotary_part(attributes["global_head_dim"], tensors),
            "rope_theta": attributes.pop("rope_theta"),
        },
    }


def _gemma4_heads(attributes: dict[str, Any], types: list[str], tensors: TensorSummary) -> None:
    """Heads of keys and values: of all layers, and of those without a window."""
    values = attributes["num_key_value_heads"]
    heads = values if isinstance(values, list) else [values] * len(types)
    if len(heads) != len(types):
        raise ModelError(f"its attention.head_count_kv has {len(heads)} numbers for {len(types)} layers")
    by_type = {kind: {n for n, each in zip(heads, types, strict=True) if each == kind} for kind in types}
    if any(len(numbers) != 1 for numbers in by_type.values()) or len(by_type) != 2:
        raise ModelError("its attention.head_count_kv differs within one kind of layers")
    local, everywhere = (by_type[kind].pop() for kind in ("sliding_attention", "full_attention"))
    first = types.index("full_attention")
    attributes["attention_k_eq_v"] = f"blk.{first}.attn_v.weight" not in tensors.shapes
    if local != everywhere and not attributes["attention_k_eq_v"]:
        raise ModelError("its layers have different attention.head_count_kv and values of their own")
    attributes["num_key_value_heads"] = local
    attributes["num_global_key_value_heads"] = everywhere


def _gemma4_mlp(attributes: dict[str, Any]) -> None:
    """The width of the MLP, which is twice as large in layers with shared keys and values of some models."""
    widths = attributes["intermediate_size"]
    if not isinstance(widths, list):
        return
    unshared = attributes["num_hidden_layers"] - attributes.get("num_kv_shared_layers", 0)
    width = widths[0] if widths else 0
    for double in (False, True):
        if widths == [width] * unshared + [width * (1 + double)] * (len(widths) - unshared):
            attributes |= {"intermediate_size": width, "use_double_wide_mlp": double}
            break
    if isinstance(attributes["intermediate_size"], list) or len(widths) != attributes["num_hidden_layers"]:
        raise ModelError(f"its feed_forward_length is {str(widths)[:60]}, which Gemma 4 cannot have")


def _rotary_part(head_dim: int, tensors: TensorSummary) -> float:
    """The part of a head that is rotated: factors are 1 where it is, and above 1e29 where it is not."""
    factors = tensors.rope_factors
    if factors is None:
        return 1.0
    rotated = sum(factor == 1 for factor in factors)
    if len(factors) * 2 != head_dim or any(factor < 1e29 for factor in factors[rotated:]):
        raise ModelError("its rope_freqs.weight is no list of 1 and 1e30 for half a head")
    return 2 * rotated / head_dim


def _layer_types(settings: Settings, count: int, period: int | None) -> list[str]:
    """The kind of each layer; without a pattern in the file, every ``period``-th is without a sliding window."""
    pattern = settings.get("attention.sliding_window_pattern", period)
    if type(pattern) is int and pattern > 0:
        pattern = [bool((number + 1) % pattern) for number in range(count)]
    if not isinstance(pattern, list) or len(pattern) != count:
        raise ModelError(f"its attention.sliding_window_pattern is no list of {count} layers")
    return ["sliding_attention" if each else "full_attention" for each in pattern]
