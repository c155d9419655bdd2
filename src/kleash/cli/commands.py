"""The commands and their jobs, whose fields are the options."""

import inspect
from collections.abc import Mapping

from kleash.jobs import (
    CacheJob,
    DistillJob,
    DPOJob,
    GRPOJob,
    MeasureJob,
    PPOJob,
    RLOOJob,
    SweepJob,
    TrainJob,
)
from kleash.jobs.pages import AuditJob, CompareJob, ReportJob
from kleash.jobs.rollout_jobs import DoctorJob, MismatchJob

RichCommand = MeasureJob | SweepJob | ReportJob | CompareJob | MismatchJob | DoctorJob | CacheJob | TrainJob
"""A command that prints with rich."""
Command = RichCommand | AuditJob
ALGORITHMS: Mapping[str, type[TrainJob]] = {
    job.algorithm: job for job in (PPOJob, GRPOJob, RLOOJob, DPOJob, DistillJob)
}
SUBCOMMANDS: Mapping[str, tuple[str, ...]] = {
    "": (
        *("measure", "sweep", "report", "compare", "mismatch", "doctor", "cache", "audit"),
        "train",
    ),
    "train": tuple(ALGORITHMS),
}
RECORDS: Mapping[str, type[Command]] = {
    "measure": MeasureJob,
    "sweep": SweepJob,
    "report": ReportJob,
    "compare": CompareJob,
    "mismatch": MismatchJob,
    "doctor": DoctorJob,
    "cache": CacheJob,
    "audit": AuditJob,
    **{f"train {name}": job for name, job in ALGORITHMS.items()},
}
DESCRIPTIONS: Mapping[str, str] = {
    **{name: inspect.getdoc(record) or "" for name, record in RECORDS.items()},
    "": "KL divergence between language models: measured exactly and with error bars.",
    "train": "Train a language model with a KL penalty to its reference.",
}
EPILOGS: Mapping[str, str] = {
    "": "kleash COMMAND --help explains a command. Without options, measure, cache, audit and train work on the small "
    "models that ship with kleash.",
    "train": "kleash train ALGORITHM --help shows the options of an algorithm. The shortest command with a reward of "
    "yours: kleash train ppo --policy P --prompts prompts.jsonl --reward my_rewards:helpful",
}
