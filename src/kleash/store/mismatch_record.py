"""The result of ``kleash mismatch``: statistics of a trainer's and an engine's log-probabilities."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kleash.estimate import Estimate
from kleash.store.gate import Gate
from kleash.store.notebook import Result

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


@dataclass(frozen=True, kw_only=True)
class MismatchRecord(Result):
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
