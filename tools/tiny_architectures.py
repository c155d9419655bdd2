"""Configurations of tiny random models of every architecture in transformers: each size of the default is made small.

The rules go by the names of settings, so that a new architecture mostly needs none of its own. What no rule can know
(sizes that must fit each other) is in ``SPECIAL_CASES``.
"""

import re
from typing import Any

VOCABULARY = 320
SIZES: tuple[tuple[str, int], ...] = (
    (r"^(decoder_|text_|extended_|padded_|unpadded_)?vocab_size(_per_layer_input)?$|^n_vocab$", VOCABULARY),
    (
        r"^(num|n)_(hidden_|decoder_|encoder_|text_|transformer_)?(layers?|blocks?)$|^depth$|(en|de)coder_layers$",
        2,
    ),
    (r"num_layers_.*shared|kv_shared_layers", 0),
    (r"(key_value|kv)_heads|num_key_value|n_kv|multi_query_group", 2),
    (r"(^|_)n_groups?$|num_groups?$|topk_group", 1),
    (r"heads$|n_head$|num_heads", 4),
    # Sparse attention keeps more keys than the texts have: its choice among equal scores is arbitrary.
    (r"index_topk|keep_window_size", 64),
    (r"top_?k|moe_k$|experts_per_tok|num_selected", 2),
    (r"n_shared|num_shared|shared_experts?$", 1),
    (r"(num|n)_.*experts|num_experts|moe_num", 4),
    (r"head_dim$|head_size$|d_kv|kv_channels|rotary_dim|qk_nope|rope_head_dim|v_head", 8),
    (r"lora_rank|_rank$|^rank", 8),
    (r"^(intermediate|ffn|mlp|inner|d_ff|feed_forward|dff|n_inner)|_ff(n)?_|ffn_dim|intermediate_size", 48),
    (
        r"hidden_size|n_embd|d_model|^dim$|embed_dim|model_dim|embedding_size|word_embed|hidden_dim|^width$|d_embed",
        32,
    ),
    (r"residual_dim|size_per_layer|hidden_units|emb_dim|d_inner|lru_width|attn_hidden|nemo_.*dim", 32),
    (r"max_position|n_positions|max_seq|n_ctx|max_target|max_source|seq_length|context_length", 128),
    (r"sliding_window|attention_window|window_size|local_attention", 8),
    (r"chunk_size$", 16),
    (r"state_size|d_state|ssm_state", 8),
    (r"num_position_embeddings|position_embedding_size", 64),
)
"""Patterns of settings' names, and the largest number that each gets; the first that matches counts."""
TOKEN_IDS = {"bos": 0, "eos": 1, "pad": 2}
"""Special tokens of the tiny tokenizer; those of images and the like come after its tokens."""
OTHER_TOKEN_ID = 310
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")

QWEN4_EXP: dict[str, Any] = {
    "ngram_vocab_size_base": 320,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 64,
    "indexer_compress_ratio": 4,
}
SPECIAL_CASES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"num_expert_group": 2},
    "bamba": {"mamba_d_head": 16},
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        }
    },
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {
        "n_routed_experts": 4,
        "moe_intermediate_size": 16,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
    },
    "falcon_h1": {"mamba_d_head": 16, "mamba_d_ssm": 64},
    "gemma4_text": {"global_head_dim": 16},
    "gemma4_unified_text": {"global_head_dim": 16},
    "granitemoehybrid": {"mamba_d_head": 16},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"qk_head_dim": 16},
    "mamba2": {"head_dim": 16},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp": {"text_config": QWEN4_EXP},
    "qwen4_exp_text": QWEN4_EXP,
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [8, 16]},
    "xlnet": {"d_head": 8},
    "xlstm": {"embedding_dim": 128, "hidden_size": 128},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {
        "mamba_headdim": 16,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "hybrid_layer_ids": [1],
    },
    "gemma3": {"vision_config": {"image_size": 28, "patch_size": 14}, "mm_tokens_per_image": 4},
    "gemma3n": {"audio_config": {"sscp_conv_channel_size": [4, 4], "input_feat_size": 16}},
    "gemma4": {
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
        },
        "text_config": {
            "global_head_dim": 16,
            "final_logit_softcapping": 5.0,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    },
    "glm4v": {"text_config": {"rope_parameters": {"mrope_section": [1, 1, 2]}}},
    "qwen2_5_vl": {"text_config": {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}}},
    "llama4": {
        "vision_config": {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16}
    },
}


def tiny_config(architecture: str, **settings: Any) -> Any:
    """The configuration of a tiny model.

    Args:
        architecture: a ``model_type`` of transformers.
        settings: values that replace others; a dictionary replaces those of a sub-configuration.
    """
    from transformers import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[architecture]
    tiny = _shrink(config_class().to_dict())
    for changes in (SPECIAL_CASES.get(architecture, {}), settings):
        tiny = _replace(tiny, changes)
    for name in ("transformers_version", "architectures", "dtype"):
        tiny.pop(name, None)
    return config_class.from_dict(tiny)


def _replace(settings: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Nested settings with changes; a change to None removes the setting."""
    settings = dict(settings)
    for name, value in changes.items():
        old = settings.get(name)
        if value is None:
            settings.pop(name, None)
        else:
            settings[name] = (
                _replace(old, value) if isinstance(value, dict) and isinstance(old, dict) else value
            )
    return settings


def _shrink(settings: dict[str, Any]) -> dict[str, Any]:
    """Nested settings with every size made small, and lists of layers as short as the number of layers."""
    tiny: dict[str, Any] = {}
    for name, value in settings.items():
        is_nested = isinstance(value, dict) and name not in ("id2label", "label2id")
        tiny[name] = _shrink(value) if is_nested else _shrink_value(name, value)
    for heads, kv_heads in (("num_attention_heads", "num_key_value_heads"), ("n_heads", "n_kv_heads")):
        if settings.get(kv_heads) is not None and settings.get(kv_heads) == settings.get(heads):
            tiny[kv_heads] = tiny[heads]  # latent attention has no groups of heads
    tiny.pop("per_layer_config", None)
    count = next((name for name in LAYER_COUNTS if isinstance(settings.get(name), int)), None)
    if count is not None:
        for name, value in settings.items():
            if isinstance(value, list) and len(value) == settings[count] > tiny[count]:
                tiny[name] = _shrink_value(name, _shorten(value, tiny[count]))
    return tiny


def _shrink_value(name: str, value: Any) -> Any:
    """A setting's value made small by the rule for its name; what is no number stays."""
    if "token_id" in name or "token_index" in name:
        token = next((token for kind, token in TOKEN_IDS.items() if name.startswith(kind)), OTHER_TOKEN_ID)
        if isinstance(value, list):
            return [token] * len(value)
        return token if isinstance(value, int) and value >= 0 else value
    if isinstance(value, list):
        return [_shrink_value(name, item) for item in value]
    if type(value) is not int or value <= 0:
        return value
    return next((min(size, value) for pattern, size in SIZES if re.search(pattern, name)), value)


def _shorten(values: list[Any], length: int) -> list[Any]:
    """The first values of a list that differ from each other, filled up with the last."""
    kinds = [value for index, value in enumerate(values) if value not in values[:index]]
    return (kinds + values[-1:] * length)[:length]
