"""The commands and their jobs, whose fields are the options."""

import inspect
from collections.abc import Mapping

from kleash.jobs import (
    CacheJob,
    DistillJob,
    DPOJob,
    GRPOJob,
    LogitsJob,
    MeasureJob,
    PPOJob,
    RLOOJob,
    SweepJob,
    TrainJob,
)
from kleash.jobs.demonstration import DemonstrationJob
from kleash.jobs.pages import AuditJob, CompareJob, MergeJob, ReportJob
from kleash.jobs.rollout_jobs import DoctorJob, MismatchJob

RichCommand = (
    MeasureJob
    | SweepJob
    | MergeJob
    | ReportJob
    | CompareJob
    | MismatchJob
    | DoctorJob
    | CacheJob
    | LogitsJob
    | DemonstrationJob
    | TrainJob
)
"""A command that prints with rich."""
Command = RichCommand | AuditJob
ALGORITHMS: Mapping[str, type[TrainJob]] = {
    job.algorithm: job for job in (PPOJob, GRPOJob, RLOOJob, DPOJob, DistillJob)
}
SUBCOMMANDS: Mapping[str, tuple[str, ...]] = {
    "": (
        *("measure", "sweep", "merge", "report", "compare", "mismatch", "doctor", "cache", "logits", "audit"),
        "train",
    ),
    "train": ("demonstration", *ALGORITHMS),
}
RECORDS: Mapping[str, type[Command]] = {
    "measure": MeasureJob,
    "sweep": SweepJob,
    "merge": MergeJob,
    "report": ReportJob,
    "compare": CompareJob,
    "mismatch": MismatchJob,
    "doctor": DoctorJob,
    "cache": CacheJob,
    "logits": LogitsJob,
    "audit": AuditJob,
    "train": DemonstrationJob,
    "train demonstration": DemonstrationJob,
    **{f"train {name}": job for name, job in ALGORITHMS.items()},
}
DESCRIPTIONS: Mapping[str, str] = {
    **{name: inspect.getdoc(record) or "" for name, record in RECORDS.items()},
    "": "KL divergence between language models: measured exactly and with error bars.",
    "train": "Train a language model with a KL penalty to its reference.\n\n"
    "Without an algorithm, runs a demonstration of the penalty's effect, in two minutes.",
}
EPILOGS: Mapping[str, str] = {
    "": "kleash COMMAND --help explains a command. Without options, measure, cache, audit and train work on the small "
    "models that ship with kleash.",
    "train": "kleash train ALGORITHM --help shows the options of an algorithm. The options of the demonstration may "
    'also directly follow "kleash train".',
}
