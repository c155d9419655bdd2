"""Llama and other models with an MLP in each layer: Mistral, Mixtral, OLMo, GLM 4, Cohere, Phi, GPT-2 and others.

What differs from the checkpoint:

1. Rows of Llama's query and key projections are in the order of llama.cpp's rotary embedding (``interleaved_rope``).
2. A "llama" with experts is Mixtral; a "mistral3" with scaled queries is Ministral 3, whose queries are scaled by
   their positions.
3. Llama 4 has gate and up projections apart, experts transposed, and no settings of its chunks and of the layers
   without positions.
4. An "olmo2" with a sliding window is OLMo 3; a "glm4" with sections of positions is GLM-4V, whose rotated halves are
   in another order.
5. Matrices of GPT-2 are transposed; GPT-NeoX has all queries before all keys and values.
6. Nemotron's norms have 1 added.
7. Phi 3's lists of factors (LongRoPE) are tensors.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kleash.checkpoints.gguf.architectures import (
    LLAMA_BIASES,
    LONG_ROPE,
    MLP_PROJECTIONS,
    PROJECTIONS,
    RMS_NORM,
    GGUFArchitecture,
    Settings,
    TensorSummary,
    join_parameters,
    layer_norm_shapes,
    set_layer_types,
    set_rope,
    transpose,
)
from kleash.errors import ModelError

LLAMA = GGUFArchitecture(model_type="llama", biases=LLAMA_BIASES, interleaved_rope=True)
MIXTRAL_EXPERTS = {
    "ffn_gate_exps": "block_sparse_moe.experts.{expert}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{expert}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{expert}.w2",
}
LLAMA4_NAMES = {
    "ffn_gate_exps": "feed_forward.experts.gate_proj",
    "ffn_up_exps": "feed_forward.experts.up_proj",
    "ffn_down_exps.weight": "feed_forward.experts.down_proj",
}
LLAMA4_CHUNK, LLAMA4_ROPE_INTERVAL, MAVERICK_EXPERTS = 8192, 4, 128
"""Constants of Llama 4 that llama.cpp does not store."""


def adjust_ministral3(attributes: dict[str, Any], settings: Settings, tensors: TensorSummary) -> None:
    """Set the factor of queries, 1 + beta log(1 + floor(position / original context)), and no sliding window."""
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


def adjust_llama4(attributes: dict[str, Any], settings: Settings, tensors: TensorSummary) -> None:
    """Set the attributes of Llama 4 that a file lacks or names otherwise: widths, chunks, layers without positions."""
    if settings.get("attention.sliding_window") == 0:
        raise ModelError("its attention.sliding_window is 0 (MobileLLM), which is not read of Llama 4")
    count = attributes["num_hidden_layers"]
    attributes |= {
        "intermediate_size_mlp": attributes["intermediate_size"],
        "intermediate_size": settings["expert_feed_forward_length"],
        "attention_chunk_size": LLAMA4_CHUNK,
        "floor_scale": LLAMA4_CHUNK,
        "attn_scale": 0.1,  # constant; not in the file
        "attn_temperature_tuning": True,
        "use_qk_norm": attributes["num_local_experts"] != MAVERICK_EXPERTS,
        "no_rope_layers": [int((number + 1) % LLAMA4_ROPE_INTERVAL != 0) for number in range(count)],
    }


LLAMA_FAMILY: Mapping[str, GGUFArchitecture] = {
    "llama": LLAMA,
    "mistral3": LLAMA,
    "ministral3": GGUFArchitecture(
        model_type="ministral3",
        adjust=[adjust_ministral3],
        interleaved_rope=True,
    ),
    "mixtral": GGUFArchitecture(
        model_type="mixtral",
        names=MIXTRAL_EXPERTS,
        settings={"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
        constants={"sliding_window": None},
        interleaved_rope=True,
    ),
    "smollm3": replace(LLAMA, model_type="smollm3"),
    "arcee": replace(LLAMA, model_type="arcee"),
    "llama4": GGUFArchitecture(
        model_type="llama4_text",
        names=LLAMA4_NAMES,
        settings={
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
            "interleave_moe_layer_step": "interleave_moe_layer_step",
        },
        adjusted=frozenset(("expert_feed_forward_length", "attention.sliding_window")),
        adjust=[adjust_llama4],
        arrange=[
            partial(
                join_parameters,
                parts=(".experts.gate_proj.weight", ".experts.up_proj.weight"),
                joined=".experts.gate_up_proj",
                join=lambda gate, up: torch.cat([gate, up], dim=1).transpose(1, 2).contiguous(),
            ),
            partial(transpose, ends=(".experts.down_proj",)),
        ],
    ),
}
"""``general.architecture``, or a kind of it that ``find_architecture`` tells apart → mapping."""


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
OLMO_EPSILON = 1e-5
STABLELM_NAMES = {
    "attn_q_norm": "self_attn.q_layernorm.norms.{expert}",
    "attn_k_norm": "self_attn.k_layernorm.norms.{expert}",
}
"""Norms of the heads of StableLM 2 12B, which are rows of one tensor."""


def adjust_phi3(attributes: dict[str, Any], settings: Settings, tensors: TensorSummary) -> None:
    """Set a sliding window of 0 to none, and the two lists of factors that scale the positions (LongRoPE)."""
    attributes["sliding_window"] = attributes.get("sliding_window") or None
    if tensors.factors.keys().isdisjoint(LONG_ROPE):
        return
    short, long = (tensors.factors[name] for name in LONG_ROPE)
    length = settings.get("rope.scaling.original_context_length", attributes["max_position_embeddings"])
    attributes["original_max_position_embeddings"] = length
    set_rope(
        attributes,
        rope_type="longrope",
        short_factor=list(short),
        long_factor=list(long),
        attention_factor=settings.get("rope.scaling.attn_factor", 1.0),
        original_max_position_embeddings=length,
    )


def adjust_olmo(attributes: dict[str, Any], settings: Settings, tensors: TensorSummary) -> None:
    """Set no epsilon of the norms, since transformers fixes it: remove it, and refuse another value."""
    epsilon = attributes.pop("layer_norm_eps")
    if abs(epsilon - OLMO_EPSILON) > OLMO_EPSILON / 1000:
        raise ModelError(
            f"its attention.layer_norm_epsilon is {epsilon:.3g}, and that of OLMo {OLMO_EPSILON}"
        )


def adjust_olmo3(attributes: dict[str, Any], settings: Settings, tensors: TensorSummary) -> None:
    """Set positions that layers with a sliding window do not scale."""
    local = settings.get("rope.freq_base_swa", attributes["rope_theta"])
    set_rope(attributes)
    attributes["rope_parameters"] = {
        "sliding_attention": {"rope_type": "default", "rope_theta": local},
        "full_attention": attributes["rope_parameters"],
    }


def adjust_exaone4(attributes: dict[str, Any], settings: Settings, tensors: TensorSummary) -> None:
    """Set no sliding window in any layer of small models."""
    attributes["sliding_window"] = attributes.get("sliding_window") or None
    if attributes["sliding_window"] is None:
        attributes["layer_types"] = ["full_attention"] * attributes["num_hidden_layers"]


def interleave_neox_heads(parameters: dict[str, Tensor], attributes: Mapping[str, Any]) -> None:
    """Put queries, keys and values of GPT-NeoX in turns, head by head; a file has all queries first."""
    heads = attributes["num_attention_heads"]
    for name in [name for name in parameters if ".query_key_value." in name]:
        value = parameters[name]
        if len(value) % (3 * heads) == 0:
            parts = value.reshape(3, heads, -1, *value.shape[1:])
            parameters[name] = parts.transpose(0, 1).reshape(value.shape)


def restore_glm4v_heads(parameters: dict[str, Tensor], attributes: Mapping[str, Any]) -> None:
    """Put pairs of the rotated part of a head next to each other; files of GLM-4V have their first numbers first."""
    head_dim, rotary = (
        attributes["head_dim"],
        int(attributes["head_dim"] * attributes["partial_rotary_factor"]),
    )
    for name in [name for name in parameters if ".q_proj." in name or ".k_proj." in name]:
        value = parameters[name]
        if len(value) % head_dim == 0:
            heads = value.reshape(-1, head_dim, *value.shape[1:])
            halves = heads[:, :rotary].unflatten(1, (2, -1))
            pairs = halves.transpose(1, 2).flatten(1, 2)
            parameters[name] = torch.cat([pairs, heads[:, rotary:]], dim=1).reshape(value.shape)


OLMO2 = GGUFArchitecture(
    model_type="olmo2",
    biases={"attention_bias": PROJECTIONS},
    adjusted=frozenset(("attention.sliding_window",)),
)
DENSE_FAMILIES: Mapping[str, GGUFArchitecture] = {
    "olmo": GGUFArchitecture(
        model_type="olmo",
        shapes=layer_norm_shapes("layer_norm_eps"),
        settings={"attention.clamp_kqv": "clip_qkv"},
        adjust=[adjust_olmo],
        interleaved_rope=True,
    ),
    "olmo2": OLMO2,
    "olmo3": replace(
        OLMO2,
        model_type="olmo3",
        settings={"attention.sliding_window": "sliding_window"},
        adjust=[partial(set_layer_types, period=4), adjust_olmo3],
    ),
    "glm4": GLM4,
    "glm4v": replace(GLM4, arrange=[restore_glm4v_heads]),
    "chatglm": GGUFArchitecture(
        model_type="glm",
        biases={"attention_bias": PROJECTIONS[:3]},
        adjust=[set_rope],
    ),
    "command-r": COHERE,
    "cohere2": replace(
        COHERE,
        model_type="cohere2",
        shapes={**COHERE.shapes, "attention.sliding_window": "sliding_window"},
        present={},
        adjust=[partial(set_layer_types, period=4)],
    ),
    "phi2": GGUFArchitecture(
        model_type="phi",
        shapes=layer_norm_shapes("layer_norm_eps"),
        adjust=[set_rope],
    ),
    "phi3": GGUFArchitecture(
        model_type="phi3",
        settings={"attention.sliding_window": "sliding_window"},
        adjust=[adjust_phi3],
        factors=LONG_ROPE,
    ),
    "exaone4": GGUFArchitecture(
        model_type="exaone4",
        settings={"attention.sliding_window": "sliding_window"},
        adjust=[partial(set_layer_types, period=4), adjust_exaone4],
    ),
    "stablelm": GGUFArchitecture(
        model_type="stablelm",
        names=STABLELM_NAMES,
        shapes=layer_norm_shapes("layer_norm_eps"),
        settings={"use_parallel_residual": "use_parallel_residual"},
        biases={"use_qkv_bias": PROJECTIONS[:3]},
        present={"qk_layernorm": "attn_q_norm.weight"},
        adjust=[set_rope],
    ),
    "nemotron": GGUFArchitecture(
        model_type="nemotron",
        shapes=layer_norm_shapes("norm_eps"),
        biases=LLAMA_BIASES,
        adjusted=frozenset((RMS_NORM,)),
        adjust=[set_rope],
        norm_offset=1.0,
    ),
    "starcoder2": GGUFArchitecture(
        model_type="starcoder2",
        shapes=layer_norm_shapes("norm_epsilon"),
        constants={"sliding_window": None},
        biases={"use_bias": (*PROJECTIONS, *MLP_PROJECTIONS)},
    ),
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
    "gpt2": GGUFArchitecture(
        model_type="gpt2",
        shapes=layer_norm_shapes("layer_norm_epsilon") | {"feed_forward_length": "n_inner"},
        arrange=[partial(transpose, ends=("c_attn.weight", "c_proj.weight", "c_fc.weight"))],
    ),
    "gptneox": GGUFArchitecture(
        model_type="gpt_neox",
        shapes=layer_norm_shapes("layer_norm_eps"),
        settings={"use_parallel_residual": "use_parallel_residual"},
        adjust=[set_rope],
        arrange=[interleave_neox_heads],
    ),
}
"""``general.architecture``, or a kind of it that ``find_architecture`` tells apart → mapping."""
