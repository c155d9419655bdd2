"""TRL's GRPO and RLOO with a KL term whose value and gradient are those of KL(policy ‖ reference)."""

from kleash.integrations.trl.grpo import GRPOLeash, LeashedGRPOTrainer
from kleash.integrations.trl.rloo import LeashedRLOOTrainer, RLOOLeash
from kleash.integrations.trl.rollout_dump import RolloutDump

__all__ = [
    "GRPOLeash",
    "LeashedGRPOTrainer",
    "LeashedRLOOTrainer",
    "RLOOLeash",
    "RolloutDump",
]
