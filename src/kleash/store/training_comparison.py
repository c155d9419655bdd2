"""The result of comparing training runs: the first one, and how each of the others differs from it."""

from collections.abc import Mapping
from dataclasses import dataclass

from kleash.estimate import Estimate
from kleash.store.comparison import RunDifference
from kleash.store.summary import MeasuredResult

PAIRED = ("reward/score", "kl/exact_per_sequence", "eval/reward", "eval/kl_per_sequence")
"""Metrics that a run has by prompt."""
SHOWN = (
    *("kl/exact_per_token", "kl/target", "beta", "policy/entropy", "response/length"),
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
    numbers: Mapping[str, Estimate]
    """Metric -> mean over the compared steps: of ``PAIRED`` over prompts, with an error; of ``SHOWN`` over steps."""
    settings: Mapping[str, str]
    """Options in which it differs from the first run, as "value for the first run's value"; empty of the first."""
    alerts: int
    """Alerts of the whole run."""
    ended: str
    """"finished", why it was stopped, or "running or interrupted"."""


@dataclass(frozen=True, kw_only=True)
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
