"""Granite, and models with Mamba 2 or convolutions: Granite 4, Falcon H1, Nemotron H, LFM2.

What differs from the checkpoint:

1. Decays are -exp(A_log), in columns; norms of Mamba have rows by groups; convolutions have no dimension for the one
   channel of a group.
2. Granite has gate and up projections of experts and of the shared MLP apart.
3. Falcon H1's multipliers are part of the weights.
4. The kinds of layers follow from the heads of keys (0 for none), in Nemotron H from the tensors.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from kleash.checkpoints.gguf.architectures import (
    GATING,
    LEADING_DENSE,
    LLAMA_BIASES,
    PROJECTIONS,
    RMS_NORM,
    ROUTED_SETTINGS,
    SHAPE_SETTINGS,
    SIGMOID,
    GGUFArchitecture,
    Settings,
    TensorSummary,
    change_parameters,
    check_gating,
    join_parameters,
    log_of_negated,
    restore_convolutions,
)
from kleash.errors import ModelError

GRANITE_SCALES = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
GRANITE_EXPERT_SETTINGS = {
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_shared_feed_forward_length": "shared_intermediate_size",
}
STATE_SPACE_SIZES = frozenset(
    f"ssm.{name}" for name in ("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank")
)
EXPERT_SIZES = frozenset(("expert_count", "expert_used_count", "expert_shared_feed_forward_length"))
"""With ``STATE_SPACE_SIZES``, settings that files of Granite 4 have without having such layers, too."""
GRANITE_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_gate_exps": "block_sparse_moe.gate",
    "ffn_up_exps": "block_sparse_moe.up",
    "ffn_down_exps": "block_sparse_moe.output_linear",
    "ffn_gate_shexp": "shared_mlp.gate",
    "ffn_up_shexp": "shared_mlp.up",
    "ffn_down_shexp": "shared_mlp.output_linear",
}
"""Gate and up projections are one parameter; ``JOINED_GRANITE_EXPERTS``."""
JOINED_GRANITE_EXPERTS = [
    partial(
        join_parameters,
        parts=(f".{place}.gate.weight", f".{place}.up.weight"),
        joined=f".{place}.input_linear.weight",
        join=lambda *both: torch.cat(both, dim=-2),
    )
    for place in ("block_sparse_moe", "shared_mlp")
]
"""Put gate and up projections one after the other."""
GRANITE_HYBRID_NAMES = {
    **GRANITE_EXPERTS,
    "ffn_gate": "shared_mlp.gate",
    "ffn_up": "shared_mlp.up",
    "ffn_down": "shared_mlp.output_linear",
    "ssm_dt.bias": "mamba.dt_bias",
}
MAMBA_SETTINGS = {
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.state_size": "mamba_d_state",
    "ssm.group_count": "mamba_n_groups",
    "ssm.time_step_rank": "mamba_n_heads",
}
FALCON_H1_NAMES = {"ssm_dt.bias": "mamba.dt_bias", "ffn_norm": "pre_ff_layernorm.weight"}
"""The norm has no suffix in files."""
NEMOTRON_H_NAMES = {
    "attn_q": "mixer.q_proj",
    "attn_k": "mixer.k_proj",
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    "ffn_up_exps": "mixer.experts.{expert}.up_proj",
    "ffn_down_exps": "mixer.experts.{expert}.down_proj",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
    "ssm_in": "mixer.in_proj",
    "ssm_conv1d": "mixer.conv1d",
    "ssm_dt.bias": "mixer.dt_bias",
    "ssm_a": "mixer.A_log",
    "ssm_d": "mixer.D",
    "ssm_norm": "mixer.norm",
    "ssm_out": "mixer.out_proj",
}
LFM2_EXPERTS = {
    "exp_probs_b.bias": "feed_forward.expert_bias",
    "ffn_gate_exps": "feed_forward.experts.{expert}.w1",
    "ffn_up_exps": "feed_forward.experts.{expert}.w3",
    "ffn_down_exps": "feed_forward.experts.{expert}.w2",
}


def adjust_granite(attributes: dict[str, Any], settings: Settings, tensors: TensorSummary) -> None:
    """Set the scale of attention by the size of a head, unless a file says otherwise.

    Raises:
        ModelError: if the file switches positions off, which transformers' Granite cannot.
    """
    attributes.setdefault("attention_multiplier", attributes["head_dim"] ** -0.5)
    if not settings.get("rope.scaling.finetuned", True):
        raise ModelError(
            "its positions are switched off (rope.scaling.finetuned), which is read of granitehybrid only"
        )


def adjust_granite_hybrid(attributes: dict[str, Any], settings: Settings, tensors: TensorSummary) -> None:
    """Set Mamba 2 in layers without heads of keys, and the shared MLP's width in dense models, which have it alone."""
    attributes["layer_types"] = _mixed_layers(attributes)
    attributes.setdefault("attention_multiplier", attributes["head_dim"] ** -0.5)
    has_positions = settings.get("rope.scaling.finetuned", True)
    attributes["position_embedding_type"] = "rope" if has_positions else "nope"
    if not attributes["num_local_experts"]:
        attributes["shared_intermediate_size"] = tensors.shapes["blk.0.ffn_gate.weight"][0]


flatten_state_space = partial(
    change_parameters, ends=(".A_log", ".D", ".mamba.norm.weight", ".mixer.norm.weight"), by=torch.flatten
)
"""Makes vectors of the parameters of Mamba 2 that a file has as columns of decays, and rows of norms by groups."""


