"""GGUF architectures as transformers models: how settings become a configuration, and tensors parameters.

Source: llama.cpp, ``conversion/`` and ``src/models/``, which write and read the files.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import log
from typing import Any

from kleash.errors import ModelError

SHAPE_SETTINGS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
"""Settings that every decoder has → attribute of the configuration."""
EXPERT_SETTINGS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
ROPE_SETTINGS = frozenset(
    f"rope.{name}"
    for name in (
        "dimension_count",
        "freq_base",
        "freq_base_swa",
        "scaling.type",
        "scaling.factor",
        "scaling.original_context_length",
        "scaling.finetuned",
        "scaling.attn_factor",
        "scaling.yarn_beta_fast",
        "scaling.yarn_beta_slow",
    )
)
"""Settings that ``_rope`` reads."""
SETTINGS_WITHOUT_EFFECT = frozenset(
    ("vocab_size", "attention.key_length", "attention.value_length", "attention.causal", "pooling_type")
)
"""Settings that are checked or that change nothing here."""
DENSE_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Parts of a block → modules of a layer of a Llama."""
QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
NORMS_AROUND = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""Norms before and after attention and MLP, as Gemma 2 has them."""
EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{expert}.gate_proj",
    "ffn_up_exps": "mlp.experts.{expert}.up_proj",
    "ffn_down_exps": "mlp.experts.{expert}.down_proj",
}
SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
MIXTRAL_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{expert}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{expert}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{expert}.w2",
}
OUTSIDE_BLOCKS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
BLOCK_TENSOR = re.compile(r"blk\.(\d{1,6})\.([a-z0-9_]+)\.(weight|bias)")
Settings = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class GGUFArchitecture:
    """How a GGUF architecture is mapped to a transformers model."""

    model_type: str
    """transformers' name of the configuration."""
    block: Mapping[str, str]
    """Part of a block → module of a layer; "{expert}" stands for the number of an expert."""
    settings: Mapping[str, str] = field(default_factory=dict[str, str])
    """Settings beside those of ``SHAPE_SETTINGS`` → attribute of the configuration."""
    constants: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Attributes of the configuration that the architecture implies."""
    adjust: Callable[[dict[str, Any], Settings], None] | None = None
    """Changes the attributes where they follow from several settings."""
    interleaved_rope: bool = False
    """Whether rows of the query and key projections are stored in the order of llama.cpp's rotary embedding."""
    norm_offset: float = 0.0
    """What the file's norm weights have in excess of the parameters."""


def _gemma_scale(attributes: dict[str, Any], settings: Settings) -> None:
    """Scale of Gemma's attention: by the head's size, and in the 27B models by hidden size / heads."""
    is_27b = attributes["num_hidden_layers"] in (46, 62)
    per_head = attributes["hidden_size"] // attributes["num_attention_heads"]
    attributes["query_pre_attn_scalar"] = per_head if is_27b else attributes["head_dim"]


def _gemma2(attributes: dict[str, Any], settings: Settings) -> None:
    _gemma_scale(attributes, settings)
    # Absent caps are none in llama.cpp, and transformers has a default.
    attributes.setdefault("attn_logit_softcapping", None)
    attributes.setdefault("final_logit_softcapping", None)


def _gemma3(attributes: dict[str, Any], settings: Settings) -> None:
    _gemma_scale(attributes, settings)
    attributes["rope_local_base_freq"] = settings.get("rope.freq_base_swa", 10_000.0)
    if not attributes.get("sliding_window"):
        attributes["layer_types"] = ["full_attention"] * attributes["num_hidden_layers"]


def _phi3(attributes: dict[str, Any], settings: Settings) -> None:
    # llama.cpp does not use the sliding window of Phi-3, and 0 stands for none.
    attributes["sliding_window"] = attributes.get("sliding_window") or None


def _without_sliding_window(attributes: dict[str, Any], settings: Settings) -> None:
    if settings.get("attention.sliding_window"):
        raise ModelError("its layers have a sliding window, which is read of other architectures only")


