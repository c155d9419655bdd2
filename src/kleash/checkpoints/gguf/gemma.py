"""Gemma 1 to 4 and 3n.

What differs from the checkpoint:

1. Norms have 1 added, up to Gemma 3.
2. The scale of attention is not stored, nor are caps in files of June 2024.
3. Layers with a window have another base of the rotary embedding, in Gemma 4 also other heads.
4. Files may have keys and values of layers that use those of an earlier one.
5. Gemma 4's rope_freqs.weight says which part of a head is rotated.
"""

from collections.abc import Mapping
from functools import partial
from math import erf, sqrt
from typing import Any

from torch import Tensor

from kleash.checkpoints.gguf.architectures import (
    ROPE_FACTORS,
    GGUFArchitecture,
    Settings,
    TensorSummary,
    set_layer_types,
)
from kleash.errors import ModelError

ATTENTION_CAP, LOGIT_CAP = 50.0, 30.0
"""Caps of Gemma 2 and 3n, which llama.cpp applies if a file has none, as those of June 2024."""
SHARED_KV = {
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_k_norm": "self_attn.k_norm",
}
"""Keys and values, which files may have of layers that use those of an earlier one."""
GEMMA4_NAMES = SHARED_KV | {
    "layer_output_scale.weight": "layer_scalar",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "ffn_gate_up_exps.weight": "experts.gate_up_proj",
    "ffn_down_exps.weight": "experts.down_proj",
}
GEMMA3N_NAMES = SHARED_KV | {
    "altup_correct_scale.weight": "altup.correct_output_scale",
    "altup_proj.weight": "model.altup_projections.{expert}.weight",
    "altup_unembd_proj.weight": "model.altup_unembed_projections.{expert}.weight",
}
GEMMA4_SETTINGS = {
    "attention.sliding_window": "sliding_window",
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_count": "num_experts",
    "expert_used_count": "top_k_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
}


def adjust_gemma2(attributes: dict[str, Any], settings: Settings, tensors: TensorSummary) -> None:
    """Set the scale of attention: by the head's size, and in the 27B models by hidden size / heads."""
    is_27b = attributes["num_hidden_layers"] in (46, 62)
    per_head = attributes["hidden_size"] // attributes["num_attention_heads"]
    attributes["query_pre_attn_scalar"] = per_head if is_27b else attributes["head_dim"]


def adjust_gemma3(attributes: dict[str, Any], settings: Settings, tensors: TensorSummary) -> None:
    """Set the base of the rotary embedding in layers with a window, and no cap or window where a file has none."""
    attributes["final_logit_softcapping"] = attributes.get("final_logit_softcapping") or None
    attributes["rope_local_base_freq"] = settings.get("rope.freq_base_swa", 10_000.0)
    if not attributes.get("sliding_window"):
        attributes["layer_types"] = ["full_attention"] * attributes["num_hidden_layers"]


def adjust_gemma3n(attributes: dict[str, Any], settings: Settings, tensors: TensorSummary) -> None:
    """Set sparse activations, the rank of the low-rank branch (LAuReL), and positions of two kinds of layers."""
    attributes["laurel_rank"] = tensors.shapes["blk.0.laurel_l.weight"][0]
    attributes["vocab_size_per_layer_input"] = tensors.shapes["per_layer_token_embd.weight"][0]
    scales = settings.get("activation_sparsity_scale")
    if scales is not None:
        # A file has quantiles of the normal distribution, in float32; transformers has their probabilities.
        attributes["activation_sparsity_pattern"] = [
            round(0.5 + 0.5 * erf(scale / sqrt(2)), 6) for scale in scales
        ]
    _set_ropes("Gemma 3n", attributes, settings, rope_type="default")


def adjust_gemma4(attributes: dict[str, Any], settings: Settings, tensors: TensorSummary) -> None:
    """Set layers with a window and without one, with heads of two sizes, shared keys and values, and experts."""
    attributes["global_head_dim"] = attributes["head_dim"]
    attributes["head_dim"] = local = settings.get("attention.key_length_swa", attributes["head_dim"])
    if {
        settings.get("attention.value_length_swa", local),
        settings.get("rope.dimension_count_swa", local),
    } != {local}:
        raise ModelError(
            "its layers with a sliding window have heads of several sizes (attention.value_length_swa)"
        )
    _gemma4_heads(attributes, attributes["layer_types"], tensors)
    _gemma4_mlp(attributes)
    attributes["enable_moe_block"] = bool(attributes.get("num_experts"))
    attributes["final_logit_softcapping"] = attributes.get("final_logit_softcapping") or None
    per_layer = tensors.shapes.get("per_layer_token_embd.weight", (attributes["vocab_size"],))
    attributes["vocab_size_per_layer_input"] = per_layer[0]
    _set_ropes(
        "Gemma 4",
        attributes,
        settings,
        rope_type="proportional",
        partial_rotary_factor=_rotary_part(attributes["global_head_dim"], tensors),
    )


