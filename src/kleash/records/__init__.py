"""Jobs, results and run folders: what is asked for, what came out, and how both lie on disk. No torch."""

from kleash.records.atomic import write_atomically
from kleash.records.audit import (
    AUDIT_SCHEMA,
    AccuracyRow,
    Audit,
    EdgeRow,
    Finding,
    GradientRow,
    MaskRow,
    ValueRow,
    ZoneRow,
)
from kleash.records.caching import CacheContents, CachedSource, CacheJob, CacheLabel
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
    "AUDIT_SCHEMA",
    "COMPARED",
    "SCHEMA",
    "SHIPPED_POLICY",
    "SHIPPED_PROMPTS",
    "SHIPPED_REFERENCE",
    "AccuracyRow",
    "Audit",
    "Bin",
    "CacheContents",
    "CacheJob",
    "CacheLabel",
    "CachedSource",
    "ComparedRun",
    "Comparison",
    "Counts",
    "Drifted",
    "EdgeRow",
    "EstimatorRecord",
    "Finding",
    "GradientRow",
    "MaskRow",
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
    "ValueRow",
    "ZoneRow",
    "write_atomically",
]
