"""Results, and how they lie on disk: JSON records, tables, run folders and their checksums. No torch."""

from kleash.estimate import Estimate as Number
from kleash.store.audit import Audit, Finding
from kleash.store.cache import CacheContents, WrittenLogits
from kleash.store.comparison import ComparedRun, Comparison, RunDifference
from kleash.store.measurement import Counts, Gate, Measurement
from kleash.store.number_rows import NumberRow, number_rows
from kleash.store.result_summaries import Summary, summarize
from kleash.store.rollout_results import Diagnosis, MismatchRecord
from kleash.store.run_folder import RunFolder
from kleash.store.statistics import STATISTICS, Statistic
from kleash.store.steps import HackingAlert, Sample, SampleRecord, StepRecord, read_samples, read_steps
from kleash.store.sweep import Attribution, Sweep, SweepCandidate, SweepPair
from kleash.store.training_folder import TrainingFolder, TrainingResult

__all__ = [
    "STATISTICS",
    "Attribution",
    "Audit",
    "CacheContents",
    "ComparedRun",
    "Comparison",
    "Counts",
    "Diagnosis",
    "Finding",
    "Gate",
    "HackingAlert",
    "Measurement",
    "MismatchRecord",
    "Number",
    "NumberRow",
    "RunDifference",
    "RunFolder",
    "Sample",
    "SampleRecord",
    "Statistic",
    "StepRecord",
    "Summary",
    "Sweep",
    "SweepCandidate",
    "SweepPair",
    "TrainingFolder",
    "TrainingResult",
    "WrittenLogits",
    "number_rows",
    "read_samples",
    "read_steps",
    "summarize",
]
