"""Parameters that a GGUF file stores in another layout than a checkpoint: experts, gated delta nets, shared keys.

Source: llama.cpp, ``conversion/``.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

GPT_OSS_GATE = ".mlp.experts.gate_proj."


def log_of_negated(values: Tensor) -> Tensor:
    """log(-x): a file has -exp(A_log)."""
    return (-values).log()


def merge_gpt_oss_experts(parameters: dict[str, Tensor], attributes: Mapping[str, Any]) -> None:
    """Put gate and up projections of gpt-oss in turns, and transpose matrices to [experts, inputs, outputs]."""
    for name in [name for name in parameters if GPT_OSS_GATE in name]:
        place, suffix = name.split("gate_proj.")
        up = parameters.pop(f"{place}up_proj.{suffix}", None)
        gate = parameters.pop(name)
        if up is None or up.shape != gate.shape:
            continue  # gate_up_proj is then reported as missing
        merged = torch.stack([gate, up], dim=2).flatten(1, 2)
        is_bias = suffix == "bias"
        parameters[f"{place}gate_up_proj{'_bias' if is_bias else ''}"] = (
            merged if is_bias else merged.transpose(1, 2).contiguous()
        )
    for name in [name for name in parameters if ".mlp.experts.down_proj." in name]:
        place, suffix = name.split("down_proj.")
        down = parameters.pop(name)
        parameters[f"{place}down_proj{'_bias' if suffix == 'bias' else ''}"] = (
            down if suffix == "bias" else down.transpose(1, 2).contiguous()
        )


def restore_linear_attention(parameters: dict[str, Tensor], attributes: Mapping[str, Any]) -> None:
    """Put the value heads of a gated delta net back into groups of a key head, and the convolution into its shape."""
    keys, values = attributes["linear_num_key_heads"], attributes["linear_num_value_heads"]
    key_rows = 2 * keys * attributes["linear_key_head_dim"]
    for name in [name for name in parameters if ".linear_attn." in name]:
        weight, part = parameters[name], name.split(".linear_attn.")[1]
        if part in ("in_proj_qkv.weight", "conv1d.weight"):
            grouped = torch.cat([weight[:key_rows], _group_heads(weight[key_rows:], keys, values)])
        elif part == "out_proj.weight":
            grouped = _group_heads(weight.T, keys, values).T.contiguous()
        elif part != "norm.weight":
            grouped = _group_heads(weight, keys, values)
        else:
            grouped = weight
        parameters[name] = grouped.unsqueeze(1) if part == "conv1d.weight" else grouped


def _group_heads(weight: Tensor, keys: int, values: int) -> Tensor:
    """Rows of value heads in the order of their key heads; a file has the first value head of each key head first."""
    if keys == values or values % keys or len(weight) % values:
        return weight
    return weight.reshape(values // keys, keys, -1, *weight.shape[1:]).transpose(0, 1).reshape(weight.shape)


def drop_shared_kv(parameters: dict[str, Tensor], attributes: Mapping[str, Any]) -> None:
    """Drop keys and values of layers that use those of an earlier one: a file may have them, and nothing reads them."""
    count = attributes["num_hidden_layers"]
    for number in range(count - attributes.get("num_kv_shared_layers", 0), count):
        for part in ("k_proj", "v_proj", "k_norm"):
            parameters.pop(f"model.layers.{number}.self_attn.{part}.weight", None)
