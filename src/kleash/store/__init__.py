"""Results, and how they lie on disk: JSON records, tables, run folders and their checksums. No torch."""

from kleash.store.array_task import ArrayTask
from kleash.store.audit import (
    AccuracyRow,
    Audit,
    CallRow,
    CurveRow,
    EdgeRow,
    Finding,
    GradientRow,
    MaskRow,
    ValueRow,
    ZoneRow,
)
from kleash.store.cache import CacheContents, CachedSource, CacheLabel
from kleash.store.comparison import ComparedRun, Comparison, RunDifference
from kleash.store.demonstration import BestOf, Demonstration, LeashSetting
from kleash.store.gate import Gate
from kleash.store.job_folder import RunHeader
from kleash.store.likely_causes import Diagnosis, LikelyCause
from kleash.store.logits_record import LogitsMeasurement, WrittenLogits
from kleash.store.measurement import (
    Bin,
    ConvergencePoint,
    Counts,
    Drifted,
    EstimatorRecord,
    Measurement,
    ModelRecord,
    PromptDrift,
    SequenceTotal,
    StoredWeights,
)
from kleash.store.metrics import METRICS, Metric, metric_of, spelt
from kleash.store.mismatch_record import MismatchRecord
from kleash.store.number import Number
from kleash.store.run_folder import RunFolder
from kleash.store.statistics import COMPARED, PERPLEXITIES, STATISTICS, Statistic
from kleash.store.steps import (
    HackingAlert,
    Sample,
    SampleRecord,
    StepRecord,
    append_step,
    keep_steps,
    read_samples,
    read_steps,
)
from kleash.store.training_folder import TrainingFolder, TrainingResult

__all__ = [
    "COMPARED",
    "METRICS",
    "PERPLEXITIES",
    "STATISTICS",
    "AccuracyRow",
    "ArrayTask",
    "Audit",
    "BestOf",
    "Bin",
    "CacheContents",
    "CacheLabel",
    "CachedSource",
    "CallRow",
    "ComparedRun",
    "Comparison",
    "ConvergencePoint",
    "Counts",
    "CurveRow",
    "Demonstration",
    "Diagnosis",
    "Drifted",
    "EdgeRow",
    "EstimatorRecord",
    "Finding",
    "Gate",
    "GradientRow",
    "HackingAlert",
    "LeashSetting",
    "LikelyCause",
    "LogitsMeasurement",
    "MaskRow",
    "Measurement",
    "Metric",
    "MismatchRecord",
    "ModelRecord",
    "Number",
    "PromptDrift",
    "RunDifference",
    "RunFolder",
    "RunHeader",
    "Sample",
    "SampleRecord",
    "SequenceTotal",
    "Statistic",
    "StepRecord",
    "StoredWeights",
    "TrainingFolder",
    "TrainingResult",
    "ValueRow",
    "WrittenLogits",
    "ZoneRow",
    "append_step",
    "keep_steps",
    "metric_of",
    "read_samples",
    "read_steps",
    "spelt",
]
