"""The parameters of a network that the tensors of a GGUF file stand for.

Names follow from the table by which llama.cpp's converter names the parameters of a checkpoint. What the converter
renames before it looks there is an exception of the architecture.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kleash.extras import import_extra

EXPERTS = {f"ffn_{part}_exps": f"mlp.experts.{{expert}}.{part}_proj" for part in ("gate", "up", "down")}
ROUTED_EXPERTS = EXPERTS | {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
"""Experts chosen by scores with a bias."""
MIXTRAL_EXPERTS = {
    "ffn_gate_exps": "block_sparse_moe.experts.{expert}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{expert}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{expert}.w2",
}
SHARED_KV = {
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_k_norm": "self_attn.k_norm",
}
"""Keys and values, which files may have of layers that use those of an earlier one."""
GEMMA4_NAMES = SHARED_KV | {
    "layer_output_scale.weight": "layer_scalar",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "ffn_gate_up_exps.weight": "experts.gate_up_proj",
    "ffn_down_exps.weight": "experts.down_proj",
}
GEMMA3N_NAMES = SHARED_KV | {
    "altup_correct_scale.weight": "altup.correct_output_scale",
    "altup_proj.weight": "model.altup_projections.{expert}.weight",
    "altup_unembd_proj.weight": "model.altup_unembed_projections.{expert}.weight",
}
GPT_OSS_NAMES = {
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
LINEAR_ATTENTION = {"ssm_dt.bias": "linear_attn.dt_bias"}
QWEN3_NEXT_NAMES = {
    **LINEAR_ATTENTION,
    **EXPERTS,
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_ba": "linear_attn.in_proj_ba",
}
LATENT_ATTENTION = ROUTED_EXPERTS | {"attn_k_b": "self_attn.k_b_proj", "attn_v_b": "self_attn.v_b_proj"}
"""Multi-head latent attention in newer files, whose ``kv_b_proj`` is in two parts; ``join_latent_projections``."""
LFM2_EXPERTS = {
    "exp_probs_b.bias": "feed_forward.expert_bias",
    "ffn_gate_exps": "feed_forward.experts.{expert}.w1",
    "ffn_up_exps": "feed_forward.experts.{expert}.w3",
    "ffn_down_exps": "feed_forward.experts.{expert}.w2",
}
GRANITE_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_gate_exps": "block_sparse_moe.gate",
    "ffn_up_exps": "block_sparse_moe.up",
    "ffn_down_exps": "block_sparse_moe.output_linear",
    "ffn_gate_shexp": "shared_mlp.gate",
    "ffn_up_shexp": "shared_mlp.up",
    "ffn_down_shexp": "shared_mlp.output_linear",
}
"""Gate and up projections are one parameter; ``merge_granite_experts``."""
GRANITE_HYBRID_NAMES = {
    **GRANITE_EXPERTS,
    "ffn_gate": "shared_mlp.gate",
    "ffn_up": "shared_mlp.up",
    "ffn_down": "shared_mlp.output_linear",
    "ssm_dt.bias": "mamba.dt_bias",
}
FALCON_H1_NAMES = {"ssm_dt.bias": "mamba.dt_bias", "ffn_norm": "pre_ff_layernorm.weight"}
"""The norm has no suffix in files."""
LLAMA4_NAMES = {
    "ffn_gate_exps": "feed_forward.experts.gate_proj",
    "ffn_up_exps": "feed_forward.experts.up_proj",
    "ffn_down_exps.weight": "feed_forward.experts.down_proj",
}
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
STABLELM_NAMES = {
    "attn_q_norm": "self_attn.q_layernorm.norms.{expert}",
    "attn_k_norm": "self_attn.k_layernorm.norms.{expert}",
}
"""Norms of the heads of StableLM 2 12B, which are rows of one tensor."""
LAYERS = "model.layers"
BLOCK_TENSOR = re.compile(r"blk\.(\d{1,6})\.([a-z0-9_.]+?)(?:\.(weight|bias|scale))?")
BLOCK_NUMBER = re.compile(r"blk\.(\d{1,6})\.")
OLD_EXPERT = re.compile(r"(ffn_(?:gate|up|down))\.(\d{1,4})")
"""Part of a block that is one expert, as files of 2023 have them."""


@dataclass(frozen=True, kw_only=True)
class ParameterNames:
    """The names in a checkpoint of the parameters that a file's tensors stand for."""

    exceptions: Mapping[str, str]
    """Of the architecture: part of a block → module of a layer, part with its suffix → parameter, and tensor outside of
    blocks → parameter; "{expert}" stands for the number of an expert."""
    converted: Mapping[str, str]
    """Tensor → parameter by the table of the package gguf."""

    @classmethod
    def of(cls, name: str, exceptions: Mapping[str, str], network: Any) -> "ParameterNames":
        """The names for a network of the architecture ``name``, on any device."""
        gguf = import_extra("gguf", "models")
        (arch,) = (arch for arch, its_name in gguf.MODEL_ARCH_NAMES.items() if its_name == name)
        depth = len({match[1] for key in network.state_dict() if (match := re.search(r"\.(\d+)\.", key))})
        table = gguf.get_tensor_name_map(arch, depth)
        tensors = {
            parameter: table.get_name(parameter, try_suffixes=(".weight", ".bias"))
            for parameter in network.state_dict()
        }
        return cls(
            exceptions=exceptions,
            converted={tensor: parameter for parameter, tensor in tensors.items() if tensor is not None},
        )

    def find(self, name: str) -> str | None:
        """The parameter that a tensor such as "blk.3.attn_q.weight" stands for; None if there is none."""
        match = BLOCK_TENSOR.fullmatch(name)
        if match is None:
            return self.exceptions.get(name, self.converted.get(name))
        number, part, suffix = match.groups()
        expert = OLD_EXPERT.fullmatch(part)
        if expert is not None and f"{expert[1]}_exps" in self.exceptions:
            module = self.exceptions[f"{expert[1]}_exps"].replace("{expert}", expert[2])
            return f"{LAYERS}.{number}.{module}.{suffix}"
        if f"{part}.{suffix}" in self.exceptions:
            return f"{LAYERS}.{number}.{self.exceptions[f'{part}.{suffix}']}"
        if part in self.exceptions and suffix != "scale":
            return f"{LAYERS}.{number}.{self.exceptions[part]}" + (f".{suffix}" if suffix else "")
        return self.converted.get(name)
