"""TRL's GRPO and RLOO with a KL term whose value and gradient are those of KL(policy ‖ reference)."""

from kleash.integrations.trl.grpo import GRPOLeash, LeashedGRPOTrainer
from kleash.integrations.trl.rloo import LeashedRLOOTrainer, RLOOLeash
from kleash.integrations.trl.rollout_dump import RolloutDump
from kleash.registry import refuse_former

__all__ = [
    "GRPOLeash",
    "LeashedGRPOTrainer",
    "LeashedRLOOTrainer",
    "RLOOLeash",
    "RolloutDump",
]

__getattr__ = refuse_former(
    __name__,
    dict.fromkeys(
        ("ResponseStatistics", "response_statistics"),
        "kleash.attach logs the exact KL and the entropy of each batch from the passes of its loss",
    ),
)
