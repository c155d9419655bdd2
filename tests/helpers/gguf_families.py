"""Settings and tensors of further architectures as llama.cpp's converter writes them.

Source: llama.cpp, conversion/, the file of each family.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import gguf
import numpy as np

Arrays = Iterator[tuple[str, np.ndarray]]
Config = Mapping[str, Any]
LAYER = re.compile(r"\.(?:layers|h)\.(\d+)\.")
GATED_EXPERTS = {
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "n_shared_experts": "expert_shared_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
}
"""Setting of a configuration → of a file, for experts that are chosen by scores with a bias."""


def block(name: str) -> str:
    """The block of a tensor in a file, by its name in a checkpoint."""
    match = LAYER.search(name)
    return f"blk.{match[1]}" if match else ""


def score_biases(name: str, values: np.ndarray, config: Config) -> Arrays:
    """The bias of scores has a name of its own; experts of Nemotron-H have the usual names."""
    name = re.sub(r"backbone(\.layers\.\d+\.)mixer(\.experts\.)", r"model\1mlp\2", name)
    is_bias = name.endswith(("e_score_correction_bias", ".expert_bias"))
    yield (f"{block(name)}.exp_probs_b.bias" if is_bias else name), values


def latent_attention(name: str, values: np.ndarray, config: Config) -> Arrays:
    """The projection of the latent vector is in two parts, of which that to keys is transposed."""
    if name.endswith("kv_b_proj.weight"):
        heads = values.reshape(config["num_attention_heads"], -1, config["kv_lora_rank"])
        yield f"{block(name)}.attn_k_b.weight", heads[:, : config["qk_nope_head_dim"]].swapaxes(1, 2)
        yield f"{block(name)}.attn_v_b.weight", heads[:, config["qk_nope_head_dim"] :]
    else:
        yield from score_biases(name, values, config)


def granite_experts(name: str, values: np.ndarray, config: Config) -> Arrays:
    """Gate and up projections are two tensors; a dense model has a shared MLP alone."""
    is_shared = "shared_mlp" in name
    suffix = "" if is_shared and not config["num_local_experts"] else "_shexp" if is_shared else "_exps"
    if name.endswith("input_linear.weight"):
        for part, half in zip(("gate", "up"), np.split(values, 2, axis=-2), strict=True):
            yield f"{block(name)}.ffn_{part}{suffix}.weight", half
    elif name.endswith("output_linear.weight"):
        yield f"{block(name)}.ffn_down{suffix}.weight", values
    elif name.endswith("router.layer.weight"):
        yield f"{block(name)}.ffn_gate_inp.weight", values
    else:
        yield from state_space(name, values, config)


def state_space(name: str, values: np.ndarray, config: Config) -> Arrays:
    """Mamba 2: decays are negative and columns, norms have a row for each group."""
    part = re.search(r"\.(?:mamba|mixer)\.(A_log|D|dt_bias|conv1d\.\w+|norm\.weight|\w+_proj\.weight)$", name)
    places = {"in_proj.weight": "in.weight", "out_proj.weight": "out.weight", "dt_bias": "dt.bias"}
    if part is None or (part[1].endswith("_proj.weight") and part[1] not in places):
        yield from score_biases(name, values, config)
    elif part[1] == "A_log":
        yield f"{block(name)}.ssm_a", -np.exp(values)[:, None]
    elif part[1] == "D":
        yield f"{block(name)}.ssm_d", values[:, None]
    elif part[1] == "norm.weight":
        groups = config.get("mamba_n_groups") or config["n_groups"]
        yield f"{block(name)}.ssm_norm.weight", values.reshape(groups, -1)
    elif part[1].startswith("conv1d"):
        yield f"{block(name)}.ssm_{part[1]}", values.reshape(len(values), -1).squeeze()
    else:
        yield f"{block(name)}.ssm_{places[part[1]]}", values


def falcon_h1(name: str, values: np.ndarray, config: Config) -> Arrays:
    """Multipliers are part of the weights, and a norm has no suffix."""
    first, second = config["mlp_multipliers"]
    inputs = config["attention_in_multiplier"]
    scales = {
        "gate_proj": first,
        "down_proj": second,
        "q_proj": inputs,
        "k_proj": inputs * config["key_multiplier"],
        "v_proj": inputs,
        "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }
    module = name.split(".")[-2]
    if module == "in_proj":
        inner, states = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
        parts = np.split(values, np.cumsum([inner, inner, states, states]))
        values = config["ssm_in_multiplier"] * np.concatenate(
            [part * scale for part, scale in zip(parts, config["ssm_multipliers"], strict=True)]
        )
    elif module == "pre_ff_layernorm":
        name = f"{block(name)}.ffn_norm"
    yield from state_space(name, (values * scales.get(module, 1)).astype(np.float32), config)


def lfm2(name: str, values: np.ndarray, config: Config) -> Arrays:
    """Convolutions are matrices; experts are named without the model."""
    name = name.removeprefix("model.") if ".experts." in name else name
    yield from score_biases(name, values.squeeze(1) if name.endswith("conv.conv.weight") else values, config)


def llama4(name: str, values: np.ndarray, config: Config) -> Arrays:
    """Experts have outputs before inputs, and gate and up projections are two tensors."""
    values = values.swapaxes(-1, -2) if ".experts." in name else values
    if name.endswith("gate_up_proj"):
        for part, half in zip(("gate", "up"), np.split(values, 2, axis=1), strict=True):
            yield f"{block(name)}.ffn_{part}_exps.weight", half
    else:
        yield (f"{block(name)}.ffn_down_exps.weight" if name.endswith("down_proj") else name), values


def qwen3_next(name: str, values: np.ndarray, config: Config) -> Arrays:
    """Queries, keys, values and gates are not in turns; norms have 1 added, and decays are negative."""
    part = name.partition(".linear_attn.")[2]
    if part == "in_proj_qkvz.weight":
        keys = config["linear_num_key_heads"]
        ratio = config["linear_num_value_heads"] // keys
        rows, wide = config["linear_key_head_dim"], ratio * config["linear_value_head_dim"]
        parts = np.split(values.reshape(keys, -1, values.shape[1]), np.cumsum([rows, rows, wide]), axis=1)
        parts = [each.reshape(-1, values.shape[1]) for each in parts]
        yield f"{block(name)}.attn_qkv.weight", np.concatenate(parts[:3])
        yield f"{block(name)}.attn_gate.weight", parts[3]
    elif part == "A_log":
        yield f"{block(name)}.ssm_a", -np.exp(values)
    elif part == "dt_bias":
        yield f"{block(name)}.ssm_dt.bias", values
    elif part == "conv1d.weight":
        yield f"{block(name)}.ssm_conv1d.weight", values.squeeze(1)
    else:
        is_offset = name.endswith("norm.weight") and part != "norm.weight"
        yield name, values + 1 if is_offset else values


def gpt2(name: str, values: np.ndarray, config: Config) -> Arrays:
    """Matrices have outputs before inputs."""
    yield name, values.T if re.search(r"(c_attn|c_proj|c_fc)\.weight$", name) else values


def gpt_neox(name: str, values: np.ndarray, config: Config) -> Arrays:
    """All queries come before all keys and values."""
    if "query_key_value" in name:
        heads = values.reshape(config["num_attention_heads"], 3, -1, *values.shape[1:])
        values = heads.swapaxes(0, 1).reshape(values.shape)
    yield name, values


def stablelm(name: str, values: np.ndarray, config: Config) -> Arrays:
    """``gguf_file`` stacks the norms of heads, which are named as experts here."""
    yield re.sub(r"(self_attn\.[qk]_layernorm)\.norms\.(\d+)", r"experts.\2.\1", name), values


def nemotron(name: str, values: np.ndarray, config: Config) -> Arrays:
    """Norms have 1 added."""
    yield name, values + 1 if name.endswith("norm.weight") else values


def longrope(name: str, values: np.ndarray, config: Config) -> Arrays:
    """The lists of factors are tensors."""
    rope = config.get("rope_parameters") or {}
    if name == "model.norm.weight" and rope.get("rope_type") == "longrope":  # once
        for kind in ("short", "long"):
            yield f"rope_factors_{kind}.weight", np.array(rope[f"{kind}_factor"], np.float32)
    yield name, values


FAMILY_LAYOUTS: dict[str, Callable[[str, np.ndarray, Config], Arrays]] = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), latent_attention),
    **dict.fromkeys(("glm4_moe", "dots1", "ernie4_5_moe"), score_biases),
    **dict.fromkeys(("granitemoeshared", "granitemoehybrid"), granite_experts),
    **dict.fromkeys(("lfm2", "lfm2_moe"), lfm2),
    "falcon_h1": falcon_h1,
    "nemotron_h": state_space,
    "llama4_text": llama4,
    "qwen3_next": qwen3_next,
    "gpt2": gpt2,
    "gpt_neox": gpt_neox,
    "stablelm": stablelm,
    "nemotron": nemotron,
    "phi3": longrope,
}


WITH_SLIDING_WINDOWS = (
    *("cohere", "cohere2", "exaone4", "olmo3", "granitemoeshared", "granitemoehybrid", "hunyuan_v1_dense"),
)


def add_family_settings(writer: gguf.GGUFWriter, config: Config) -> None:
    """Write the settings that only these architectures have."""
    kind, arch = config["model_type"], writer.arch
    settings = writer.kv_data[0]

    def add(name: str, value: Any) -> None:
        settings.pop(f"{arch}.{name}", None)
        if isinstance(value, list):
            writer.add_array(f"{arch}.{name}", value)
        elif isinstance(value, bool):
            writer.add_bool(f"{arch}.{name}", value)
        else:
            (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(f"{arch}.{name}", value)

    if kind == "falcon_h1":
        settings.pop(f"{arch}.embedding_scale", None)  # a part of the weights
    for name, value in _family_settings(kind, config).items():
        add(name, value)
    if kind in ("deepseek_v2", "deepseek_v3", "glm4_moe", "dots1", "nemotron_h"):
        for name, setting in GATED_EXPERTS.items():
            if config.get(name) is not None:
                add(setting, config[name])
        add("expert_count", config["n_routed_experts"])
    if kind in ("deepseek_v3", "glm4_moe", "dots1", "lfm2_moe"):
        add("expert_gating_func", int(gguf.ExpertGatingFuncType.SIGMOID))


def _family_settings(kind: str, config: Config) -> dict[str, Any]:
    """The settings of a kind of model by their names in a file."""
    rope = config.get("rope_parameters") or {}
    layers = config.get("layer_types") or config.get("layers_block_type") or []
    full = [config.get("num_key_value_heads") if each == "full_attention" else 0 for each in layers]
    if kind in WITH_SLIDING_WINDOWS:
        values: dict[str, Any] = {}
        if config.get("sliding_window"):
            values["attention.sliding_window"] = config["sliding_window"]
            values["attention.sliding_window_pattern"] = [each == "sliding_attention" for each in layers]
        if "logit_scale" in config:
            values["logit_scale"] = config["logit_scale"]
        if config.get("shared_intermediate_size"):
            values["expert_shared_feed_forward_length"] = config["shared_intermediate_size"]
        return values | (_mamba(config, full) if kind == "granitemoehybrid" else {})
    if kind in ("deepseek_v2", "deepseek_v3"):
        rotary, latent = config["qk_rope_head_dim"], config["kv_lora_rank"]
        return {
            "attention.head_count_kv": 1,
            "attention.key_length": latent + rotary,
            "attention.value_length": latent,
            "attention.key_length_mla": config["qk_nope_head_dim"] + rotary,
            "attention.value_length_mla": config["v_head_dim"],
            "attention.kv_lora_rank": latent,
            "rope.dimension_count": rotary,
            **({"attention.q_lora_rank": config["q_lora_rank"]} if config["q_lora_rank"] else {}),
            **(
                {"rope.scaling.yarn_log_multiplier": 0.1 * rope["mscale_all_dim"]} if "mscale" in rope else {}
            ),
        }
    if kind == "phi3" and rope.get("rope_type") == "longrope":
        names = {"attn_factor": "attention_factor"}
        names |= {"original_context_length": "original_max_position_embeddings"}
        return {f"rope.scaling.{name}": rope[setting] for name, setting in names.items()}
    convolutions = {"attention.head_count_kv": full, "shortconv.l_cache": config.get("conv_L_cache")}
    return {
        "ernie4_5_moe": lambda: {
            "expert_count": config["moe_num_experts"],
            "expert_used_count": config["moe_k"],
            "interleave_moe_layer_step": config["moe_layer_interval"],
            "leading_dense_block_count": config["moe_layer_start_index"],
            "expert_shared_count": config["moe_num_shared_experts"],
        },
        "lfm2": lambda: convolutions,
        "lfm2_moe": lambda: convolutions | {"leading_dense_block_count": config["num_dense_layers"]},
        "llama4_text": lambda: {
            "feed_forward_length": config["intermediate_size_mlp"],
            "expert_feed_forward_length": config["intermediate_size"],
            "interleave_moe_layer_step": config["interleave_moe_layer_step"],
        },
        "falcon_h1": lambda: _mamba(config, config["num_key_value_heads"]),
        "nemotron_h": lambda: {
            "attention.head_count_kv": full,
            "block_count": len(layers),
            "feed_forward_length": [48 if each in ("mlp", "moe") else 0 for each in layers],
            "expert_shared_feed_forward_length": config["moe_shared_expert_intermediate_size"],
            **({"moe_latent_size": config["moe_latent_size"]} if config.get("moe_latent_size") else {}),
            "ssm.conv_kernel": config["conv_kernel"],
            "ssm.state_size": config["ssm_state_size"],
            "ssm.group_count": config["n_groups"],
            "ssm.time_step_rank": config["mamba_num_heads"],
            "ssm.inner_size": config["mamba_num_heads"] * config["mamba_head_dim"],
        },
        "qwen3_next": lambda: {
            "ssm.conv_kernel": config["linear_conv_kernel_dim"],
            "ssm.state_size": config["linear_key_head_dim"],
            "ssm.group_count": config["linear_num_key_heads"],
            "ssm.time_step_rank": config["linear_num_value_heads"],
            "ssm.inner_size": config["linear_num_value_heads"] * config["linear_value_head_dim"],
        },
        "olmo": lambda: {"attention.layer_norm_epsilon": 1e-5, "attention.clamp_kqv": config["clip_qkv"]},
        "stablelm": lambda: {"use_parallel_residual": config["use_parallel_residual"]},
        "gpt_neox": lambda: {"use_parallel_residual": config["use_parallel_residual"]},
    }.get(kind, dict)()


def _mamba(config: Config, heads: Any) -> dict[str, Any]:
    """The settings of Mamba 2 beside attention."""
    return {
        "attention.head_count_kv": heads,
        "ssm.conv_kernel": config["mamba_d_conv"],
        "ssm.state_size": config["mamba_d_state"],
        "ssm.group_count": config["mamba_n_groups"],
        "ssm.time_step_rank": config["mamba_n_heads"],
        "ssm.inner_size": config["mamba_n_heads"] * config["mamba_d_head"],
        "rope.scaling.finetuned": config.get("position_embedding_type") != "nope",
    }
