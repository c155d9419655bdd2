"""``demonstration.json``: the result of ``kleash train`` without an algorithm."""

from dataclasses import dataclass
from pathlib import Path

from kleash.store.checksums import Checksums, require_sha256
from kleash.store.codec import to_json
from kleash.store.number import Number
from kleash.store.steps import STEPS, Sample

DEMONSTRATION = "demonstration.json"


@dataclass(frozen=True, kw_only=True)
class LeashSetting:
    """One of the runs: how tight its leash is, and where it led."""

    name: str
    """Its folder in that of the demonstration."""
    title: str
    description: str
    """How its beta is set, in words."""
    steps_sha256: str = ""
    """SHA-256 of its ``steps.jsonl``; empty where an older kleash wrote it."""


@dataclass(frozen=True, kw_only=True)
class BestOf:
    """What keeping the best of n responses of the reference reaches, and what it costs."""

    n: int
    reward: Number
    """Mean reward of the best."""
    kl: Number
    """KL(best of n || reference), in nats per response."""
    bound: float
    """log n - (n - 1)/n, which is often quoted in its place."""


@dataclass(frozen=True, kw_only=True)
class Demonstration:
    """``demonstration.json``: the result of ``kleash train`` without an algorithm, three PPO runs and best-of-n."""

    kleash: str
    reward: str
    """What is rewarded, by its dotted path."""
    meant: str
    """What it means, in words."""
    runs: tuple[LeashSetting, ...]
    best_of: tuple[BestOf, ...]
    samples: tuple[Sample, ...] = ()
    """Of the reference, before any training."""
    checksums: bool = True
    """Whether the folder has checksums."""

    def to_json(self) -> str:
        """As JSON text."""
        return to_json(self)

    @classmethod
    def read(cls, folder: Path) -> "Demonstration":
        """The demonstration in a folder.

        Raises:
            RunFolderError: if there is none, it is damaged, or one of its runs is another.
        """
        checksums = Checksums.read(folder, declared_by=DEMONSTRATION)
        demonstration = checksums.read_record(cls, folder / DEMONSTRATION, "a demonstration")
        for run in demonstration.runs:
            require_sha256(folder / run.name / STEPS, run.steps_sha256, f"what the run {run.title!r} wrote")
        return demonstration
