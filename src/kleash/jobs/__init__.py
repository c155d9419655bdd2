"""Jobs: the options of each command as a record, checked when it is made. No torch."""

from kleash.jobs.algorithms import DistillJob, DPOJob, GRPOJob, PPOJob, RLOOJob
from kleash.jobs.cache import CacheJob
from kleash.jobs.measure import MeasureJob
from kleash.jobs.reading import ReadOptions
from kleash.jobs.sweep import SweepJob
from kleash.jobs.train import TrainJob

__all__ = [
    "CacheJob",
    "DPOJob",
    "DistillJob",
    "GRPOJob",
    "MeasureJob",
    "PPOJob",
    "RLOOJob",
    "ReadOptions",
    "SweepJob",
    "TrainJob",
]
