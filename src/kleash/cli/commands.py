"""The commands as records: their fields are the options."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kleash.errors import OptionError
from kleash.records import (
    CacheJob,
    DemonstrationJob,
    DistillJob,
    DPOJob,
    GRPOJob,
    MeasureJob,
    PPOJob,
    RLOOJob,
    TrainJob,
)


class Unchecked:
    """Options as they were typed."""

    def __post_init__(self) -> None:
        """Leave the checks to the job, whose errors are one line."""


def require_folder(job: MeasureJob | TrainJob) -> None:
    """See that ``--resume`` says what is gone on with.

    Raises:
        OptionError: if it does not.
    """
    if job.resume and job.out is None:
        raise OptionError("--resume goes on with the run in a folder: give it as --out")


@dataclass(frozen=True, kw_only=True)
class Measure(Unchecked, MeasureJob):
    """Measure how far one language model has drifted from another, and write a report.

    Without arguments: the small pair that ships with kleash.
    """

    def job(self) -> MeasureJob:
        """The job that was asked for.

        Raises:
            OptionError: if it means nothing.
        """
        job = MeasureJob(**asdict(self))
        require_folder(job)
        return job


@dataclass(frozen=True, kw_only=True)
class Report:
    """Rebuild the report of a run from its files."""

    folder: Path
    """The run's folder, as given to "kleash measure --out"."""


@dataclass(frozen=True, kw_only=True)
class Compare:
    """Compare runs on the same prompts: differences from the first one, with intervals, and a picture."""

    folders: tuple[Path, ...]
    """Two or more folders of finished runs; the others are compared with the first."""
    out: Path = Path("comparison.html")
    """The page that is written."""
    json: bool = False
    """Print the comparison as JSON instead of a table."""


@dataclass(frozen=True, kw_only=True)
class Audit:
    """Say what a KL function really estimates and differentiates, anyone's, by exact enumeration.

    Without arguments: kleash's own.
    """

    target: str = "kleash"
    """package.module:function; or kleash, liger, openrlhf, trl or verl, all the KL code that is known of
    that package; or one case of it, "verl:low_var_kl"."""
    convention: str | None = None
    """How package.module:function is called and what it returns: "loss", "reward", "logits" ...; without it,
    the most usual are explained and all are listed."""
    set: tuple[str, ...] = ()
    """Keyword arguments to call it with."""
    out: Path = Path("audit.html")
    """The page that is written."""
    json: bool = False
    """Print the audits as JSON instead of the verdicts."""
    fail_on: tuple[str, ...] = ()
    """Exit with 1 if there is a finding of one of these kinds; "wrong" (trains on or reports something else in ordinary
    use), "fragile" (only at extremes), "note" stand for all such, "fault" for wrong and fragile."""
    quiet: bool = False
    """Print nothing but what fails."""


@dataclass(frozen=True, kw_only=True)
class Cache(Unchecked, CacheJob):
    """Run a reference once over text or responses and keep its final hidden states and its head.

    Any number of candidates are then measured against it with "kleash measure --reference-cache", which does
    not load the reference. Started again after an interruption, it goes on where it stopped. There is no
    --prompts: what a policy will answer cannot be read before it has. Without arguments: the reference and the
    text that ship with kleash.
    """

    def job(self) -> CacheJob:
        """The job that was asked for.

        Raises:
            OptionError: if it means nothing.
        """
        return CacheJob(**asdict(self))


@dataclass(frozen=True, kw_only=True)
class Demonstrate(Unchecked, DemonstrationJob):
    """See what a leash does: the shipped model and a reward that is easily hacked, three times.

    Once off the leash, once on a good one, once on one that is too tight. About two minutes on two cores.
    """


@dataclass(frozen=True, kw_only=True)
class PPO(Unchecked, PPOJob):
    """Train by PPO: the policy answers, is rewarded, and is kept near the reference.

    Without arguments: the model and the prompts that ship with kleash, and a reward that is easily hacked.
    """


@dataclass(frozen=True, kw_only=True)
class GRPO(Unchecked, GRPOJob):
    """Train by GRPO (TRL's): the answers to one prompt are compared with each other.

    Without arguments: the model and the prompts that ship with kleash, and a reward that is easily hacked.
    """


@dataclass(frozen=True, kw_only=True)
class RLOO(Unchecked, RLOOJob):
    """Train by RLOO (TRL's): each answer is compared with the others to the same prompt.

    Without arguments: the model and the prompts that ship with kleash, and a reward that is easily hacked.
    """


@dataclass(frozen=True, kw_only=True)
class DPO(Unchecked, DPOJob):
    """Train by DPO (TRL's): from pairs of a chosen and a rejected answer."""


@dataclass(frozen=True, kw_only=True)
class Distill(Unchecked, DistillJob):
    """Train a policy to say what a teacher would: it answers, and learns from the teacher's distributions.

    Without arguments: the two models that ship with kleash.
    """


Algorithm = Demonstrate | PPO | GRPO | RLOO | DPO | Distill
ALGORITHMS: Mapping[str, type] = {"ppo": PPO, "grpo": GRPO, "rloo": RLOO, "dpo": DPO, "distill": Distill}
JOBS: dict[type, type[TrainJob]] = {
    PPO: PPOJob,
    GRPO: GRPOJob,
    RLOO: RLOOJob,
    DPO: DPOJob,
    Distill: DistillJob,
}


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a language model on a leash to its reference.

    Without an algorithm: a demonstration of what the leash does, in two minutes.
    """

    algorithm: Algorithm = Demonstrate()

    def job(self) -> Any:
        """The job that was asked for.

        Raises:
            OptionError: if it means nothing.
        """
        kind: Any = JOBS.get(type(self.algorithm), DemonstrationJob)
        job = kind(**asdict(self.algorithm))
        if isinstance(job, TrainJob):
            require_folder(job)
        return job


Command = Measure | Report | Compare | Cache | Audit | Train
