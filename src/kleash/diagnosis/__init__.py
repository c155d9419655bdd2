"""Diagnosis of the mismatch between trainer and rollout engine, from files of log-probabilities."""

from kleash.diagnosis.causes import CAUSES, Cause
from kleash.diagnosis.doctor import diagnose, diagnose_file
from kleash.diagnosis.engine_numbers import measure_mismatch
from kleash.diagnosis.rollout_records import RolloutRecord, read_rollouts

__all__ = [
    "CAUSES",
    "Cause",
    "RolloutRecord",
    "diagnose",
    "diagnose_file",
    "measure_mismatch",
    "read_rollouts",
]
