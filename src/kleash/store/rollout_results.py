"""The results of ``kleash mismatch`` and ``kleash doctor``, of a trainer's and an engine's log-probabilities."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kleash.estimate import Estimate
from kleash.store.measurement import Gate
from kleash.store.summary import MeasuredResult

LABELS: Mapping[str, str] = {
    "kl_engine_trainer": "KL(engine ‖ trainer)",
    "kl_engine_trainer_k1": "the same by k1",
    "kl_trainer_engine": "KL(trainer ‖ engine)",
    "jensen_shannon": "Jensen-Shannon",
    "chi_squared": "chi-squared(trainer ‖ engine)",
    "mean_weight": "mean weight, trainer / engine",
    "perplexity_trainer": "perplexity of the trainer",
    "perplexity_engine": "perplexity of the engine",
    "perplexity_ratio": "perplexity ratio",
    "sequence_kl_engine_trainer": "KL(engine ‖ trainer) per response",
    "sequence_chi_squared": "chi-squared of responses",
    "sequence_mean_weight": "mean weight of responses",
}
"""Field of ``kleash.leash.Mismatch`` -> its label."""


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class MismatchRecord(MeasuredResult):
    """How far the trainer's log-probabilities are from those of the engine that drew the tokens."""

    kleash: str
    """Version that measured."""
    file: str
    """The file; of several, the first and how many more there are."""
    tokens: int
    """Tokens that count."""
    sequences: int
    """Responses with a token that counts."""
    prompts: int
    """Different prompts: the clusters of the standard errors."""
    numbers: Mapping[str, Estimate]
    """Statistics with their errors; names as in ``kleash.leash.Mismatch``."""
    values: Mapping[str, float]
    """Statistics without an error: effective sample sizes, extremes, the fields of ``SequenceMeans`` and
    ``ProbabilityGaps``."""
    renamed: Mapping[str, float] = field(default_factory=dict[str, float])
    """The statistics under the names and definitions of ``--names``; empty without that option."""
    files: Mapping[str, int] = field(default_factory=dict[str, int])
    """File -> the number of its rollouts."""
    kl_by_file: Mapping[str, Estimate] = field(default_factory=dict[str, Estimate])
    """KL(engine || trainer) per token of each of several files; empty for one."""
    notes: tuple[str, ...] = ()
    """In what several files differ."""
    gate: Gate | None = None
    """The verdict of ``--at-most`` on KL(engine || trainer)."""


@dataclass(frozen=True, kw_only=True)
class LikelyCause:
    """A cause of a mismatch, with its probability and what supports it."""

    cause: str
    """Its name in ``kleash.diagnosis.causes.CAUSES``."""
    meaning: str
    probability: float
    """From the likelihood of held-out responses under this cause and all others; of equal causes together."""
    evidence: str
    next_test: str
    """What confirms or repairs it."""
    alike: tuple[str, ...] = ()
    """Causes that the data cannot tell from this one; the probability is that of all of them."""


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Diagnosis(MeasuredResult):
    """The likely causes of a mismatch, the likeliest first; none if rounding explains the differences."""

    kleash: str
    """Version that diagnosed."""
    file: str
    """The file; of several, the first and how many more there are."""
    tokens: int
    sequences: int
    models: tuple[str, ...]
    """Policy and reference that scored the tokens again; empty without them."""
    examined: bool
    """Whether there were tokens enough for a diagnosis."""
    findings: tuple[LikelyCause, ...]
    notes: tuple[str, ...] = ()
    """What could not be examined, and why; in what several files differ."""
    files: Mapping[str, int] = field(default_factory=dict[str, int])
    """File -> the number of its rollouts; empty if they were not read from a file."""
