"""Settings of the tiny models that are written as GGUF files: at least one for each architecture."""

from typing import Any

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
NO_EXPERTS = {"num_local_experts": 0, "num_experts_per_tok": 0}
MOE = {**EXPERTS, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24}
GEMMA = {"sliding_window": 8, "query_pre_attn_scalar": 8}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 3.0}}),
    "yarn": ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0,
        "original_max_position_embeddings": 32}}),
    "mixtral": ("mixtral", {**LOCAL_EXPERTS, "sliding_window": None}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4}),
    "granite": ("granite", {"logits_scaling": 4.0, "attention_multiplier": 0.3,
        "embedding_multiplier": 3.0}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "qwen2moe": ("qwen2_moe", MOE),
    "qwen3moe": ("qwen3_moe", {**MOE, "norm_topk_prob": True}),
    "olmo2": ("olmo2", {}),
    "gemma2": ("gemma2", {**GEMMA, "final_logit_softcapping": 3.0}),
    "gemma3": ("gemma3_text", {**GEMMA, "num_hidden_layers": 7}),
    "phi3": ("phi3", {"sliding_window": None}),
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10_000.0}
QWEN35 = {
    "num_hidden_layers": 4, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "rope_parameters": {"rope_theta": 1e7,
    "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
}  # fmt: skip
SLIDING, FULL = "sliding_attention", "full_attention"
GEMMA3N = {
    "num_hidden_layers": 5, "intermediate_size": [48] * 5, "layer_types": [SLIDING, FULL, SLIDING, SLIDING,
    FULL], "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0, 0.0], "num_kv_shared_layers": 2,
    "sliding_window": 8, "laurel_rank": 4, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 320, "tie_word_embeddings": True,
}  # fmt: skip
GEMMA4 = {
    "num_hidden_layers": 6, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "global_head_dim": 16, "sliding_window": 8, "final_logit_softcapping": 5.0,
    "vocab_size_per_layer_input": 320, "tie_word_embeddings": True,
}  # fmt: skip
MODELS |= {
    "gemma": ("gemma", {"tie_word_embeddings": True}),
    "gemma3n": ("gemma3n_text", GEMMA3N),
    "gemma4": ("gemma4_text", {**GEMMA4, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8,
        "use_double_wide_mlp": True}),
    "gemma4 experts": ("gemma4_text", {**GEMMA4, "hidden_size_per_layer_input": 0,
        "num_global_key_value_heads": 1, "attention_k_eq_v": True, "enable_moe_block": True,
        "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}),
    "glm4": ("glm4", {"attention_bias": True}),
    "gpt-oss": ("gpt_oss", {**LOCAL_EXPERTS, "sliding_window": 8, "rope_parameters": {**YARN,
        "truncate": False}}),
    "ministral3": ("ministral3", {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1}}),
    "qwen35": ("qwen3_5_text", QWEN35),
    "qwen35moe": ("qwen3_5_moe_text", {**MOE, **QWEN35}),
}  # fmt: skip
ROUTED = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 12, "head_dim": 8, "num_hidden_layers": 3,
    "first_k_dense_replace": 1, **ROUTED,
}  # fmt: skip
HYBRID_GRANITE = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_hidden_layers": 3,
    "shared_intermediate_size": 24, "position_embedding_type": "nope", "mamba_n_heads": 4,
    "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 8, "attention_multiplier": 0.3,
    "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 4.0,
}  # fmt: skip
LFM2 = {
    "num_hidden_layers": 3,
    "layer_types": ["conv", "full_attention", "conv"],
    "tie_word_embeddings": True,
}
WINDOWS = ["sliding_attention"] * 3 + ["full_attention", "sliding_attention"]
SLIDES = {"num_hidden_layers": 5, "layer_types": WINDOWS, "sliding_window": 8}
GPT2 = {"intermediate_size": 128, "tie_word_embeddings": True}
PARTIAL = {"rope_theta": 10_000.0, "rope_type": "default", "partial_rotary_factor": 0.5}
NEMOTRON_H = {
    "n_groups": 2, "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8,
    "num_hidden_layers": None, "moe_shared_expert_intermediate_size": 24, "routed_scaling_factor": 2.5,
    **ROUTED,
}  # fmt: skip
MODELS |= {
    "arcee": ("arcee", {}),
    "seed_oss": ("seed_oss", {}),
    "ernie4_5": ("ernie4_5", {}),
    "hunyuan-dense": ("hunyuan_v1_dense", {}),
    "exaone4": ("exaone4", SLIDES),
    "exaone4 without windows": ("exaone4", {"layer_types": ["full_attention"] * 2, "sliding_window": None,
        "sliding_window_pattern": None}),
    "command-r": ("cohere", {"logit_scale": 0.25, "use_qk_norm": True}),
    "cohere2": ("cohere2", {**SLIDES, "logit_scale": 0.25}),
    "olmo": ("olmo", {"clip_qkv": 0.5}),
    "olmo3": ("olmo3", {**SLIDES, "rope_parameters": {"full_attention": YARN | {"attention_factor": 1.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0}}}),
    "nemotron": ("nemotron", {"rope_parameters": PARTIAL}),
    "starcoder2": ("starcoder2", {"sliding_window": None, "tie_word_embeddings": True}),
    "stablelm": ("stablelm", {"rope_parameters": PARTIAL, "use_qkv_bias": True}),
    "stablelm with norms": ("stablelm", {"rope_parameters": PARTIAL | {"partial_rotary_factor": 1.0},
        "use_parallel_residual": True, "qk_layernorm": True}),
    "phi2": ("phi", {"rope_parameters": PARTIAL}),
    "gpt2": ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, **GPT2}),
    "gptneox": ("gpt_neox", {"rope_parameters": PARTIAL}),
    "chatglm": ("glm", {"rope_parameters": PARTIAL, "attention_bias": True}),
    "phi3 with longrope": ("phi3", {"original_max_position_embeddings": 96, "sliding_window": None,
        "rope_parameters": {"rope_type": "longrope", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5,
        "short_factor": [1.0, 1.25], "long_factor": [1.5, 3.0], "attention_factor": 1.25,
        "original_max_position_embeddings": 96}}),
    "olmoe": ("olmoe", {**EXPERTS}),
    "deepseek2": ("deepseek_v2", {**LATENT, "n_group": 2, "topk_group": 1,
        "topk_method": "group_limited_greedy",
        "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}}),
    "deepseek3": ("deepseek_v3", {**LATENT, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5,
        "q_lora_rank": None, "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}),
    "deepseek3 without groups": ("deepseek_v3", {**LATENT, "n_group": 1, "topk_group": 1,
        "routed_scaling_factor": 1.0, "norm_topk_prob": True}),
    "glm4moe": ("glm4_moe", {**ROUTED, "num_hidden_layers": 3, "first_k_dense_replace": 1,
        "attention_bias": True, "use_qk_norm": True, "routed_scaling_factor": 2.5,
        "rope_parameters": PARTIAL, "num_nextn_predict_layers": 0}),
    "dots1": ("dots1", {**ROUTED, "first_k_dense_replace": 1, "norm_topk_prob": True,
        "sliding_window": None}),
    "ernie4_5-moe": ("ernie4_5_moe", {"num_hidden_layers": 3, "moe_num_experts": 4, "moe_k": 2,
        "moe_intermediate_size": 16, "moe_num_shared_experts": 2, "moe_layer_start_index": 1}),
    "granitemoe": ("granitemoeshared", {**LOCAL_EXPERTS, "shared_intermediate_size": 24,
        "attention_multiplier": 0.3, "embedding_multiplier": 3.0, "logits_scaling": 4.0}),
    "granitehybrid": ("granitemoehybrid", {**HYBRID_GRANITE, **LOCAL_EXPERTS}),
    "granitehybrid without experts": ("granitemoehybrid", {**HYBRID_GRANITE, **NO_EXPERTS}),
    "falcon-h1": ("falcon_h1", {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16,
        "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_rms_norm": True, "mamba_norm_before_gate": False,
        "ssm_multipliers": [0.5, 0.6, 0.7, 0.8, 0.9], "embedding_multiplier": 2.0,
        "lm_head_multiplier": 0.5, "key_multiplier": 0.7, "attention_in_multiplier": 0.9,
        "attention_out_multiplier": 0.8, "mlp_multipliers": [0.9, 0.4], "ssm_in_multiplier": 1.2,
        "ssm_out_multiplier": 0.6}),
    "nemotron_h": ("nemotron_h", {**NEMOTRON_H, "layers_block_type": ["linear_attention", "mlp",
        "full_attention", "mlp"]}),
    "nemotron_h_moe": ("nemotron_h", {**NEMOTRON_H, "layers_block_type": ["linear_attention", "moe",
        "full_attention", "moe"]}),
    "llama4": ("llama4_text", {"num_hidden_layers": 5, "intermediate_size": 16, "intermediate_size_mlp": 48,
        "num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2}),
    "lfm2": ("lfm2", {**LFM2, "block_auto_adjust_ff_dim": False}),
    "lfm2moe": ("lfm2_moe", {**LFM2, **EXPERTS, "num_dense_layers": 1, "moe_intermediate_size": 16}),
    "qwen3next": ("qwen3_next", {**MOE,
        **{name: value for name, value in QWEN35.items() if name != "rope_parameters"},
        "layer_types": ["linear_attention"] * 3 + ["full_attention"], "rope_parameters": PARTIAL}),
}  # fmt: skip
MODELS |= {
    "gemma2 with its caps": ("gemma2", {**GEMMA, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0, "initializer_range": 1.5}),
    "granitehybrid as Bamba": ("granitemoehybrid", {**HYBRID_GRANITE, **NO_EXPERTS,
        "attention_multiplier": 8**-0.5}),
    "nemotron_h_moe with latent experts": ("nemotron_h", {**NEMOTRON_H,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"], "moe_latent_size": 12}),
}  # fmt: skip
