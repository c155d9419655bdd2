"""Models with many experts: DeepSeek 2 and 3, GLM 4.5, dots.llm1, ERNIE 4.5, OLMoE, gpt-oss.

What differs from the checkpoint:

1. A "deepseek2" whose scores are sigmoids is DeepSeek 3; newer files have the latent projection to keys and
   values in two parts, that to keys transposed.
2. The first layer with experts follows from the tensors, since the setting is 0 in some files.
3. gpt-oss has gate and up projections apart, and matrices of experts transposed.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from kleash.checkpoints.gguf.architectures import (
    EXPERTS,
    GATING,
    LEADING_DENSE,
    PROJECTIONS,
    ROUTED_SETTINGS,
    SIGMOID,
    SOFTMAX,
    GGUFArchitecture,
    Settings,
    TensorSummary,
    check_gating,
    join_parameters,
    set_layer_types,
    set_rope,
    transpose,
)
from kleash.errors import ModelError

ROUTED_EXPERTS = EXPERTS | {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
"""Experts chosen by scores with a bias."""
LATENT_ATTENTION = ROUTED_EXPERTS | {"attn_k_b": "self_attn.k_b_proj", "attn_v_b": "self_attn.v_b_proj"}
"""Multi-head latent attention in newer files, whose ``kv_b_proj`` is in two parts."""
ROUTED_DEFAULTS = {
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 0,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": False,
}
YARN_SCALE = 0.1
"""Factor of the logarithm in YaRN's scale of attention, by which DeepSeek's setting is multiplied."""
GPT_OSS_NAMES = {
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
    "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
}


CHECK_SIGMOID = partial(check_gating, expected=SIGMOID)


def set_dense_layers(attributes: dict[str, Any], settings: Settings, tensors: TensorSummary) -> None:
    """Set the number of first layers without experts, and no sliding window."""
    # Not by leading_dense_block_count, which is 0 in some files of GLM-4.7 Flash.
    layers = range(attributes["num_hidden_layers"])
    routed = [number for number in layers if f"blk.{number}.ffn_gate_inp.weight" in tensors.shapes]
    attributes["first_k_dense_replace"] = routed[0] if routed else len(layers)
    attributes["sliding_window"] = None


def adjust_deepseek2(attributes: dict[str, Any], settings: Settings, tensors: TensorSummary) -> None:
    """Set how experts are chosen, and refuse queries that are scaled by their positions."""
    if settings.get("attention.temperature_scale"):
        raise ModelError(
            "its queries are scaled by their positions (attention.temperature_scale, Mistral Large 3), which is not "
            "read of deepseek2"
        )
    attributes["topk_method"] = "group_limited_greedy" if attributes["n_group"] > 1 else "greedy"


def set_latent_attention(attributes: dict[str, Any], settings: Settings, tensors: TensorSummary) -> None:
    """Set the sizes of heads and latent vectors, and YaRN's scale, which also changes that of attention."""
    rotary = settings["rope.dimension_count"]
    lengths = [settings.get(f"attention.{part}_length_mla") for part in ("key", "value")]
    key, value = (
        length or settings[f"attention.{part}_length"]
        for part, length in zip(("key", "value"), lengths, strict=True)
    )
    attributes |= {
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": key - rotary,
        "v_head_dim": value,
        "head_dim": rotary,
        "num_key_value_heads": attributes["num_attention_heads"],
        "q_lora_rank": settings.get("attention.q_lora_rank"),
        "kv_lora_rank": settings["attention.kv_lora_rank"],
    }
    del attributes["partial_rotary_factor"]
    rope = attributes.pop("rope_scaling", {"rope_type": "default"})
    multiplier = settings.get("rope.scaling.yarn_log_multiplier")
    if rope["rope_type"] == "yarn":
        del rope["attention_factor"]
        if multiplier is not None:
            rope["mscale"] = rope["mscale_all_dim"] = multiplier / YARN_SCALE
    attributes["rope_parameters"] = {**rope, "rope_theta": attributes.pop("rope_theta")}


def adjust_gpt_oss(attributes: dict[str, Any], settings: Settings, tensors: TensorSummary) -> None:
    """Set bounds of YaRN that are not rounded."""
    if settings.get("rope.freq_base_swa", attributes["rope_theta"]) != attributes["rope_theta"]:
        raise ModelError(
            "its layers with a sliding window have another rope.freq_base_swa, which gpt-oss has not"
        )
    set_rope(attributes)
    if attributes["rope_parameters"]["rope_type"] == "yarn":
        attributes["rope_parameters"]["truncate"] = False


