"""Jobs: the options of each command as a record, checked when it is made. No torch."""

from kleash.jobs.algorithms import DistillJob, DPOJob, GRPOJob, PPOJob, RLOOJob
from kleash.jobs.cache import CacheJob
from kleash.jobs.demonstration import DemonstrationJob
from kleash.jobs.logits import LogitsJob
from kleash.jobs.measure import MeasureJob
from kleash.jobs.option_groups import SHIPPED_POLICY, SHIPPED_PROMPTS, SHIPPED_REFERENCE
from kleash.jobs.pages import AuditJob, CompareJob, MergeJob, ReportJob
from kleash.jobs.reading import ReadOptions
from kleash.jobs.rollout_jobs import DoctorJob, MismatchJob
from kleash.jobs.train import OnlineJob, RewardJob, TrainJob

__all__ = [
    "SHIPPED_POLICY",
    "SHIPPED_PROMPTS",
    "SHIPPED_REFERENCE",
    "AuditJob",
    "CacheJob",
    "CompareJob",
    "DPOJob",
    "DemonstrationJob",
    "DistillJob",
    "DoctorJob",
    "GRPOJob",
    "LogitsJob",
    "MeasureJob",
    "MergeJob",
    "MismatchJob",
    "OnlineJob",
    "PPOJob",
    "RLOOJob",
    "ReadOptions",
    "ReportJob",
    "RewardJob",
    "TrainJob",
]
