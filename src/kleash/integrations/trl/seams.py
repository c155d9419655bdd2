"""The TRL that these trainers were written for, and what of it they take hold of."""

from kleash.extras import import_extra, require_attributes, warn_if_untested

GRPO = "trl.trainer.grpo_trainer:GRPOTrainer"
RLOO = "trl.trainer.rloo_trainer:RLOOTrainer"
PASS = ("model", "input_ids", "attention_mask", "logits_to_keep", "batch_size")

import_extra("trl", "trl")
warn_if_untested("trl", at_least="1.16", below="1.17")
require_attributes(
    "trl",
    {
        f"{kind}.{method}": arguments
        for kind in (GRPO, RLOO)
        for method, arguments in {
            "_get_per_token_logps_and_entropies": PASS,
            "_generate_and_score_completions": ("inputs",),
            "_compute_loss": ("model", "inputs"),
            "_calculate_rewards": ("inputs", "prompts", "completions", "completion_ids_list"),
        }.items()
    }
    | {
        f"{GRPO}._generate": ("prompts",),
        "trl.trainer.distillation_trainer:DistillationTrainer._compute_loss": ("inputs",),
        "trl.trainer.utils:use_adapter": ("model", "adapter_name"),
        "trl.trainer.utils:add_fused_lm_head": ("model", "temperature", "cast_lm_head_to_fp32"),
        "trl.models.utils:disable_gradient_checkpointing": (),
    },
)

from trl.models.utils import disable_gradient_checkpointing  # noqa: E402 (after it is known to be the right one)
from trl.trainer.grpo_trainer import GRPOTrainer  # noqa: E402
from trl.trainer.rloo_trainer import RLOOTrainer  # noqa: E402
from trl.trainer.utils import add_fused_lm_head, use_adapter  # noqa: E402

__all__ = [
    "GRPOTrainer",
    "RLOOTrainer",
    "add_fused_lm_head",
    "disable_gradient_checkpointing",
    "use_adapter",
]
