"""Llama, and the models of its kind: Mistral, Mixtral, SmolLM 3, Arcee, Llama 4.

What differs from the checkpoint:

1. Rows of the query and key projections are in the order of llama.cpp's rotary embedding (``interleaved_rope``).
2. A "llama" with experts is Mixtral; a "mistral3" with scaled queries is Ministral 3, whose queries
   are scaled by their positions.
3. Llama 4 has gate and up projections apart, experts transposed, and no settings of its chunks and of the
   layers without positions.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kleash.checkpoints.gguf.architectures import LLAMA_BIASES, GGUFArchitecture, Settings, TensorSummary
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
    """Queries are multiplied by 1 + beta log(1 + floor(position / original context))."""
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


def merge_llama4_experts(parameters: dict[str, Tensor], attributes: Mapping[str, Any]) -> None:
    """Put gate and up projections of Llama 4 one after the other, and transpose to [experts, inputs, outputs]."""
    for name in [name for name in parameters if name.endswith(".experts.gate_proj.weight")]:
        stem = name.removesuffix("gate_proj.weight")
        up = parameters.pop(f"{stem}up_proj.weight", None)
        gate = parameters.pop(name)
        if up is not None and up.shape == gate.shape:
            merged = torch.cat([gate, up], dim=1)
            parameters[f"{stem}gate_up_proj"] = merged.transpose(1, 2).contiguous()
    for name in [name for name in parameters if name.endswith(".experts.down_proj")]:
        parameters[name] = parameters[name].transpose(1, 2).contiguous()


LLAMA_FAMILY: Mapping[str, GGUFArchitecture] = {
    "llama": LLAMA,
    "mistral3": LLAMA,
    "ministral3": GGUFArchitecture(
        model_type="ministral3",
        adjust=adjust_ministral3,
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
        adjust=adjust_llama4,
        arrange=merge_llama4_experts,
    ),
}
"""``general.architecture``, or a kind of it that ``find_architecture`` tells apart → mapping."""