def adjust_nemotron_h(attributes: dict[str, Any], settings: Settings, tensors: TensorSummary) -> None:
    """Set the kind of each layer by its tensors: Mamba 2, attention, an MLP or experts."""
    kinds = {
        "ssm_in": "linear_attention",
        "attn_output": "full_attention",
        "ffn_gate_inp": "moe",
        "ffn_up": "mlp",
    }
    attributes["layers_block_type"] = [
        next((kind for part, kind in kinds.items() if f"blk.{number}.{part}.weight" in tensors.shapes), "mlp")
        for number in range(attributes.pop("num_hidden_layers"))
    ]
    widths = [shape[0] for name, shape in tensors.shapes.items() if name.endswith(".ffn_up.weight")]
    attributes["intermediate_size"] = max(widths, default=attributes["hidden_size"])
    keys = attributes["num_key_value_heads"]
    attributes["num_key_value_heads"] = max(keys) if isinstance(keys, list) else keys
    heads = settings["ssm.time_step_rank"]
    attributes |= {"mamba_num_heads": heads, "mamba_head_dim": settings["ssm.inner_size"] // heads}


def set_state_space(attributes: dict[str, Any], settings: Settings, tensors: TensorSummary) -> None:
    """Set the heads of Mamba 2, and how much wider it is than the hidden states."""
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


def adjust_lfm2(attributes: dict[str, Any], settings: Settings, tensors: TensorSummary) -> None:
    """Set a convolution in layers without heads of keys."""
    kinds = _mixed_layers(attributes)
    attributes["layer_types"] = ["conv" if kind == "linear_attention" else kind for kind in kinds]
    attributes["block_auto_adjust_ff_dim"] = False


NEMOTRON_H = GGUFArchitecture(
    model_type="nemotron_h",
    names=NEMOTRON_H_NAMES,
    # Files with experts may have the epsilon of their RMS norms as that of LayerNorms alone.
    shapes={"attention.layer_norm_epsilon": "layer_norm_epsilon"}
    | {key: "layer_norm_epsilon" if key == RMS_NORM else name for key, name in SHAPE_SETTINGS.items()},
    settings={
        **ROUTED_SETTINGS,
        "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
        "moe_latent_size": "moe_latent_size",
        "ssm.conv_kernel": "conv_kernel",
        "ssm.state_size": "ssm_state_size",
        "ssm.group_count": "n_groups",
    },
    adjusted=frozenset(("ssm.time_step_rank", GATING)),
    biases={"attention_bias": PROJECTIONS, "mlp_bias": ("ffn_up", "ffn_down")},
    defaults={"n_group": 1, "topk_group": 1},
    adjust=[adjust_nemotron_h],
    listed=frozenset(("attention.head_count_kv", "feed_forward_length")),
    interleaved_rope=True,
    functions={"ssm_a": log_of_negated},
    arrange=[restore_convolutions, flatten_state_space],
)
LFM2 = GGUFArchitecture(
    model_type="lfm2",
    shapes={key: "norm_eps" if key == RMS_NORM else name for key, name in SHAPE_SETTINGS.items()},
    settings={"shortconv.l_cache": "conv_L_cache"},
    adjust=[adjust_lfm2],
    listed=frozenset(("attention.head_count_kv",)),
    arrange=[restore_convolutions],
)
HYBRID_FAMILIES: Mapping[str, GGUFArchitecture] = {
    "granite": GGUFArchitecture(
        model_type="granite",
        settings=GRANITE_SCALES,
        adjusted=STATE_SPACE_SIZES | EXPERT_SIZES,
        biases=LLAMA_BIASES,
        adjust=[adjust_granite],
        interleaved_rope=True,
    ),
    "granitemoe": GGUFArchitecture(
        model_type="granitemoeshared",
        names=GRANITE_EXPERTS,
        settings={
            **GRANITE_SCALES,
            **GRANITE_EXPERT_SETTINGS,
        },
        biases={"attention_bias": PROJECTIONS},
        adjusted=STATE_SPACE_SIZES,
        adjust=[adjust_granite],
        interleaved_rope=True,
        arrange=JOINED_GRANITE_EXPERTS,
    ),
    "granitehybrid": GGUFArchitecture(
        model_type="granitemoehybrid",
        names=GRANITE_HYBRID_NAMES,
        settings={
            **GRANITE_SCALES,
            **MAMBA_SETTINGS,
            **GRANITE_EXPERT_SETTINGS,
        },
        biases={"attention_bias": PROJECTIONS},
        defaults={"num_local_experts": 0},
        adjust=[set_state_space, adjust_granite_hybrid],
        listed=frozenset(("attention.head_count_kv",)),
        interleaved_rope=True,
        functions={"ssm_a": log_of_negated},
        arrange=[*JOINED_GRANITE_EXPERTS, restore_convolutions, flatten_state_space],
    ),
    "falcon-h1": GGUFArchitecture(
        model_type="falcon_h1",
        names=FALCON_H1_NAMES,
        settings=MAMBA_SETTINGS | {"ssm.inner_size": "mamba_d_ssm"},
        biases=LLAMA_BIASES,
        constants={"mamba_norm_before_gate": False},
        present={"mamba_rms_norm": "ssm_norm.weight"},
        adjust=[set_state_space],
        functions={"ssm_a": log_of_negated},
        arrange=[restore_convolutions, flatten_state_space],
    ),
    "nemotron_h": NEMOTRON_H,
    "nemotron_h_moe": NEMOTRON_H,
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
        adjust=[partial(check_gating, expected=SIGMOID), adjust_lfm2],
    ),
}
"""``general.architecture``, or a kind of it that ``find_architecture`` tells apart → mapping."""
