"""Jobs, results and run folders: what is asked for, what came out, and how both lie on disk. No torch."""

from kleash.records.atomic import write_atomically
from kleash.records.comparison import COMPARED, ComparedRun, Comparison, RunDifference
from kleash.records.folder import RunFolder, RunHeader
from kleash.records.job import SHIPPED_POLICY, SHIPPED_PROMPTS, SHIPPED_REFERENCE, MeasureJob
from kleash.records.measurement import (
    SCHEMA,
    Bin,
    Counts,
    Drifted,
    EstimatorRecord,
    Measurement,
    ModelRecord,
    PromptDrift,
    RunningMean,
    SequenceTotal,
)
from kleash.records.number import Number

__all__ = [
    "COMPARED",
    "SCHEMA",
    "SHIPPED_POLICY",
    "SHIPPED_PROMPTS",
    "SHIPPED_REFERENCE",
    "Bin",
    "ComparedRun",
    "Comparison",
    "Counts",
    "Drifted",
    "EstimatorRecord",
    "MeasureJob",
    "Measurement",
    "ModelRecord",
    "Number",
    "PromptDrift",
    "RunDifference",
    "RunFolder",
    "RunHeader",
    "RunningMean",
    "SequenceTotal",
    "write_atomically",
]
