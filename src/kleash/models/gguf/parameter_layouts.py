"""Parameters that a GGUF file stores in another layout than a checkpoint: experts, gated delta nets, shared keys.

Source: llama.cpp, ``conversion/``.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

GPT_OSS_GATE = ".mlp.experts.gate_proj."
GRANITE_PARTS = (".block_sparse_moe.", ".shared_mlp.")


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


def join_latent_projections(parameters: dict[str, Tensor], attributes: Mapping[str, Any]) -> None:
    """Join the projections from the latent vector to keys, which are transposed, and to values, head by head."""
    for name in [name for name in parameters if ".self_attn.k_b_proj." in name]:
        values = parameters.pop(name.replace(".k_b_proj.", ".v_b_proj."), None)
        keys = parameters.pop(name)
        if values is None or keys.dim() != 3 or values.dim() != 3 or keys.shape[1] != values.shape[2]:
            continue  # kv_b_proj is then reported as missing
        joined = torch.cat([keys.transpose(1, 2), values], dim=1)
        parameters[name.replace(".k_b_proj.", ".kv_b_proj.")] = joined.flatten(0, 1)


def restore_convolutions(parameters: dict[str, Tensor], attributes: Mapping[str, Any]) -> None:
    """Put the kernels of convolutions into their shape: a file has no dimension for the one channel of a group."""
    for name in [name for name in parameters if name.endswith((".conv.weight", ".conv1d.weight"))]:
        parameters[name] = parameters[name].unsqueeze(1)


def restore_state_space(parameters: dict[str, Tensor], attributes: Mapping[str, Any]) -> None:
    """Put the parameters of Mamba 2 into their shapes: a file has columns of decays, and rows of norms by groups."""
    restore_convolutions(parameters, attributes)
    for name in parameters:
        if name.endswith((".A_log", ".D", ".mamba.norm.weight", ".mixer.norm.weight")):
            parameters[name] = parameters[name].flatten()


def restore_granite_hybrid(parameters: dict[str, Tensor], attributes: Mapping[str, Any]) -> None:
    """Both of ``merge_granite_experts`` and ``restore_state_space``."""
    merge_granite_experts(parameters, attributes)
    restore_state_space(parameters, attributes)


def merge_granite_experts(parameters: dict[str, Tensor], attributes: Mapping[str, Any]) -> None:
    """Put gate and up projections of Granite one after the other, for experts and for the shared MLP."""
    for place in GRANITE_PARTS:
        for name in [name for name in parameters if f"{place}gate.weight" in name]:
            stem = name.removesuffix("gate.weight")
            up = parameters.pop(f"{stem}up.weight", None)
            gate = parameters.pop(name)
            if up is not None and up.shape == gate.shape:
                parameters[f"{stem}input_linear.weight"] = torch.cat([gate, up], dim=-2)


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


def transpose_gpt2(parameters: dict[str, Tensor], attributes: Mapping[str, Any]) -> None:
    """Transpose the matrices of GPT-2, which has inputs before outputs."""
    for name in [
        name for name in parameters if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
    ]:
        parameters[name] = parameters[name].T.contiguous()


def interleave_neox_heads(parameters: dict[str, Tensor], attributes: Mapping[str, Any]) -> None:
    """Put queries, keys and values of GPT-NeoX in turns, head by head; a file has all queries first."""
    heads = attributes["num_attention_heads"]
    for name in [name for name in parameters if ".query_key_value." in name]:
        value = parameters[name]
        if len(value) % (3 * heads) == 0:
            parts = value.reshape(3, heads, -1, *value.shape[1:])
            parameters[name] = parts.transpose(0, 1).reshape(value.shape)


def join_qwen3_next(parameters: dict[str, Tensor], attributes: Mapping[str, Any]) -> None:
    """Join queries, keys, values and gates of a gated delta net for each key head, and restore its convolution."""
    restore_convolutions(parameters, attributes)
    keys, key_rows = attributes["linear_num_key_heads"], attributes["linear_key_head_dim"]
    for name in [name for name in parameters if ".linear_attn.in_proj_qkv." in name]:
        gate = parameters.pop(name.replace("in_proj_qkv", "in_proj_z"), None)
        joined = parameters.pop(name)
        if gate is None or len(gate) % keys or len(joined) != 2 * keys * key_rows + len(gate):
            continue  # in_proj_qkvz is then reported as missing
        parts = [*joined.split([keys * key_rows, keys * key_rows, len(gate)]), gate]
        by_head = [part.reshape(keys, -1, part.shape[-1]) for part in parts]
        parameters[name.replace("in_proj_qkv", "in_proj_qkvz")] = torch.cat(by_head, dim=1).flatten(0, 1)


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
