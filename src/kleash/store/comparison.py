"""The results of comparing measurements, or training runs: the first one, and how each of the others differs."""

from collections.abc import Mapping
from dataclasses import dataclass

from kleash.estimate import Estimate
from kleash.store.measurement import Counts, Gate
from kleash.store.statistics import KL_POLICY_REFERENCE
from kleash.store.summary import MeasuredResult
from kleash.store.training_folder import TrainingResult


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """One run among those that are compared."""

    name: str
    """Short, and different from the other runs' names."""
    folder: str
    estimand: str
    """In words, as in the run's own measurement."""
    policy: str
    reference: str
    counts: Counts
    numbers: Mapping[str, Estimate]
    """The run's own means per token, over all of its prompts, and its perplexities; names as in
    ``STATISTICS``."""
    noise_floor: Estimate | None = None
    warnings: tuple[str, ...] = ()
    """All warnings of the run's own report."""
    source: str = "prompts"
    """What was read: "prompts", "text" or "responses"."""
    gate: Gate | None = None
    """The verdict of ``--at-most``; absent without that option, and of the first run."""


@dataclass(frozen=True, kw_only=True)
class RunDifference:
    """One run minus another, on the prompts that both have seen."""

    name: str
    """The run that the other one is taken from."""
    minus: str
    """The run that is taken away: the first one."""
    shared_prompts: int
    """Prompts (on text: documents) that both have, told by their hash; the differences are over these alone."""
    only_here: int
    """Prompts of ``name`` that ``minus`` has not."""
    only_there: int
    """Prompts of ``minus`` that ``name`` has not."""
    differences: Mapping[str, Estimate]
    """``name`` minus ``minus``, paired prompt by prompt; names as in ``STATISTICS``."""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Comparison(MeasuredResult):
    """Several measurements side by side, and their differences from the first."""

    kleash: str
    """Version that compared."""
    runs: tuple[ComparedRun, ...]
    """At least two; the first is what the others are compared with."""
    headline: str = KL_POLICY_REFERENCE
    """The KL that stands first, by its name in ``STATISTICS``: that of the first run."""
    differences: tuple[RunDifference, ...]
    """One for every run but the first, in their order."""
    warnings: tuple[str, ...] = ()
    """About the comparison as a whole: different sources, temperatures, references."""

    @property
    def paired_noun(self) -> str:
        """The noun for the pairs: "prompts", or "documents" on text."""
        return "documents" if self.runs[0].source == "text" else "prompts"


PAIRED = (
    *("reward/score", "kl/exact_per_sequence", "drift/kl_per_sequence"),
    *("eval/reward", "eval/kl_per_sequence"),
)
"""Metrics that a run has by prompt."""
KLS = ("kl/exact_per_sequence", "kl/k3_per_sequence", "drift/kl_per_sequence")
"""Metrics of the KL to a reference; the trainers of others lack the first, and k3 is known by step alone."""
SHOWN = (
    *("kl/exact_per_token", KLS[1], "kl/target", "beta", "policy/entropy", "response/length"),
    *("pairs/accuracy", "teacher/divergence"),
)
"""Metrics that are shown as means over steps, without an error."""


@dataclass(frozen=True, kw_only=True)
class ComparedTraining:
    """One training run among those that are compared."""

    name: str
    """Short, and different from the other runs' names."""
    folder: str
    algorithm: str
    steps: int
    """Steps that it has taken."""
    target_per: str = TrainingResult.target_per
    """What the KL of ``kl/target`` is of: a "sequence" or a "token"."""
    numbers: Mapping[str, Estimate]
    """Metric -> mean over the compared steps: of ``PAIRED`` over prompts, with an error; of ``SHOWN`` over steps."""
    settings: Mapping[str, str]
    """Options of both that differ from the first run's, as "value for the first run's value"; empty of the first."""
    alerts: int
    """Alerts of the whole run."""
    ended: str
    """"finished", why it was stopped, or "running or interrupted"."""


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class TrainingComparison(MeasuredResult):
    """Several training runs side by side, and their differences from the first."""

    kleash: str
    """Version that compared."""
    first_step: int
    """The first of the steps that are compared: the second half of those that all runs have taken."""
    last_step: int
    runs: tuple[ComparedTraining, ...]
    """At least two; the first is what the others are compared with."""
    differences: tuple[RunDifference, ...]
    """One for every run but the first, in their order; metrics are those of ``PAIRED``."""
    warnings: tuple[str, ...] = ()

    @property
    def is_paired(self) -> bool:
        """Whether any number of two runs is paired by prompt."""
        return any(each.differences for each in self.differences)
