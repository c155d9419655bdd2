"""What several families of GGUF architectures share: names of experts, settings, positions, kinds of layers.

Source: llama.cpp, ``conversion/`` and ``src/models/``, which write and read the files.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from kleash.checkpoints.gguf.architectures import (
    MLP_PROJECTIONS,
    PROJECTIONS,
    SHAPE_SETTINGS,
    Settings,
    TensorSummary,
)
from kleash.errors import ModelError

RMS_NORM = "attention.layer_norm_rms_epsilon"
LLAMA_BIASES = {"attention_bias": PROJECTIONS, "mlp_bias": MLP_PROJECTIONS}
EXPERTS = {f"ffn_{part}_exps": f"mlp.experts.{{expert}}.{part}_proj" for part in ("gate", "up", "down")}
EXPERT_SETTINGS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
ROUTED_SETTINGS = {
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
}
"""Settings of experts that are chosen by scores with a bias."""
GATING, LEADING_DENSE = "expert_gating_func", "leading_dense_block_count"
SOFTMAX, SIGMOID = 1, 2
"""``expert_gating_func``."""


def layer_norm_shapes(attribute: str) -> dict[str, str]:
    """The settings of shapes of a model with LayerNorms, of which ``attribute`` has the epsilon."""
    shapes = {key: name for key, name in SHAPE_SETTINGS.items() if key != RMS_NORM}
    return shapes | {"attention.layer_norm_epsilon": attribute}


def check_gating(settings: Settings, expected: int) -> None:
    """Check the function of the scores by which experts are chosen.

    Raises:
        ModelError: if it is another than that of the architecture.
    """
    gating = settings.get("expert_gating_func", expected)
    if gating != expected:
        raise ModelError(f"its expert_gating_func is {str(gating)[:40]}, which its architecture has not")


def set_rope(attributes: dict[str, Any], **scaling: Any) -> None:
    """Put the settings of the rotary embedding into ``rope_parameters``, with another scaling if one is given."""
    stored_scaling = attributes.pop("rope_scaling", {"rope_type": "default"})
    attributes["rope_parameters"] = {
        **(scaling or stored_scaling),
        "rope_theta": attributes.pop("rope_theta"),
        "partial_rotary_factor": attributes.pop("partial_rotary_factor"),
    }


def adjust_partial_rope(attributes: dict[str, Any], settings: Settings, tensors: TensorSummary) -> None:
    """The part of a head that is rotated, for which transformers has another default than all of it."""
    set_rope(attributes)


def layer_types(settings: Settings, count: int, period: int | None) -> list[str]:
    """The kind of each layer; without a pattern in the file, every ``period``-th is without a sliding window."""
    pattern = settings.get("attention.sliding_window_pattern", period)
    if type(pattern) is int and pattern > 0:
        pattern = [bool((number + 1) % pattern) for number in range(count)]
    if not isinstance(pattern, list) or len(pattern) != count:
        raise ModelError(f"its attention.sliding_window_pattern is no list of {count} layers")
    return ["sliding_attention" if each else "full_attention" for each in pattern]


def log_of_negated(values: Tensor) -> Tensor:
    """log(-x): a file has -exp(A_log)."""
    return (-values).log()


def restore_convolutions(parameters: dict[str, Tensor], attributes: Mapping[str, Any]) -> None:
    """Put the kernels of convolutions into their shape: a file has no dimension for the one channel of a group."""
    for name in [name for name in parameters if name.endswith((".conv.weight", ".conv1d.weight"))]:
        parameters[name] = parameters[name].unsqueeze(1)
