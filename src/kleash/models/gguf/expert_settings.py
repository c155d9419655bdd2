"""Attributes of a configuration with experts or convolutions that follow from several settings of a GGUF file.

Source: llama.cpp, ``conversion/`` and ``src/models/``, which write and read the settings.
"""

from typing import Any

from kleash.errors import ModelError
from kleash.models.gguf.family_settings import Settings, TensorSummary, adjust_partial_rope

SOFTMAX, SIGMOID = 1, 2
"""``expert_gating_func``."""
YARN_SCALE = 0.1
"""Factor of the logarithm in YaRN's scale of attention, by which DeepSeek's setting is multiplied."""
LLAMA4_CHUNK, LLAMA4_ROPE_INTERVAL, MAVERICK_EXPERTS = 8192, 4, 128
"""Constants of Llama 4 that llama.cpp does not store."""


def adjust_routed_experts(attributes: dict[str, Any], settings: Settings, tensors: TensorSummary) -> None:
    """Experts are chosen by sigmoids, and the first layers have none."""
    _check_gating(settings, SIGMOID)
    # Not by leading_dense_block_count, which is 0 in some files of GLM-4.7 Flash.
    layers = range(attributes["num_hidden_layers"])
    routed = [number for number in layers if f"blk.{number}.ffn_gate_inp.weight" in tensors.shapes]
    attributes["first_k_dense_replace"] = routed[0] if routed else len(layers)
    attributes["sliding_window"] = None


def _check_gating(settings: Settings, expected: int) -> None:
    """Check the function of the scores by which experts are chosen.

    Raises:
        ModelError: if it is another than that of the architecture.
    """
    gating = settings.get("expert_gating_func", expected)
    if gating != expected:
        raise ModelError(f"its expert_gating_func is {str(gating)[:40]}, which its architecture has not")


def adjust_glm4_experts(attributes: dict[str, Any], settings: Settings, tensors: TensorSummary) -> None:
    """Half of a head is rotated."""
    adjust_routed_experts(attributes, settings, tensors)
    adjust_partial_rope(attributes, settings, tensors)


def adjust_deepseek3(attributes: dict[str, Any], settings: Settings, tensors: TensorSummary) -> None:
    """Experts are chosen by sigmoids with a bias, and keys and values come from a latent vector."""
    adjust_routed_experts(attributes, settings, tensors)
    _set_latent_attention(attributes, settings)


def adjust_deepseek2(attributes: dict[str, Any], settings: Settings, tensors: TensorSummary) -> None:
    """Experts are chosen by a softmax, and keys and values come from a latent vector."""
    _check_gating(settings, SOFTMAX)
    if settings.get("attention.temperature_scale"):
        raise ModelError(
            "its queries are scaled by their positions (attention.temperature_scale, Mistral Large 3), which is not "
            "read of deepseek2"
        )
    adjust_routed_experts(attributes, {}, tensors)
    attributes["topk_method"] = "group_limited_greedy" if attributes["n_group"] > 1 else "greedy"
    _set_latent_attention(attributes, settings)


def _set_latent_attention(attributes: dict[str, Any], settings: Settings) -> None:
    """The sizes of heads and latent vectors, and YaRN's scale, which also changes that of attention."""
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


def adjust_ernie_experts(attributes: dict[str, Any], settings: Settings, tensors: TensorSummary) -> None:
    """All layers from the first on, or every second or third of them, have experts."""
    attributes["moe_layer_end_index"] = attributes["num_hidden_layers"] - 1


def adjust_lfm2(attributes: dict[str, Any], settings: Settings, tensors: TensorSummary) -> None:
    """Layers without heads of keys have a convolution."""
    kinds = _mixed_layers(attributes)
    attributes["layer_types"] = ["conv" if kind == "linear_attention" else kind for kind in kinds]
    attributes["block_auto_adjust_ff_dim"] = False


def adjust_lfm2_experts(attributes: dict[str, Any], settings: Settings, tensors: TensorSummary) -> None:
    """Experts are chosen by sigmoids with a bias."""
    _check_gating(settings, SIGMOID)
    adjust_lfm2(attributes, settings, tensors)