def _set_ropes(model: str, attributes: dict[str, Any], settings: Settings, **full: Any) -> None:
    """Set the rotary embedding of layers with a window, and that of those without one, of which ``full`` is said.

    Raises:
        ModelError: if a file of the ``model`` scales positions.
    """
    if "rope_scaling" in attributes or attributes.pop("partial_rotary_factor", 1) != 1:
        raise ModelError(f"its positions are scaled, which is not read of {model}")
    attributes["rope_parameters"] = {
        "sliding_attention": {
            "rope_type": "default",
            "rope_theta": settings.get("rope.freq_base_swa", 10_000.0),
        },
        "full_attention": {**full, "rope_theta": attributes.pop("rope_theta")},
    }


def _gemma4_heads(attributes: dict[str, Any], types: list[str], tensors: TensorSummary) -> None:
    """Heads of keys and values: of all layers, and of those without a window."""
    values = attributes["num_key_value_heads"]
    heads = values if isinstance(values, list) else [values] * len(types)
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
    shared = attributes["num_hidden_layers"] - unshared
    width = widths[0] if widths else 0
    is_double = bool(widths) and widths[-1] != width
    if widths != [width] * unshared + [width * (1 + is_double)] * shared:
        raise ModelError(f"its feed_forward_length is {str(widths)[:60]}, which Gemma 4 cannot have")
    attributes |= {"intermediate_size": width, "use_double_wide_mlp": is_double}


def _rotary_part(head_dim: int, tensors: TensorSummary) -> float:
    """The part of a head that is rotated: factors are 1 where it is, and above 1e29 where it is not."""
    factors = tensors.factors.get(ROPE_FACTORS)
    if factors is None:
        return 1.0
    rotated = sum(factor == 1 for factor in factors)
    if len(factors) * 2 != head_dim or any(factor < 1e29 for factor in factors[rotated:]):
        raise ModelError("its rope_freqs.weight is no list of 1 and 1e30 for half a head")
    return 2 * rotated / head_dim


def drop_shared_kv(parameters: dict[str, Tensor], attributes: Mapping[str, Any]) -> None:
    """Drop keys and values of layers that use those of an earlier one: a file may have them, and nothing reads them."""
    count = attributes["num_hidden_layers"]
    for number in range(count - attributes.get("num_kv_shared_layers", 0), count):
        for part in ("k_proj", "v_proj", "k_norm"):
            parameters.pop(f"model.layers.{number}.self_attn.{part}.weight", None)


GEMMA2 = GGUFArchitecture(
    model_type="gemma2",
    settings={
        "attention.sliding_window": "sliding_window",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    defaults={"attn_logit_softcapping": ATTENTION_CAP, "final_logit_softcapping": LOGIT_CAP},
    adjust=[adjust_gemma2],
    norm_offset=1.0,
)
GEMMA_FAMILY: Mapping[str, GGUFArchitecture] = {
    "gemma": GGUFArchitecture(model_type="gemma", norm_offset=1.0),
    "gemma2": GEMMA2,
    "gemma3": GGUFArchitecture(
        model_type="gemma3_text",
        settings={
            "attention.sliding_window": "sliding_window",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        adjust=[adjust_gemma2, adjust_gemma3],
        norm_offset=1.0,
    ),
    "gemma3n": GGUFArchitecture(
        model_type="gemma3n_text",
        names=GEMMA3N_NAMES,
        settings={
            "attention.sliding_window": "sliding_window",
            "attention.shared_kv_layers": "num_kv_shared_layers",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
            "final_logit_softcapping": "final_logit_softcapping",
            "altup.active_idx": "altup_active_idx",
            "altup.num_inputs": "altup_num_inputs",
        },
        defaults={"final_logit_softcapping": LOGIT_CAP},
        adjust=[partial(set_layer_types, period=5), adjust_gemma3n],
        listed=frozenset(("feed_forward_length",)),
        arrange=[drop_shared_kv],
    ),
    "gemma4": GGUFArchitecture(
        model_type="gemma4_text",
        names=GEMMA4_NAMES,
        settings=GEMMA4_SETTINGS,
        defaults={"hidden_size_per_layer_input": 0},
        adjust=[partial(set_layer_types, period=None), adjust_gemma4],
        listed=frozenset(("feed_forward_length", "attention.head_count_kv")),
        arrange=[drop_shared_kv],
        factors=(ROPE_FACTORS,),
    ),
}
"""``general.architecture``, or a kind of it that ``find_architecture`` tells apart → mapping."""