LLAMA = GGUFArchitecture(model_type="llama", block=DENSE_BLOCK, interleaved_rope=True)
GEMMA2 = GGUFArchitecture(
    model_type="gemma2",
    block=DENSE_BLOCK | NORMS_AROUND,
    settings={
        "attention.sliding_window": "sliding_window",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    adjust=_gemma2,
    norm_offset=1.0,
)
ARCHITECTURES: Mapping[str, GGUFArchitecture] = {
    "llama": LLAMA,
    "mixtral": GGUFArchitecture(
        model_type="mixtral",
        block=DENSE_BLOCK | MIXTRAL_EXPERTS,
        settings={"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
        constants={"sliding_window": None},
        interleaved_rope=True,
    ),
    "smollm3": GGUFArchitecture(model_type="smollm3", block=DENSE_BLOCK, interleaved_rope=True),
    "granite": GGUFArchitecture(
        model_type="granite",
        block=DENSE_BLOCK,
        settings={
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
        interleaved_rope=True,
    ),
    "qwen2": GGUFArchitecture(model_type="qwen2", block=DENSE_BLOCK),
    "qwen3": GGUFArchitecture(model_type="qwen3", block=DENSE_BLOCK | QK_NORMS),
    "qwen2moe": GGUFArchitecture(
        model_type="qwen2_moe",
        block=DENSE_BLOCK | EXPERTS | SHARED_EXPERT,
        settings=EXPERT_SETTINGS,
        constants={"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    "qwen3moe": GGUFArchitecture(
        model_type="qwen3_moe",
        block=DENSE_BLOCK | QK_NORMS | EXPERTS,
        settings=EXPERT_SETTINGS,
        constants={"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    "olmo2": GGUFArchitecture(
        model_type="olmo2",
        block={name: module for name, module in DENSE_BLOCK.items() if not name.endswith("_norm")}
        | QK_NORMS
        | {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"},
        adjust=_without_sliding_window,
    ),
    "gemma2": GEMMA2,
    "gemma3": GGUFArchitecture(
        model_type="gemma3_text",
        block=DENSE_BLOCK | NORMS_AROUND | QK_NORMS,
        settings={
            "attention.sliding_window": "sliding_window",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        adjust=_gemma3,
        norm_offset=1.0,
    ),
    "phi3": GGUFArchitecture(
        model_type="phi3",
        block=DENSE_BLOCK | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        settings={"attention.sliding_window": "sliding_window"},
        adjust=_phi3,
    ),
}
"""``general.architecture`` → mapping; a "llama" with experts is "mixtral"."""


def find_architecture(settings: Settings) -> tuple[str, GGUFArchitecture]:
    """The prefix of a file's settings, and the mapping of its architecture.

    Raises:
        ModelError: if it is not supported, with the list of those that are.
    """
    name = settings.get("general.architecture")
    if not isinstance(name, str) or not name:
        raise ModelError("it does not name its general.architecture")
    kind = "mixtral" if name == "llama" and settings.get("llama.expert_count") else name
    if kind not in ARCHITECTURES:
        raise ModelError(
            f"it is of the architecture {name[:40]!r}, and kleash reads GGUF files of "
            f"{', '.join(sorted(ARCHITECTURES))}; give the model as a folder of safetensors"
        )
    return name, ARCHITECTURES[kind]


def config_attributes(
    name: str, architecture: GGUFArchitecture, settings: Settings, vocab_size: int, tied: bool
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The attributes of a transformers configuration, and the settings of the architecture that are not mapped.

    Args:
        name: ``general.architecture``.
        architecture: its mapping.
        settings: of the file.
        vocab_size: rows of the embedding.
        tied: whether the file has no output matrix of its own.

    Raises:
        ModelError: if a setting is missing or has a value that transformers cannot express.
    """
    values = {
        key.removeprefix(f"{name}."): value for key, value in settings.items() if key.startswith(f"{name}.")
    }
    names = SHAPE_SETTINGS | dict(architecture.settings)
    attributes = {attribute: values[key] for key, attribute in names.items() if key in values}
    attributes.setdefault("num_key_value_heads", attributes.get("num_attention_heads"))
    for key, attribute in SHAPE_SETTINGS.items():
        if attribute == "intermediate_size" and "moe_intermediate_size" in attributes:
            continue
        value = attributes.get(attribute)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ModelError(
                f"its setting {name}.{key} is {str(value)[:60]}, and should be one number above 0"
            )
    heads, hidden_size = attributes["num_attention_heads"], attributes["hidden_size"]
    attributes["head_dim"] = values.get("attention.key_length", hidden_size // heads)
    if values.get("attention.value_length", attributes["head_dim"]) != attributes["head_dim"]:
        raise ModelError(
            f"its keys have {attributes['head_dim']} numbers a head and its values {values['attention.value_length']}"
        )
    if values.get("attention.causal", True) is not True:
        raise ModelError("its attention is not causal; kleash measures causal language models")
    attributes |= {"vocab_size": vocab_size, "tie_word_embeddings": tied}
    attributes |= _rope(values, attributes) | dict(architecture.constants)
    if architecture.adjust is not None:
        architecture.adjust(attributes, values)
    known = {*names, *ROPE_SETTINGS, *SETTINGS_WITHOUT_EFFECT}
    return attributes, tuple(sorted(key for key in values if key not in known))


def _rope(values: Settings, attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of the rotary embedding."""
    rotary = values.get("rope.dimension_count", attributes["head_dim"])
    rope: dict[str, Any] = {"rope_theta": values.get("rope.freq_base", 10_000.0)}
    if rotary != attributes["head_dim"]:
        rope["partial_rotary_factor"] = rotary / attributes["head_dim"]
    kind = values.get("rope.scaling.type", "none")
    factor = values.get("rope.scaling.factor", 1.0)
    if kind == "linear" and factor != 1:
        rope["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        rope["rope_scaling"] = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": values.get("rope.scaling.original_context_length"),
            # llama.cpp multiplies the factor of the file by the one that transformers has as its default.
            "attention_factor": values.get("rope.scaling.attn_factor", 1.0) * (0.1 * log(factor) + 1.0),
            "beta_fast": values.get("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": values.get("rope.scaling.yarn_beta_slow", 1.0),
        }
    elif kind not in ("none", "linear"):
        raise ModelError(f"its positions are scaled by {str(kind)[:40]!r}, which is not read from GGUF files")
    return rope


def parameter_names(name: str, architecture: GGUFArchitecture) -> Callable[[int], str] | None:
    """The parameter that a tensor of a file stands for, as a function of the expert's number; None if there is none.

    Args:
        name: of the tensor, such as "blk.3.attn_q.weight".
        architecture: of its file.
    """
    stem, _, suffix = name.rpartition(".")
    if suffix in ("weight", "bias") and stem in OUTSIDE_BLOCKS:
        return partial(_with_expert, f"{OUTSIDE_BLOCKS[stem]}.{suffix}")
    match = BLOCK_TENSOR.fullmatch(name)
    if match is None or match[2] not in architecture.block:
        return None
    return partial(_with_expert, f"model.layers.{match[1]}.{architecture.block[match[2]]}.{match[3]}")


def _with_expert(parameter: str, expert: int) -> str:
    return parameter.replace("{expert}", str(expert))
