"""Diagnosis of the mismatch between trainer and rollout engine, from files of log-probabilities."""

from kleash.diagnosis.doctor import diagnose
from kleash.diagnosis.engine_numbers import measure_mismatch
from kleash.diagnosis.rollout_files import read_rollouts
from kleash.diagnosis.rollout_records import RolloutRecord

__all__ = [
    "RolloutRecord",
    "diagnose",
    "measure_mismatch",
    "read_rollouts",
]
