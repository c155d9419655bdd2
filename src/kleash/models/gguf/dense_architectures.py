"""GGUF architectures whose layers have an MLP each, as transformers models."""

from collections.abc import Mapping
from dataclasses import replace

from kleash.models.gguf.architectures import (
    MLP_PROJECTIONS,
    PROJECTIONS,
    SHAPE_SETTINGS,
    GGUFArchitecture,
)
from kleash.models.gguf.family_settings import (
    adjust_cohere2,
    adjust_exaone4,
    adjust_gemma2,
    adjust_gemma3,
    adjust_gemma3n,
    adjust_gpt2,
    adjust_granite,
    adjust_ministral3,
    adjust_olmo,
    adjust_olmo3,
    adjust_partial_rope,
    adjust_phi3,
    refuse_sliding_window,
)
from kleash.models.gguf.names import GEMMA3N_NAMES, STABLELM_NAMES
from kleash.models.gguf.parameter_layouts import (
    drop_shared_kv,
    interleave_neox_heads,
    restore_glm4v_heads,
    transpose_gpt2,
)

RMS_NORM = "attention.layer_norm_rms_epsilon"


def layer_norm_shapes(attribute: str) -> dict[str, str]:
    """The settings of shapes of a model with LayerNorms, of which ``attribute`` has the epsilon."""
    shapes = {key: name for key, name in SHAPE_SETTINGS.items() if key != RMS_NORM}
    return shapes | {"attention.layer_norm_epsilon": attribute}


