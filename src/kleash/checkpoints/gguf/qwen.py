"""Qwen 2 to 3.5, with and without experts, and the language models of Qwen-VL.

What differs from the checkpoint in models with gated delta nets (Qwen3-Next, Qwen 3.5):

1. Norms have 1 added, except those of the delta net.
2. Decays are -exp(A_log), and convolutions have no dimension for the one channel of a group.
3. Qwen 3.5 has value heads in the order of their place in a group; Qwen3-Next has queries, keys, values
   and gates apart.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kleash.checkpoints.gguf.architectures import (
    EXPERT_SETTINGS,
    EXPERTS,
    PROJECTIONS,
    GGUFArchitecture,
    Settings,
    TensorSummary,
    join_parameters,
    log_of_negated,
    restore_convolutions,
    set_rope,
)
from kleash.errors import ModelError

QWEN2 = GGUFArchitecture(model_type="qwen2")
QWEN3 = GGUFArchitecture(
    model_type="qwen3",
    biases={"attention_bias": PROJECTIONS},
    adjusted=frozenset(("n_deepstack_layers",)),
)
"""Qwen 3, and the language model of Qwen 3-VL: text has one position for all sections of the rotary embedding."""
QWEN_EXPERTS = {"decoder_sparse_step": 1, "mlp_only_layers": []}
QWEN3_MOE = GGUFArchitecture(
    model_type="qwen3_moe",
    names=EXPERTS,
    settings=EXPERT_SETTINGS,
    constants={"norm_topk_prob": True, **QWEN_EXPERTS},
    biases={"attention_bias": PROJECTIONS},
    adjusted=frozenset(("n_deepstack_layers",)),
)
LINEAR_ATTENTION = {"ssm_dt.bias": "linear_attn.dt_bias"}
QWEN3_NEXT_NAMES = {
    **LINEAR_ATTENTION,
    **EXPERTS,
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_ba": "linear_attn.in_proj_ba",
}


def adjust_qwen35(attributes: dict[str, Any], settings: Settings, tensors: TensorSummary) -> None:
    """Set positions in three sections."""
    if "rope_scaling" in attributes:
        raise ModelError("its positions are scaled, which is not read of Qwen 3.5")
    set_rope(
        attributes,
        rope_type="default",
        # Text has one position for all three sections.
        mrope_section=list(settings.get("rope.dimension_sections", (11, 11, 10)))[:3],
        mrope_interleaved=True,
    )


def set_linear_attention(attributes: dict[str, Any], settings: Settings, tensors: TensorSummary) -> None:
    """Set which layers have a gated delta net, and the size of its heads."""
    count = attributes["num_hidden_layers"]
    interval = settings.get("full_attention_interval", 4)
    recurrent = settings.get("attention.recurrent_layers")
    if recurrent is None:
        recurrent = [(number + 1) % interval != 0 for number in range(count)]
    if not isinstance(recurrent, list) or len(recurrent) < count:
        raise ModelError(f"its attention.recurrent_layers is no list of {count} layers")
    attributes["layer_types"] = [
        "linear_attention" if each else "full_attention" for each in recurrent[:count]
    ]
    attributes["linear_value_head_dim"] = settings["ssm.inner_size"] // attributes["linear_num_value_heads"]


def restore_linear_attention(parameters: dict[str, Tensor], attributes: Mapping[str, Any]) -> None:
    """Put the value heads of a gated delta net back into groups of a key head."""
    keys, values = attributes["linear_num_key_heads"], attributes["linear_num_value_heads"]
    key_rows = 2 * keys * attributes["linear_key_head_dim"]
    # rows of queries and keys, which come first; the rows of values follow
    for name in [name for name in parameters if ".linear_attn." in name]:
        weight, part = parameters[name], name.split(".linear_attn.")[1]
        if part in ("in_proj_qkv.weight", "conv1d.weight"):
            parameters[name] = torch.cat([weight[:key_rows], _group_heads(weight[key_rows:], keys, values)])
        elif part == "out_proj.weight":
            parameters[name] = _group_heads(weight.T, keys, values).T.contiguous()
        elif part != "norm.weight":
            parameters[name] = _group_heads(weight, keys, values)


def _group_heads(weight: Tensor, keys: int, values: int) -> Tensor:
    """Rows of value heads in the order of their key heads; a file has the first value head of each key head first."""
    if keys == values or values % keys or len(weight) % values:
        return weight
    return weight.reshape(values // keys, keys, -1, *weight.shape[1:]).transpose(0, 1).reshape(weight.shape)


def join_qwen3_next(parameters: dict[str, Tensor], attributes: Mapping[str, Any]) -> None:
    """Join queries, keys, values and gates of a gated delta net for each key head."""
    keys, key_rows = attributes["linear_num_key_heads"], attributes["linear_key_head_dim"]

    def join(joined: Tensor, gate: Tensor) -> Tensor:
        parts = [*joined.split([keys * key_rows, keys * key_rows, len(gate)]), gate]
        return torch.cat([part.reshape(keys, -1, part.shape[-1]) for part in parts], dim=1).flatten(0, 1)

    parts = (".in_proj_qkv.", ".in_proj_z.")
    join_parameters(parameters, attributes, parts=parts, joined=".in_proj_qkvz.", join=join)


QWEN35 = GGUFArchitecture(
    model_type="qwen3_5_text",
    names=LINEAR_ATTENTION,
    settings={
        "ssm.conv_kernel": "linear_conv_kernel_dim",
        "ssm.state_size": "linear_key_head_dim",
        "ssm.group_count": "linear_num_key_heads",
        "ssm.time_step_rank": "linear_num_value_heads",
    },
    adjust=[set_linear_attention, adjust_qwen35],
    norm_offset=1.0,
    norms_without_offset=frozenset(("ssm_norm",)),
    functions={"ssm_a": log_of_negated},
    arrange=[restore_linear_attention, restore_convolutions],
)
QWEN_FAMILY: Mapping[str, GGUFArchitecture] = {
    "qwen2": QWEN2,
    "qwen2vl": QWEN2,
    "qwen3": QWEN3,
    "qwen3vl": QWEN3,
    "qwen2moe": GGUFArchitecture(
        model_type="qwen2_moe",
        names=EXPERTS,
        settings=EXPERT_SETTINGS,
        constants={"norm_topk_prob": False, **QWEN_EXPERTS},
    ),
    "qwen3moe": QWEN3_MOE,
    "qwen3vlmoe": QWEN3_MOE,
    "qwen35": QWEN35,
    "qwen35moe": replace(
        QWEN35,
        model_type="qwen3_5_moe_text",
        names=LINEAR_ATTENTION | EXPERTS,
        settings={**QWEN35.settings, **EXPERT_SETTINGS},
    ),
    "qwen3next": replace(
        QWEN35,
        model_type="qwen3_next",
        names=QWEN3_NEXT_NAMES,
        settings={**QWEN35.settings, **EXPERT_SETTINGS},
        constants={"norm_topk_prob": True, **QWEN_EXPERTS},
        adjust=[set_linear_attention, set_rope],
        arrange=[restore_convolutions, join_qwen3_next],
    ),
}
"""``general.architecture``, or a kind of it that ``find_architecture`` tells apart → mapping."""
