"""The result of comparing runs: the first one, and how each of the others differs from it."""

from collections.abc import Mapping
from dataclasses import dataclass

from kleash.estimate import Estimate
from kleash.store.measurement import Counts, Gate
from kleash.store.summary import MeasuredResult


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


@dataclass(frozen=True, kw_only=True)
class Comparison(MeasuredResult):
    """Several measurements side by side, and their differences from the first."""

    kleash: str
    """Version that compared."""
    runs: tuple[ComparedRun, ...]
    """At least two; the first is what the others are compared with."""
    headline: str = "kl_policy_reference"
    """The KL that stands first, by its name in ``STATISTICS``: that of the first run."""
    differences: tuple[RunDifference, ...]
    """One for every run but the first, in their order."""
    warnings: tuple[str, ...] = ()
    """About the comparison as a whole: different sources, temperatures, references."""

    @property
    def paired_noun(self) -> str:
        """The noun for the pairs: "prompts", or "documents" on text."""
        return "documents" if self.runs[0].source == "text" else "prompts"
