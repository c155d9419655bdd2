"""TRL's trainers with a KL whose value and gradient are those of the divergence it names."""

from kleash.integrations.trl.grpo import GRPOLeash, LeashedGRPOTrainer
from kleash.integrations.trl.responses import Told, response_statistics
from kleash.integrations.trl.rloo import LeashedRLOOTrainer, RLOOLeash
from kleash.integrations.trl.terms import LOSS_TYPES

__all__ = [
    "LOSS_TYPES",
    "GRPOLeash",
    "LeashedGRPOTrainer",
    "LeashedRLOOTrainer",
    "RLOOLeash",
    "Told",
    "response_statistics",
]
