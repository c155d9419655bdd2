"""Jobs, results and run folders: what is asked for, what came out, and how both lie on disk. No torch."""

from kleash.records.algorithms import DistillJob, DPOJob, GRPOJob, PPOJob, RLOOJob
from kleash.records.atomic import write_atomically
from kleash.records.audit import (
    AUDIT_SCHEMA,
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
from kleash.records.caching import CacheContents, CachedSource, CacheJob, CacheLabel
from kleash.records.comparison import ComparedRun, Comparison, RunDifference
from kleash.records.demonstration import BestOf, Demonstration, DemonstrationJob, LeashSetting
from kleash.records.folder import RunFolder, RunHeader
from kleash.records.job import SHIPPED_POLICY, SHIPPED_PROMPTS, SHIPPED_REFERENCE, MeasureJob
from kleash.records.measurement import (
    SCHEMA,
    Bin,
    ConvergencePoint,
    Counts,
    Drifted,
    EstimatorRecord,
    Measurement,
    ModelRecord,
    PromptDrift,
    SequenceTotal,
)
from kleash.records.metrics import METRICS, Metric, metric_of, spelt
from kleash.records.number import Number
from kleash.records.statistics import COMPARED, PERPLEXITIES, STATISTICS, Statistic
from kleash.records.steps import (
    HackingAlert,
    Sample,
    SampleRecord,
    StepRecord,
    append_step,
    keep_steps,
    read_samples,
    read_steps,
)
from kleash.records.training import OnlineJob, RewardJob, TrainJob
from kleash.records.training_folder import TrainingFolder
from kleash.records.training_result import TrainingResult

__all__ = [
    "AUDIT_SCHEMA",
    "COMPARED",
    "METRICS",
    "PERPLEXITIES",
    "SCHEMA",
    "SHIPPED_POLICY",
    "SHIPPED_PROMPTS",
    "SHIPPED_REFERENCE",
    "STATISTICS",
    "AccuracyRow",
    "Audit",
    "BestOf",
    "Bin",
    "CacheContents",
    "CacheJob",
    "CacheLabel",
    "CachedSource",
    "CallRow",
    "ComparedRun",
    "Comparison",
    "ConvergencePoint",
    "Counts",
    "CurveRow",
    "DPOJob",
    "Demonstration",
    "DemonstrationJob",
    "DistillJob",
    "Drifted",
    "EdgeRow",
    "EstimatorRecord",
    "Finding",
    "GRPOJob",
    "GradientRow",
    "HackingAlert",
    "LeashSetting",
    "MaskRow",
    "MeasureJob",
    "Measurement",
    "Metric",
    "ModelRecord",
    "Number",
    "OnlineJob",
    "PPOJob",
    "PromptDrift",
    "RLOOJob",
    "RewardJob",
    "RunDifference",
    "RunFolder",
    "RunHeader",
    "Sample",
    "SampleRecord",
    "SequenceTotal",
    "Statistic",
    "StepRecord",
    "TrainJob",
    "TrainingFolder",
    "TrainingResult",
    "ValueRow",
    "ZoneRow",
    "append_step",
    "keep_steps",
    "metric_of",
    "read_samples",
    "read_steps",
    "spelt",
    "write_atomically",
]
