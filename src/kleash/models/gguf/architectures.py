"""GGUF architectures as transformers models: how settings become a configuration, and tensors parameters.

Source: llama.cpp, ``conversion/`` and ``src/models/``, which write and read the files.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import log
from typing import Any

from torch import Tensor

from kleash.errors import ModelError
from kleash.models.gguf.block_tensors import (
    BLOCK_TENSOR,
    DENSE_BLOCK,
    EXPERTS,
    GEMMA3N_BLOCK,
    GEMMA3N_OUTSIDE,
    GEMMA4_BLOCK,
    GEMMA4_OUTSIDE,
    GLM4_BLOCK,
    GPT_OSS_BLOCK,
    LINEAR_ATTENTION,
    MIXTRAL_EXPERTS,
    NORMS_AROUND,
    OUTSIDE_BLOCKS,
    QK_NORMS,
    SHARED_EXPERT,
)
from kleash.models.gguf.family_settings import (
    ADJUSTED_SETTINGS,
    Settings,
    TensorSummary,
    adjust_gemma2,
    adjust_gemma3,
    adjust_gemma3n,
    adjust_gemma4,
    adjust_glm4,
    adjust_gpt_oss,
    adjust_ministral3,
    adjust_phi3,
    adjust_qwen35,
    refuse_sliding_window,
)
from kleash.models.gguf.parameter_layouts import (
    drop_shared_kv,
    log_of_negated,
    merge_gpt_oss_experts,
    restore_linear_attention,
)

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
        "scaling.yarn_log_multiplier",
    )
)
"""Settings that ``_rope`` reads."""
SETTINGS_WITHOUT_EFFECT = frozenset(
    (
        *("vocab_size", "attention.key_length", "attention.value_length", "attention.causal", "pooling_type"),
        *ADJUSTED_SETTINGS,
    )
)
"""Settings that are checked or that change nothing here."""
GEMMA4_SETTINGS = {
    "attention.sliding_window": "sliding_window",
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_count": "num_experts",
    "expert_used_count": "top_k_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
}


@dataclass(frozen=True, kw_only=True)
class GGUFArchitecture:
    """How a GGUF architecture is mapped to a transformers model."""

    model_type: str
    """transformers' name of the configuration."""
    block: Mapping[str, str]
    """Part of a block → module of a layer, or part with its suffix → parameter; "{expert}" stands for the number of an
    expert, and without it the experts of a layer are one parameter."""
    outside: Mapping[str, str] = field(default_factory=dict[str, str])
    """Tensors outside of blocks → parameters, beside those of ``OUTSIDE_BLOCKS``."""
    settings: Mapping[str, str] = field(default_factory=dict[str, str])
    """Settings beside those of ``SHAPE_SETTINGS`` → attribute of the configuration."""
    constants: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Attributes of the configuration that the architecture implies."""
    adjust: Callable[[dict[str, Any], Settings, TensorSummary], None] | None = None
    """Changes the attributes where they follow from several settings, or from tensors."""
    listed: frozenset[str] = frozenset()
    """Settings of ``SHAPE_SETTINGS`` that may be a list with a number for each layer; ``adjust`` checks them."""
    interleaved_rope: bool = False
    """Whether rows of the query and key projections are stored in the order of llama.cpp's rotary embedding."""
    norm_offset: float = 0.0
    """What the file's norm weights have in excess of the parameters."""
    norms_without_offset: frozenset[str] = frozenset()
    """Parts of a block whose norm weights are stored as they are."""
    functions: Mapping[str, Callable[[Tensor], Tensor]] = field(
        default_factory=dict[str, Callable[[Tensor], Tensor]]
    )
    """Part of a block → function of the decoded values in float32 that gives the parameter's."""
    arrange: Callable[[dict[str, Tensor], Mapping[str, Any]], None] | None = None
    """Changes decoded parameters into those of a checkpoint; arguments are the parameters and the attributes."""
    config_has_rope_factors: bool = False
    """Whether ``adjust`` turns the factors of the rotary embedding into attributes."""


