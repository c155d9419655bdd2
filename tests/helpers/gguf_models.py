"""Settings of the tiny models that are written as GGUF files: at least one for each architecture."""

from typing import Any

MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}
GEMMA = {"sliding_window": 8, "query_pre_attn_scalar": 8}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 3.0}}),
    "yarn": (
        "llama",
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4}),
    "granite": ("granite", {"logits_scaling": 4.0, "attention_multiplier": 0.3, "embedding_multiplier": 3.0}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "qwen2moe": ("qwen2_moe", MOE),
    "qwen3moe": ("qwen3_moe", {**MOE, "norm_topk_prob": True}),
    "olmo2": ("olmo2", {}),
    "gemma2": ("gemma2", {**GEMMA, "final_logit_softcapping": 3.0}),
    "gemma3": ("gemma3_text", {**GEMMA, "num_hidden_layers": 7}),
    "phi3": ("phi3", {"sliding_window": None}),
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10_000.0}
QWEN35 = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
}
GEMMA4 = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "global_head_dim": 16,
    "sliding_window": 8,
    "final_logit_softcapping": 5.0,
    "vocab_size_per_layer_input": 320,
    "tie_word_embeddings": True,
}
MODELS |= {
    "gemma": ("gemma", {"tie_word_embeddings": True}),
    "gemma3n": (
        "gemma3n_text",
        {
            "num_hidden_layers": 5,
            "intermediate_size": [48] * 5,
            "layer_types": [
                "sliding_attention",
                "full_attention",
                *["sliding_attention"] * 2,
                "full_attention",
            ],
            "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0, 0.0],
            "num_kv_shared_layers": 2,
            "sliding_window": 8,
            "laurel_rank": 4,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 320,
            "tie_word_embeddings": True,
        },
    ),
    "gemma4": (
        "gemma4_text",
        {
            **GEMMA4,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "use_double_wide_mlp": True,
        },
    ),
    "gemma4 experts": (
        "gemma4_text",
        {
            **GEMMA4,
            "hidden_size_per_layer_input": 0,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 16,
        },
    ),
    "glm4": ("glm4", {"attention_bias": True}),
    "gpt-oss": (
        "gpt_oss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "rope_parameters": {**YARN, "truncate": False},
        },
    ),
    "ministral3": (
        "ministral3",
        {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}},
    ),
    "qwen35": ("qwen3_5_text", QWEN35),
    "qwen35moe": ("qwen3_5_moe_text", {**MOE, **QWEN35}),
}
