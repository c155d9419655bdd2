"""What a training run came to."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kleash.records.codec import to_json


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """``training.json``: how a run of ``kleash train`` ended."""

    kleash: str
    """The version that ran it."""
    algorithm: str
    """"ppo", "grpo", "rloo", "dpo" or "distill"."""
    steps: int
    """Steps that were taken, in all."""
    stopped: str | None = None
    """Why it ended before the last step, in words; None if it did not."""
    metrics: Mapping[str, float]
    """Of the last step, by kleash's names."""
    beta: float | None = None
    """Where the leash ended."""
    policy: str
    """Folder of the trained model or adapter, which "kleash measure --policy" reads."""
    out: str
    """The run's folder."""
    dtypes: Mapping[str, str] = field(default_factory=dict[str, str])
    """In which dtypes the weights of the models were in memory, by role: policy, and reference or teacher."""
    alerts: tuple[str, ...] = ()
    """The alerts of the run, in order."""

    def to_json(self) -> str:
        """As JSON text."""
        return to_json(self)