LLAMA = GGUFArchitecture(model_type="llama", block=DENSE_BLOCK, interleaved_rope=True)
GEMMA2 = GGUFArchitecture(
    model_type="gemma2",
    block=DENSE_BLOCK | NORMS_AROUND,
    settings={
        "attention.sliding_window": "sliding_window",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    adjust=adjust_gemma2,
    norm_offset=1.0,
)
QWEN35 = GGUFArchitecture(
    model_type="qwen3_5_text",
    block=DENSE_BLOCK | QK_NORMS | {"post_attention_norm": "post_attention_layernorm"} | LINEAR_ATTENTION,
    settings={
        "ssm.conv_kernel": "linear_conv_kernel_dim",
        "ssm.state_size": "linear_key_head_dim",
        "ssm.group_count": "linear_num_key_heads",
        "ssm.time_step_rank": "linear_num_value_heads",
    },
    adjust=adjust_qwen35,
    norm_offset=1.0,
    norms_without_offset=frozenset(("ssm_norm",)),
    functions={"ssm_a": log_of_negated},
    arrange=restore_linear_attention,
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
        adjust=refuse_sliding_window,
    ),
    "gemma2": GEMMA2,
    "gemma3": GGUFArchitecture(
        model_type="gemma3_text",
        block=DENSE_BLOCK | NORMS_AROUND | QK_NORMS,
        settings={
            "attention.sliding_window": "sliding_window",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        adjust=adjust_gemma3,
        norm_offset=1.0,
    ),
    "phi3": GGUFArchitecture(
        model_type="phi3",
        block=DENSE_BLOCK | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        settings={"attention.sliding_window": "sliding_window"},
        adjust=adjust_phi3,
    ),
    "gemma": GGUFArchitecture(model_type="gemma", block=DENSE_BLOCK, norm_offset=1.0),
    "gemma3n": GGUFArchitecture(
        model_type="gemma3n_text",
        block=DENSE_BLOCK | NORMS_AROUND | QK_NORMS | GEMMA3N_BLOCK,
        outside=GEMMA3N_OUTSIDE,
        settings={
            "attention.sliding_window": "sliding_window",
            "attention.shared_kv_layers": "num_kv_shared_layers",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
            "final_logit_softcapping": "final_logit_softcapping",
            "altup.active_idx": "altup_active_idx",
            "altup.num_inputs": "altup_num_inputs",
        },
        adjust=adjust_gemma3n,
        listed=frozenset(("feed_forward_length",)),
        arrange=drop_shared_kv,
    ),
    "gemma4": GGUFArchitecture(
        model_type="gemma4_text",
        block=DENSE_BLOCK | NORMS_AROUND | QK_NORMS | GEMMA4_BLOCK,
        outside=GEMMA4_OUTSIDE,
        settings=GEMMA4_SETTINGS,
        adjust=adjust_gemma4,
        listed=frozenset(("feed_forward_length", "attention.head_count_kv")),
        arrange=drop_shared_kv,
        config_has_rope_factors=True,
    ),
    "glm4": GGUFArchitecture(model_type="glm4", block=GLM4_BLOCK, adjust=adjust_glm4),
    "gpt-oss": GGUFArchitecture(
        model_type="gpt_oss",
        block=GPT_OSS_BLOCK,
        settings={
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "intermediate_size",
            "attention.sliding_window": "sliding_window",
        },
        adjust=adjust_gpt_oss,
        arrange=merge_gpt_oss_experts,
    ),
    "ministral3": GGUFArchitecture(
        model_type="ministral3",
        block=DENSE_BLOCK,
        adjust=adjust_ministral3,
        interleaved_rope=True,
    ),
    "mistral3": LLAMA,
    "qwen35": QWEN35,
    "qwen35moe": replace(
        QWEN35,
        model_type="qwen3_5_moe_text",
        block={**QWEN35.block, **EXPERTS, **SHARED_EXPERT},
        settings={**QWEN35.settings, **EXPERT_SETTINGS},
    ),
}
"""``general.architecture`` → mapping; a "llama" with experts is "mixtral", a "mistral3" with scaled queries
"ministral3"."""


def find_architecture(settings: Settings) -> tuple[str, GGUFArchitecture]:
    """The prefix of a file's settings, and the mapping of its architecture.

    Raises:
        ModelError: if it is not supported, with the list of those that are.
    """
    name = settings.get("general.architecture")
    if not isinstance(name, str) or not name:
        raise ModelError("it does not name its general.architecture")
    kind = name
    if name == "llama" and settings.get("llama.expert_count"):
        kind = "mixtral"
    elif name == "mistral3" and settings.get("mistral3.attention.temperature_scale"):
        kind = "ministral3"
    if kind not in ARCHITECTURES:
        raise ModelError(
            f"it is of the architecture {name[:40]!r}, and kleash reads GGUF files of "
            f"{', '.join(sorted(ARCHITECTURES))}; give the model as a folder of safetensors"
        )
    return name, ARCHITECTURES[kind]


def config_attributes(
    name: str, architecture: GGUFArchitecture, settings: Settings, tensors: TensorSummary
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The attributes of a transformers configuration, and the settings of the architecture that are not mapped.

    Args:
        name: ``general.architecture``.
        architecture: its mapping.
        settings: of the file.
        tensors: of the file, with token_embd.weight; the embedding is tied if there is no output.weight.

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
        if key in architecture.listed and isinstance(value, list):
            continue
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
    attributes["vocab_size"] = tensors.shapes["token_embd.weight"][0]
    attributes["tie_word_embeddings"] = "output.weight" not in tensors.shapes
    attributes |= _rope(values, attributes) | dict(architecture.constants)
    if attributes["num_hidden_layers"] > len(tensors.shapes):
        raise ModelError(
            f"it claims {attributes['num_hidden_layers']} layers and has {len(tensors.shapes)} tensors"
        )
    if architecture.adjust is not None:
        try:
            architecture.adjust(attributes, values, tensors)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise ModelError(
                f"its settings have values that {name} cannot have ({error}); convert the model again"
            ) from error
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
            # llama.cpp multiplies the factor of the file by the one that transformers has as its default; a
            # logarithmic multiplier divides it.
            "attention_factor": values.get("rope.scaling.attn_factor", 1.0)
            * (0.1 * log(factor) + 1.0)
            / (0.1 * values.get("rope.scaling.yarn_log_multiplier", 0.0) * log(factor) + 1.0),
            "beta_fast": values.get("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": values.get("rope.scaling.yarn_beta_slow", 1.0),
        }
    elif kind not in ("none", "linear"):
        raise ModelError(f"its positions are scaled by {str(kind)[:40]!r}, which is not read from GGUF files")
    return rope


def parameter_name(name: str, architecture: GGUFArchitecture) -> str | None:
    """The parameter that a tensor of a file stands for; None if there is none.

    Args:
        name: of the tensor, such as "blk.3.attn_q.weight".
        architecture: of its file.

    Returns:
        Its name in a checkpoint, in which "{expert}" stands for the number of an expert.
    """
    if name in architecture.outside:
        return architecture.outside[name]
    stem, _, suffix = name.rpartition(".")
    if suffix in ("weight", "bias") and stem in OUTSIDE_BLOCKS:
        return f"{OUTSIDE_BLOCKS[stem]}.{suffix}"
    match = BLOCK_TENSOR.fullmatch(name)
    if match is None:
        return None
    number, part, suffix = match.groups()
    layer = f"model.layers.{number}."
    if f"{part}.{suffix}" in architecture.block:
        return layer + architecture.block[f"{part}.{suffix}"]
    if part not in architecture.block or suffix == "scale":
        return None
    return layer + architecture.block[part] + (f".{suffix}" if suffix else "")
