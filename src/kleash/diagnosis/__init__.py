"""Diagnosis of the mismatch between trainer and rollout engine, from files of log-probabilities."""

from kleash.diagnosis.doctor import diagnose
from kleash.diagnosis.engine_numbers import measure_mismatch
from kleash.diagnosis.rollout_files import read_rollouts
from kleash.diagnosis.rollout_records import RolloutRecord, write_rollouts

__all__ = [
    "RolloutRecord",
    "diagnose",
    "measure_mismatch",
    "read_rollouts",
    "write_rollouts",
]
