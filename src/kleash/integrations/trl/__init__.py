"""TRL's trainers with a KL whose value and gradient are those of the divergence it names."""

from kleash.integrations.trl.grpo import GRPOLeash, LeashedGRPOTrainer
from kleash.integrations.trl.responses import ResponseStatistics, response_statistics
from kleash.integrations.trl.rloo import LeashedRLOOTrainer, RLOOLeash
from kleash.integrations.trl.terms import LOSS_TYPES

__all__ = [
    "LOSS_TYPES",
    "GRPOLeash",
    "LeashedGRPOTrainer",
    "LeashedRLOOTrainer",
    "RLOOLeash",
    "ResponseStatistics",
    "response_statistics",
]

_FORMER_NAMES = {"Told": "ResponseStatistics"}


def __getattr__(name: str) -> object:
    """Former names of classes."""
    if name in _FORMER_NAMES:
        return globals()[_FORMER_NAMES[name]]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
