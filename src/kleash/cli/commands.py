"""The commands and their records, whose fields are the options."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

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


@dataclass(frozen=True, kw_only=True)
class ReportCommand:
    """Rebuild the report of a run from its files."""

    folder: Path
    """The run's folder, as given to "kleash measure --out"."""


@dataclass(frozen=True, kw_only=True)
class CompareCommand:
    """Compare runs on the same prompts: differences from the first one, with intervals, and a picture."""

    folders: tuple[Path, ...]
    """Two or more folders of finished runs; the others are compared with the first."""
    out: Path = Path("comparison.html")
    """The page that is written."""
    json: bool = False
    """Print the comparison as JSON instead of a table."""


@dataclass(frozen=True, kw_only=True)
class AuditCommand:
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


Command = MeasureJob | ReportCommand | CompareCommand | CacheJob | AuditCommand | DemonstrationJob | TrainJob
ALGORITHMS: Mapping[str, type[TrainJob]] = {
    job.algorithm: job for job in (PPOJob, GRPOJob, RLOOJob, DPOJob, DistillJob)
}
SUBCOMMANDS: Mapping[str, tuple[str, ...]] = {
    "": ("measure", "report", "compare", "cache", "audit", "train"),
    "train": ("demonstration", *ALGORITHMS),
}
RECORDS: Mapping[str, type[Command]] = {
    "measure": MeasureJob,
    "report": ReportCommand,
    "compare": CompareCommand,
    "cache": CacheJob,
    "audit": AuditCommand,
    "train": DemonstrationJob,
    "train demonstration": DemonstrationJob,
    **{f"train {name}": job for name, job in ALGORITHMS.items()},
}
DESCRIPTIONS: Mapping[str, str] = {
    **{name: inspect.getdoc(record) or "" for name, record in RECORDS.items()},
    "": "KL divergence between language models: measured exactly and with error bars.",
    "train": "Train a language model on a leash to its reference.\n\n"
    "Without an algorithm: a demonstration of what the leash does, in two minutes.",
}
EPILOGS: Mapping[str, str] = {
    "": "kleash COMMAND --help explains a command. Without options, measure, cache, audit and train work on the small "
    "models that ship with kleash.",
    "train": "kleash train ALGORITHM --help shows the options of each; those of the demonstration may follow "
    '"kleash train" at once.',
}