JOINED_GPT_OSS_EXPERTS = [
    partial(
        join_parameters,
        parts=(f".mlp.experts.gate_proj.{suffix}", f".mlp.experts.up_proj.{suffix}"),
        joined=f".mlp.experts.{joined}",
        join=lambda *both: torch.stack(both, dim=2).flatten(1, 2),
    )
    for suffix, joined in (("weight", "gate_up_proj"), ("bias", "gate_up_proj_bias"))
]
"""Put gate and up projections in turns."""
DEEPSEEK2 = GGUFArchitecture(
    model_type="deepseek_v2",
    names=LATENT_ATTENTION,
    settings=ROUTED_SETTINGS,
    defaults=ROUTED_DEFAULTS,
    biases={"attention_bias": ("attn_q_a", "attn_kv_a_mqa", "attn_output")},
    adjusted=frozenset(
        (
            *(GATING, LEADING_DENSE, "attention.key_length_mla", "attention.value_length_mla"),
            *("attention.q_lora_rank", "attention.kv_lora_rank"),
        )
    ),
    adjust=[
        partial(check_gating, expected=SOFTMAX),
        adjust_deepseek2,
        set_dense_layers,
        set_latent_attention,
    ],
    arrange=[
        partial(  # head by head; the projections to keys are transposed
            join_parameters,
            parts=(".self_attn.k_b_proj.", ".self_attn.v_b_proj."),
            joined=".self_attn.kv_b_proj.",
            join=lambda keys, values: torch.cat([keys.mT, values], dim=1).flatten(0, 1),
        )
    ],
    has_latent_attention=True,
)
ROUTED_FAMILIES: Mapping[str, GGUFArchitecture] = {
    "deepseek2": DEEPSEEK2,
    "deepseek3": replace(
        DEEPSEEK2, model_type="deepseek_v3", adjust=[CHECK_SIGMOID, set_dense_layers, set_latent_attention]
    ),
    "glm4moe": GGUFArchitecture(
        model_type="glm4_moe",
        names=ROUTED_EXPERTS,
        settings=ROUTED_SETTINGS,
        defaults=ROUTED_DEFAULTS,
        adjusted=frozenset((GATING, LEADING_DENSE)),
        biases={"attention_bias": PROJECTIONS[:3]},
        present={"use_qk_norm": "attn_q_norm.weight"},
        adjust=[CHECK_SIGMOID, set_dense_layers, set_rope],
    ),
    "dots1": GGUFArchitecture(
        model_type="dots1",
        names=ROUTED_EXPERTS,
        settings=ROUTED_SETTINGS,
        defaults=ROUTED_DEFAULTS,
        adjusted=frozenset((GATING, LEADING_DENSE)),
        biases={"attention_bias": PROJECTIONS},
        adjust=[CHECK_SIGMOID, set_dense_layers],
    ),
    "ernie4_5-moe": GGUFArchitecture(
        model_type="ernie4_5_moe",
        names=EXPERTS | {"exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"},
        settings={
            "expert_count": "moe_num_experts",
            "expert_used_count": "moe_k",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_count": "moe_num_shared_experts",
            "interleave_moe_layer_step": "moe_layer_interval",
            LEADING_DENSE: "moe_layer_start_index",
        },
        adjusted=frozenset(("expert_shared_feed_forward_length", GATING)),
        biases={"use_bias": PROJECTIONS},
        defaults={"moe_layer_start_index": 0, "moe_num_shared_experts": 0},
    ),
    "olmoe": GGUFArchitecture(
        model_type="olmoe",
        names=EXPERTS,
        settings={
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
            "attention.clamp_kqv": "clip_qkv",
        },
        constants={"norm_topk_prob": False},
    ),
    "gpt-oss": GGUFArchitecture(
        model_type="gpt_oss",
        names=GPT_OSS_NAMES,
        settings={
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "intermediate_size",
            "attention.sliding_window": "sliding_window",
        },
        adjust=[partial(set_layer_types, period=2), adjust_gpt_oss],
        arrange=[*JOINED_GPT_OSS_EXPERTS, partial(transpose, ends=(".gate_up_proj", ".experts.down_proj"))],
    ),
}
"""``general.architecture``, or a kind of it that ``find_architecture`` tells apart → mapping."""
