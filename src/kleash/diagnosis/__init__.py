"""Diagnosis of the mismatch between trainer and rollout engine, from files of log-probabilities."""

from kleash.diagnosis.engine_numbers import measure_mismatch
from kleash.diagnosis.rollout_records import RolloutRecord, read_rollouts

__all__ = ["RolloutRecord", "measure_mismatch", "read_rollouts"]
