"""GGUF architectures with experts, convolutions or gated delta nets, as transformers models."""

from collections.abc import Mapping
from dataclasses import replace

from kleash.models.gguf.architectures import PROJECTIONS, SHAPE_SETTINGS, GGUFArchitecture
from kleash.models.gguf.dense_architectures import GRANITE_SCALES, LLAMA_BIASES, RMS_NORM, STATE_SPACE_SIZES
from kleash.models.gguf.expert_settings import (
    adjust_deepseek2,
    adjust_deepseek3,
    adjust_ernie_experts,
    adjust_falcon_h1,
    adjust_glm4_experts,
    adjust_granite_hybrid,
    adjust_lfm2,
    adjust_lfm2_experts,
    adjust_llama4,
    adjust_nemotron_h,
    adjust_routed_experts,
)
from kleash.models.gguf.family_settings import (
    adjust_gemma4,
    adjust_gpt_oss,
    adjust_granite,
    adjust_qwen3_next,
    adjust_qwen35,
)
from kleash.models.gguf.names import (
    EXPERTS,
    FALCON_H1_NAMES,
    GEMMA4_NAMES,
    GPT_OSS_NAMES,
    GRANITE_EXPERTS,
    GRANITE_HYBRID_NAMES,
    LATENT_ATTENTION,
    LFM2_EXPERTS,
    LINEAR_ATTENTION,
    LLAMA4_NAMES,
    MIXTRAL_EXPERTS,
    NEMOTRON_H_NAMES,
    QWEN3_NEXT_NAMES,
    ROUTED_EXPERTS,
)
from kleash.models.gguf.parameter_layouts import (
    drop_shared_kv,
    join_latent_projections,
    join_qwen3_next,
    log_of_negated,
    merge_gpt_oss_experts,
    merge_granite_experts,
    merge_llama4_experts,
    restore_convolutions,
    restore_granite_hybrid,
    restore_linear_attention,
    restore_state_space,
)

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
ROUTED_DEFAULTS = {
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 0,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": False,
}
GATING, LEADING_DENSE = "expert_gating_func", "leading_dense_block_count"
GEMMA4_SETTINGS = {
    "attention.sliding_window": "sliding_window",
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_count": "num_experts",
    "expert_used_count": "top_k_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
}
QWEN_EXPERTS = {"decoder_sparse_step": 1, "mlp_only_layers": []}
QWEN3_MOE = GGUFArchitecture(
    model_type="qwen3_moe",
    names=EXPERTS,
    settings=EXPERT_SETTINGS,
    constants={"norm_topk_prob": True, **QWEN_EXPERTS},
    biases={"attention_bias": PROJECTIONS},
    adjusted=frozenset(("n_deepstack_layers",)),
)
QWEN35 = GGUFArchitecture(
    model_type="qwen3_5_text",
    names=LINEAR_ATTENTION,
    settings={
        "ssm.conv_kernel": "linear_conv_kernel_dim",
        "ssm.state_size": "linear_key_head_dim",
        "ssm.group_count": "linear_num_key_heads",
        "ssm.time_step_rank": "linear_num_value_heads",
    },
    adjust=adjust_qwen35,
    norm_offset=1.0,
    norms_without_offset=frozenset(("ssm_norm",)),
    functions={"ssm_a": log_of_negated},
    arrange=restore_linear_attention,
)
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
    adjust=adjust_deepseek2,
    arrange=join_latent_projections,
    has_latent_attention=True,
)
LFM2 = GGUFArchitecture(
    model_type="lfm2",
    shapes={key: "norm_eps" if key == RMS_NORM else name for key, name in SHAPE_SETTINGS.items()},
    settings={"shortconv.l_cache": "conv_L_cache"},
    adjust=adjust_lfm2,
    listed=frozenset(("attention.head_count_kv",)),
    arrange=restore_convolutions,
)
MAMBA_SETTINGS = {
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.state_size": "mamba_d_state",
    "ssm.group_count": "mamba_n_groups",
    "ssm.time_step_rank": "mamba_n_heads",
}
NEMOTRON_H = GGUFArchitecture(
    model_type="nemotron_h",
    names=NEMOTRON_H_NAMES,
    shapes={key: "layer_norm_epsilon" if key == RMS_NORM else name for key, name in SHAPE_SETTINGS.items()},
    settings={
        **ROUTED_SETTINGS,
        "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
        "moe_latent_size": "moe_latent_size",
        "ssm.conv_kernel": "conv_kernel",
        "ssm.state_size": "ssm_state_size",
        "ssm.group_count": "n_groups",
    },
    adjusted=frozenset(("ssm.time_step_rank", "attention.layer_norm_epsilon", GATING)),
    biases={"attention_bias": PROJECTIONS, "mlp_bias": ("ffn_up", "ffn_down")},
    defaults={"n_group": 1, "topk_group": 1},
    adjust=adjust_nemotron_h,
    listed=frozenset(("attention.head_count_kv", "feed_forward_length")),
    interleaved_rope=True,
    functions={"ssm_a": log_of_negated},
    arrange=restore_state_space,
)
EXPERT_ARCHITECTURES: Mapping[str, GGUFArchitecture] = {
    "mixtral": GGUFArchitecture(
        model_type="mixtral",
        names=MIXTRAL_EXPERTS,
        settings={"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
        constants={"sliding_window": None},
        interleaved_rope=True,
    ),
    "qwen2moe": GGUFArchitecture(
        model_type="qwen2_moe",
        names=EXPERTS,
        settings=EXPERT_SETTINGS,
        constants={"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    "qwen3moe": QWEN3_MOE,
    "qwen3vlmoe": QWEN3_MOE,
    "gemma4": GGUFArchitecture(
        model_type="gemma4_text",
        names=GEMMA4_NAMES,
        settings=GEMMA4_SETTINGS,
        defaults={"hidden_size_per_layer_input": 0},
        adjust=adjust_gemma4,
        listed=frozenset(("feed_forward_length", "attention.head_count_kv")),
        arrange=drop_shared_kv,
        config_has_rope_factors=True,
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
        adjust=adjust_gpt_oss,
        arrange=merge_gpt_oss_experts,
    ),
    "qwen35moe": replace(
        QWEN35,
        model_type="qwen3_5_moe_text",
        names=LINEAR_ATTENTION | EXPERTS,
        settings={**QWEN35.settings, **EXPERT_SETTINGS},
    ),
    "qwen35": QWEN35,
    "qwen3next": replace(
        QWEN35,
        model_type="qwen3_next",
        names=QWEN3_NEXT_NAMES,
        settings={**QWEN35.settings, **EXPERT_SETTINGS},
        constants={"norm_topk_prob": True, **QWEN_EXPERTS},
        adjust=adjust_qwen3_next,
        arrange=join_qwen3_next,
    ),
    "deepseek2": DEEPSEEK2,
    "deepseek3": replace(DEEPSEEK2, model_type="deepseek_v3", adjust=adjust_deepseek3),
    "glm4moe": GGUFArchitecture(
        model_type="glm4_moe",
        names=ROUTED_EXPERTS,
        settings=ROUTED_SETTINGS,
        defaults=ROUTED_DEFAULTS,
        adjusted=frozenset((GATING, LEADING_DENSE)),
        biases={"attention_bias": PROJECTIONS[:3]},
        present={"use_qk_norm": "attn_q_norm.weight"},
        adjust=adjust_glm4_experts,
    ),
    "dots1": GGUFArchitecture(
        model_type="dots1",
        names=ROUTED_EXPERTS,
        settings=ROUTED_SETTINGS,
        defaults=ROUTED_DEFAULTS,
        adjusted=frozenset((GATING, LEADING_DENSE)),
        biases={"attention_bias": PROJECTIONS},
        adjust=adjust_routed_experts,
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
        adjust=adjust_ernie_experts,
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
    "granitemoe": GGUFArchitecture(
        model_type="granitemoeshared",
        names=GRANITE_EXPERTS,
        settings={
            **GRANITE_SCALES,
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_shared_feed_forward_length": "shared_intermediate_size",
        },
        biases={"attention_bias": PROJECTIONS},
        adjusted=STATE_SPACE_SIZES,
        adjust=adjust_granite,
        interleaved_rope=True,
        arrange=merge_granite_experts,
    ),
    "granitehybrid": GGUFArchitecture(
        model_type="granitemoehybrid",
        names=GRANITE_HYBRID_NAMES,
        settings={
            **GRANITE_SCALES,
            **MAMBA_SETTINGS,
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_shared_feed_forward_length": "shared_intermediate_size",
        },
        biases={"attention_bias": PROJECTIONS},
        defaults={"num_local_experts": 0},
        adjust=adjust_granite_hybrid,
        listed=frozenset(("attention.head_count_kv",)),
        interleaved_rope=True,
        functions={"ssm_a": log_of_negated},
        arrange=restore_granite_hybrid,
    ),
    "falcon-h1": GGUFArchitecture(
        model_type="falcon_h1",
        names=FALCON_H1_NAMES,
        settings=MAMBA_SETTINGS,
        biases=LLAMA_BIASES,
        constants={"mamba_norm_before_gate": False},
        present={"mamba_rms_norm": "ssm_norm.weight"},
        adjust=adjust_falcon_h1,
        functions={"ssm_a": log_of_negated},
        arrange=restore_state_space,
    ),
    "nemotron_h": NEMOTRON_H,
    "nemotron_h_moe": NEMOTRON_H,
    "llama4": GGUFArchitecture(
        model_type="llama4_text",
        names=LLAMA4_NAMES,
        settings={
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
            "interleave_moe_layer_step": "interleave_moe_layer_step",
        },
        adjusted=frozenset(("expert_feed_forward_length", "attention.sliding_window")),
        adjust=adjust_llama4,
        arrange=merge_llama4_experts,
    ),
    "lfm2": LFM2,
    "lfm2moe": replace(
        LFM2,
        model_type="lfm2_moe",
        names=LFM2_EXPERTS,
        settings={
            **LFM2.settings,
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
            LEADING_DENSE: "num_dense_layers",
        },
        adjusted=frozenset((GATING,)),
        constants={"norm_topk_prob": True, "routed_scaling_factor": 1.0},
        present={"use_expert_bias": "exp_probs_b.bias"},
        adjust=adjust_lfm2_experts,
    ),
}
"""``general.architecture`` → mapping; a "llama" with experts is "mixtral", a "deepseek2" with biases of scores
"deepseek3"."""
