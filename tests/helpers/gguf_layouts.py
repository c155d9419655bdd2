"""Settings and tensors of architectures whose GGUF files differ most from their checkpoints, as llama.cpp writes them.

Source: llama.cpp, conversion/gpt_oss.py, conversion/qwen.py and conversion/gemma.py.
"""

from collections.abc import Iterator, Mapping
from statistics import NormalDist
from typing import Any

import gguf
import numpy as np

Arrays = Iterator[tuple[str, np.ndarray]]


def gpt_oss_tensors(name: str, values: np.ndarray, config: Mapping[str, Any]) -> Arrays:
    """Gate and up projections take turns in a checkpoint, and matrices of experts are transposed."""
    stem, _, last = name.rpartition(".")
    if ".experts." in name:
        kind = "bias" if last.endswith("_bias") else "weight"
        values = values if kind == "bias" else values.swapaxes(-1, -2)
        if "gate_up" in last:
            yield f"{stem}.gate_proj.{kind}", values[:, 0::2]
            yield f"{stem}.up_proj.{kind}", values[:, 1::2]
        else:
            yield f"{stem}.down_proj.{kind}", values
    else:
        yield (f"{name}.weight" if last == "sinks" else name), values


def qwen35_tensors(name: str, values: np.ndarray, config: Mapping[str, Any]) -> Arrays:
    """Value heads are ordered by their place in a group; norms have 1 added, and decays are negative."""
    part = name.partition(".linear_attn.")[2]
    key_rows = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    if part in ("in_proj_qkv.weight", "conv1d.weight"):
        values = values.squeeze()
        values = np.concatenate([values[:key_rows], _tiled(values[key_rows:], config)])
    elif part == "out_proj.weight":
        values = _tiled(values.T, config).T
    elif part and part != "norm.weight":
        values = _tiled(values, config)
    elif name.endswith("norm.weight") and not part:
        values = values + 1
    if part == "A_log":
        yield name, -np.exp(values)
    else:
        yield name.replace(".dt_bias", ".dt_proj.bias"), values


def _tiled(values: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    return values.reshape(keys, heads // keys, -1, *values.shape[1:]).swapaxes(0, 1).reshape(values.shape)


def gemma4_tensors(name: str, values: np.ndarray, config: Mapping[str, Any]) -> Arrays:
    """Experts stay stacked; scales have names of their own."""
    if name == "model.norm.weight":  # once
        factors = [1.0] * 2 + [1e30] * 6
        yield "rope_freqs.weight", np.array(factors, np.float32)
    layer = name.removeprefix("model.layers.").partition(".")[0]
    if name.endswith("router.scale"):
        yield f"blk.{layer}.ffn_gate_inp.scale", values
    elif name.endswith("per_expert_scale"):
        yield f"blk.{layer}.ffn_down_exps.scale", values
    elif ".experts." in name or name.endswith("layer_scalar"):
        yield f"{name}.weight", values
    else:
        yield name, values


def gemma3n_tensors(name: str, values: np.ndarray, config: Mapping[str, Any]) -> Arrays:
    """Scales have a suffix; ``gguf_file`` stacks the projections of the alternating updates."""
    yield (f"{name}.weight" if name.endswith("_scale") else name), values


LAYOUTS = {
    "gemma3n_text": gemma3n_tensors,
    "gpt_oss": gpt_oss_tensors,
    "qwen3_5_text": qwen35_tensors,
    "qwen3_5_moe_text": qwen35_tensors,
    "gemma4_text": gemma4_tensors,
}
"""Model type → how a tensor of a checkpoint is written; names are those of the file, or those that gguf maps."""


def add_layout_settings(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    """Write the settings that only these architectures have."""
    kind, rope, arch = config["model_type"], config.get("rope_parameters") or {}, writer.arch
    if kind == "gpt_oss":
        writer.add_sliding_window(config["sliding_window"])
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    elif kind == "ministral3":
        writer.add_float32(f"{arch}.rope.scaling.yarn_log_multiplier", rope["mscale_all_dim"])
        writer.add_float32(f"{arch}.attention.temperature_scale", rope["llama_4_scaling_beta"])
    elif kind.startswith("qwen3_5"):
        heads = config["linear_num_value_heads"]
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(config["linear_key_head_dim"])
        writer.add_ssm_group_count(config["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(heads)
        writer.add_ssm_inner_size(heads * config["linear_value_head_dim"])
        writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
        recurrent = [each == "linear_attention" for each in config["layer_types"]]
        writer.add_array(f"{arch}.attention.recurrent_layers", recurrent)
    elif kind == "gemma4_text":
        _add_gemma4(writer, config)
    elif kind == "gemma3n_text":
        _add_gemma3n(writer, config)


def _add_gemma3n(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_altup_active_idx(config["altup_active_idx"])
    writer.add_altup_num_inputs(config["altup_num_inputs"])
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_shared_kv_layers(config["num_kv_shared_layers"])
    pattern = config["activation_sparsity_pattern"]
    quantiles = [NormalDist().inv_cdf(part) if part else float("-inf") for part in pattern]
    writer.add_activation_sparsity_scale(quantiles)
    writer.add_sliding_window_pattern([each == "sliding_attention" for each in config["layer_types"]])
    writer.add_sliding_window(config["sliding_window"])


def _add_gemma4(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    windows = [each == "sliding_attention" for each in config["layer_types"]]
    wide = next(config["per_layer_config"][str(n)] for n, each in enumerate(windows) if not each)
    settings = writer.kv_data[0]
    for name in ("head_count_kv", "key_length", "value_length"):
        settings.pop(f"{writer.arch}.attention.{name}")
    settings.pop(f"{writer.arch}.rope.dimension_count")
    settings.pop(f"{writer.arch}.feed_forward_length")
    heads = config["num_key_value_heads"], wide.get("num_key_value_heads", config["num_key_value_heads"])
    writer.add_head_count_kv([heads[0] if each else heads[1] for each in windows])
    writer.add_key_length(wide["head_dim"])
    writer.add_value_length(wide["head_dim"])
    writer.add_rope_dimension_count(wide["head_dim"])
    writer.add_key_length_swa(config["head_dim"])
    writer.add_value_length_swa(config["head_dim"])
    writer.add_rope_dimension_count_swa(config["head_dim"])
    shared = config["num_kv_shared_layers"]
    widths = [config["intermediate_size"]] * len(windows)
    if config["use_double_wide_mlp"]:
        widths[-shared:] = [2 * config["intermediate_size"]] * shared
    writer.add_feed_forward_length(widths)
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_sliding_window_pattern(windows)
    writer.add_sliding_window(config["sliding_window"])
    if config.get("top_k_experts"):
        writer.add_expert_used_count(config["top_k_experts"])
