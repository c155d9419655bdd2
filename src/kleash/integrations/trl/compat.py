"""TRL beyond its documented interface: the versions known, and every private method and attribute that is used.

Known: TRL 1.8 to 1.13, and 1.16; one beyond is a warning. Importing this module checks methods, functions and their
arguments; one that is missing is a ``CannotRunError`` that names it, as of TRL 1.14.

| of TRL | used for |
|---|---|
| ``_get_per_token_logps_and_entropies`` | forward passes of policy and reference, whose hidden states are captured |
| ``_generate_and_score_completions`` | adding the reference's pass; the penalty in the reward |
| ``_compute_loss`` | adding the KL term to TRL's loss; the entropy of distillation |
| ``_calculate_rewards`` | which responses have a reward |
| ``_tokenize_prompts`` | prompts as tokens |
| ``split_pixel_values_by_grid`` | which images a prompt has |
| transformers' ``_get_logits_processor`` | the log-probabilities of generation (``RolloutDump``) |
| ``_metrics`` (not checked: set by the trainer's ``__init__``) | logging |
| ``use_adapter``, ``add_fused_lm_head``, ``disable_gradient_checkpointing`` | passes of the reference |
| the forward that ``add_fused_lm_head`` makes (not checked; not in TRL 1.13) | a pass without the head |
| Accelerate's ``_original_forward`` of a network (not checked) | reading a head under ``bf16=True`` |
| ``prepare_fsdp``, ``prepare_deepspeed`` | sharding the reference as the policy |
"""

from typing import Any

from kleash.extras import import_extra, require_attributes, warn_if_untested

GRPO = "trl.trainer.grpo_trainer:GRPOTrainer"
RLOO = "trl.trainer.rloo_trainer:RLOOTrainer"
MIXIN: Any = object
"""Base of the classes that stand before one of TRL's trainers: to a type checker, they have its attributes."""
FORWARD_PASS_ARGUMENTS = ("model", "input_ids", "attention_mask", "logits_to_keep", "batch_size")

add_fused_lm_head: Any = getattr(import_extra("trl.trainer.utils", "trl"), "add_fused_lm_head", None)
"""None where TRL's passes have the logits of the network's own head."""

warn_if_untested("trl", at_least="1.8", below="1.17")
require_attributes(
    "trl",
    {
        f"{trainer}.{method}": arguments
        for trainer in (GRPO, RLOO)
        for method, arguments in {
            "_get_per_token_logps_and_entropies": FORWARD_PASS_ARGUMENTS,
            "_generate_and_score_completions": ("inputs",),
            "_compute_loss": ("model", "inputs"),
            "_calculate_rewards": ("inputs", "prompts", "completions", "completion_ids_list"),
            "_tokenize_prompts": ("prompts",),
        }.items()
    }
    | {
        "transformers:GenerationMixin._get_logits_processor": (),
        "trl.trainer.utils:use_adapter": ("model", "adapter_name"),
        "trl.trainer.utils:split_pixel_values_by_grid": ("batch",),
        "trl.models.utils:disable_gradient_checkpointing": (),
        "trl.models.utils:prepare_fsdp": ("model", "accelerator"),
        "trl.models.utils:prepare_deepspeed": ("model", "accelerator"),
    }
    | (
        {}
        if add_fused_lm_head is None
        else {"trl.trainer.utils:add_fused_lm_head": ("model", "temperature", "cast_lm_head_to_fp32")}
    ),
)

from trl.models.utils import (  # noqa: E402 (after the check)
    disable_gradient_checkpointing,
    prepare_deepspeed,
    prepare_fsdp,
)
from trl.trainer.grpo_trainer import GRPOTrainer  # noqa: E402
from trl.trainer.rloo_trainer import RLOOTrainer  # noqa: E402
from trl.trainer.utils import split_pixel_values_by_grid, use_adapter  # noqa: E402

__all__ = [
    "MIXIN",
    "GRPOTrainer",
    "RLOOTrainer",
    "add_fused_lm_head",
    "disable_gradient_checkpointing",
    "prepare_deepspeed",
    "prepare_fsdp",
    "split_pixel_values_by_grid",
    "use_adapter",
]