ATTENTION_CAP, LOGIT_CAP = 50.0, 30.0
"""Caps of Gemma 2 and 3n, which llama.cpp applies if a file has none, as those of June 2024."""
LLAMA_BIASES = {"attention_bias": PROJECTIONS, "mlp_bias": MLP_PROJECTIONS}
GRANITE_SCALES = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
STATE_SPACE_SIZES = frozenset(
    f"ssm.{name}" for name in ("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank")
)
EXPERT_SIZES = frozenset(("expert_count", "expert_used_count", "expert_shared_feed_forward_length"))
"""With ``STATE_SPACE_SIZES``, settings that files of Granite 4 have without having such layers, too."""
LLAMA = GGUFArchitecture(model_type="llama", biases=LLAMA_BIASES, interleaved_rope=True)
QWEN2 = GGUFArchitecture(model_type="qwen2")
QWEN3 = GGUFArchitecture(
    model_type="qwen3",
    biases={"attention_bias": PROJECTIONS},
    adjusted=frozenset(("n_deepstack_layers",)),
)
"""Qwen 3, and the language model of Qwen 3-VL: text has one position for all sections of the rotary embedding."""
OLMO2 = GGUFArchitecture(
    model_type="olmo2",
    biases={"attention_bias": PROJECTIONS},
    adjust=refuse_sliding_window,
)
GLM4 = GGUFArchitecture(
    model_type="glm4",
    biases={"attention_bias": PROJECTIONS},
)
COHERE = GGUFArchitecture(
    model_type="cohere",
    shapes=layer_norm_shapes("layer_norm_eps"),
    settings={"logit_scale": "logit_scale"},
    biases={"attention_bias": PROJECTIONS},
    present={"use_qk_norm": "attn_q_norm.weight"},
)
GEMMA2 = GGUFArchitecture(
    model_type="gemma2",
    settings={
        "attention.sliding_window": "sliding_window",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    defaults={"attn_logit_softcapping": ATTENTION_CAP, "final_logit_softcapping": LOGIT_CAP},
    adjust=adjust_gemma2,
    norm_offset=1.0,
)
DENSE_ARCHITECTURES: Mapping[str, GGUFArchitecture] = {
    "llama": LLAMA,
    "mistral3": LLAMA,
    "smollm3": replace(LLAMA, model_type="smollm3"),
    "granite": GGUFArchitecture(
        model_type="granite",
        settings=GRANITE_SCALES,
        adjusted=STATE_SPACE_SIZES | EXPERT_SIZES,
        biases=LLAMA_BIASES,
        adjust=adjust_granite,
        interleaved_rope=True,
    ),
    "qwen2": QWEN2,
    "qwen2vl": QWEN2,
    "qwen3": QWEN3,
    "qwen3vl": QWEN3,
    "olmo2": OLMO2,
    "olmo3": replace(
        OLMO2,
        model_type="olmo3",
        settings={"attention.sliding_window": "sliding_window"},
        adjust=adjust_olmo3,
    ),
    "gemma2": GEMMA2,
    "gemma3": GGUFArchitecture(
        model_type="gemma3_text",
        settings={
            "attention.sliding_window": "sliding_window",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        adjust=adjust_gemma3,
        norm_offset=1.0,
    ),
    "phi3": GGUFArchitecture(
        model_type="phi3",
        settings={"attention.sliding_window": "sliding_window"},
        adjust=adjust_phi3,
        has_long_rope=True,
    ),
    "gemma": GGUFArchitecture(model_type="gemma", norm_offset=1.0),
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
        adjust=adjust_gemma3n,
        listed=frozenset(("feed_forward_length",)),
        arrange=drop_shared_kv,
    ),
    "glm4": GLM4,
    "glm4v": replace(GLM4, arrange=restore_glm4v_heads),
    "ministral3": GGUFArchitecture(
        model_type="ministral3",
        adjust=adjust_ministral3,
        interleaved_rope=True,
    ),
    "arcee": replace(LLAMA, model_type="arcee"),
    "seed_oss": GGUFArchitecture(
        model_type="seed_oss",
        biases={
            "attention_bias": PROJECTIONS[:3],
            "attention_out_bias": PROJECTIONS[3:],
            "mlp_bias": MLP_PROJECTIONS,
        },
    ),
    "ernie4_5": GGUFArchitecture(
        model_type="ernie4_5", biases={"use_bias": (*PROJECTIONS, *MLP_PROJECTIONS)}
    ),
    "hunyuan-dense": GGUFArchitecture(
        model_type="hunyuan_v1_dense",
        biases={"attention_bias": PROJECTIONS},
    ),
    "chatglm": GGUFArchitecture(
        model_type="glm",
        biases={"attention_bias": PROJECTIONS[:3]},
        adjust=adjust_partial_rope,
    ),
    "exaone4": GGUFArchitecture(
        model_type="exaone4",
        settings={"attention.sliding_window": "sliding_window"},
        adjust=adjust_exaone4,
    ),
    "command-r": COHERE,
    "cohere2": replace(
        COHERE,
        model_type="cohere2",
        settings={**COHERE.settings, "attention.sliding_window": "sliding_window"},
        present={},
        adjust=adjust_cohere2,
    ),
    "olmo": GGUFArchitecture(
        model_type="olmo",
        shapes=layer_norm_shapes("layer_norm_eps"),
        settings={"attention.clamp_kqv": "clip_qkv"},
        adjust=adjust_olmo,
        interleaved_rope=True,
    ),
    "nemotron": GGUFArchitecture(
        model_type="nemotron",
        shapes=layer_norm_shapes("norm_eps"),
        biases=LLAMA_BIASES,
        adjusted=frozenset((RMS_NORM,)),
        adjust=adjust_partial_rope,
        norm_offset=1.0,
    ),
    "starcoder2": GGUFArchitecture(
        model_type="starcoder2",
        shapes=layer_norm_shapes("norm_epsilon"),
        constants={"sliding_window": None},
        biases={"use_bias": (*PROJECTIONS, *MLP_PROJECTIONS)},
    ),
    "stablelm": GGUFArchitecture(
        model_type="stablelm",
        names=STABLELM_NAMES,
        shapes=layer_norm_shapes("layer_norm_eps"),
        settings={"use_parallel_residual": "use_parallel_residual"},
        biases={"use_qkv_bias": PROJECTIONS[:3]},
        present={"qk_layernorm": "attn_q_norm.weight"},
        adjust=adjust_partial_rope,
    ),
    "phi2": GGUFArchitecture(
        model_type="phi",
        shapes=layer_norm_shapes("layer_norm_eps"),
        adjust=adjust_partial_rope,
    ),
    "gpt2": GGUFArchitecture(
        model_type="gpt2",
        shapes=layer_norm_shapes("layer_norm_epsilon"),
        adjust=adjust_gpt2,
        arrange=transpose_gpt2,
    ),
    "gptneox": GGUFArchitecture(
        model_type="gpt_neox",
        shapes=layer_norm_shapes("layer_norm_eps"),
        settings={"use_parallel_residual": "use_parallel_residual"},
        adjust=adjust_partial_rope,
        arrange=interleave_neox_heads,
    ),
}
"""``general.architecture`` → mapping; a "mistral3" with scaled queries is "ministral3", an "olmo2" with a
sliding window "olmo3"."""