def adjust_llama4(attributes: dict[str, Any], settings: Settings, tensors: TensorSummary) -> None:
    """Every fourth layer has neither chunks nor positions; experts and MLPs have different widths."""
    if settings.get("attention.sliding_window") == 0:
        raise ModelError("its attention.sliding_window is 0 (MobileLLM), which is not read of Llama 4")
    count = attributes["num_hidden_layers"]
    attributes |= {
        "intermediate_size_mlp": attributes["intermediate_size"],
        "intermediate_size": settings["expert_feed_forward_length"],
        "attention_chunk_size": LLAMA4_CHUNK,
        "floor_scale": LLAMA4_CHUNK,
        "attn_scale": 0.1,
        "attn_temperature_tuning": True,
        "use_qk_norm": attributes["num_local_experts"] != MAVERICK_EXPERTS,
        "no_rope_layers": [int((number + 1) % LLAMA4_ROPE_INTERVAL != 0) for number in range(count)],
    }


def adjust_granite_hybrid(attributes: dict[str, Any], settings: Settings, tensors: TensorSummary) -> None:
    """Layers without heads of keys have Mamba 2; dense models have a shared MLP alone."""
    attributes["layer_types"] = _mixed_layers(attributes)
    attributes.setdefault("attention_multiplier", attributes["head_dim"] ** -0.5)
    _set_state_space(attributes, settings)
    has_positions = settings.get("rope.scaling.finetuned", True)
    attributes["position_embedding_type"] = "rope" if has_positions else "nope"
    if not attributes["num_local_experts"]:
        attributes["shared_intermediate_size"] = tensors.shapes["blk.0.ffn_gate.weight"][0]


def adjust_falcon_h1(attributes: dict[str, Any], settings: Settings, tensors: TensorSummary) -> None:
    """Each layer has both attention and Mamba 2; multipliers are part of the weights."""
    _set_state_space(attributes, settings)
    attributes["mamba_d_ssm"] = settings["ssm.inner_size"]


def adjust_nemotron_h(attributes: dict[str, Any], settings: Settings, tensors: TensorSummary) -> None:
    """Each layer is one of Mamba 2, attention, an MLP and experts, as its tensors say."""
    kinds = {
        "ssm_in": "linear_attention",
        "attn_q": "full_attention",
        "ffn_gate_inp": "moe",
        "ffn_up": "mlp",
    }
    attributes["layers_block_type"] = [
        next(kind for part, kind in kinds.items() if f"blk.{number}.{part}.weight" in tensors.shapes)
        for number in range(attributes.pop("num_hidden_layers"))
    ]
    widths = [shape[0] for name, shape in tensors.shapes.items() if name.endswith(".ffn_up.weight")]
    attributes["intermediate_size"] = max(widths, default=attributes["hidden_size"])
    keys = attributes["num_key_value_heads"]
    attributes["num_key_value_heads"] = max(keys) if isinstance(keys, list) else keys
    heads = settings["ssm.time_step_rank"]
    attributes |= {"mamba_num_heads": heads, "mamba_head_dim": settings["ssm.inner_size"] // heads}
    for name in ("rope_theta", "partial_rotary_factor", "rope_scaling"):
        attributes.pop(name, None)


def _set_state_space(attributes: dict[str, Any], settings: Settings) -> None:
    """The heads of Mamba 2, and how much wider it is than the hidden states."""
    heads, inner = attributes["mamba_n_heads"], settings["ssm.inner_size"]
    attributes |= {"mamba_d_head": inner // heads, "mamba_expand": inner // attributes["hidden_size"]}


def _mixed_layers(attributes: dict[str, Any]) -> list[str]:
    """The kinds of layers by their heads of keys, of which the largest number becomes that of all.

    Raises:
        ModelError: if the numbers are no list of 0 and another one.
    """
    heads, count = attributes["num_key_value_heads"], attributes["num_hidden_layers"]
    if not isinstance(heads, list) or len(heads) != count or len(set(heads) - {0}) != 1:
        raise ModelError(f"its attention.head_count_kv is no list of 0 and another number for {count} layers")
    attributes["num_key_value_heads"] = max(heads)
    return ["full_attention" if number else "linear_attention" for number in heads]
