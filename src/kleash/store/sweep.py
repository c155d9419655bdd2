"""The result of a sweep: several candidates measured against one reference, their order, and what is tied."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from kleash.estimate import Estimate
from kleash.registry import grouped
from kleash.store.checksums import read_result, require_sha256, write_checked
from kleash.store.measurement import Gate, SweepGate
from kleash.store.statistics import KL_POLICY_REFERENCE, kl_directions
from kleash.store.summary import MeasuredResult

SWEEP = "sweep.json"
QUANTILE = "99.9"
"""Percentage of the tokens in the quantiles of candidates."""


@dataclass(frozen=True, kw_only=True)
class SweepCandidate:
    """A candidate of a sweep: its numbers, or why it could not be measured."""

    number: int
    """Its place on the command line, from 1."""
    name: str
    """As it was given."""
    folder: str
    """Its run folder, within that of the sweep."""
    measurement_sha256: str = ""
    """SHA-256 of the ``measurement.json`` there, of which its numbers are; empty if it was not measured."""
    failure: str = ""
    """Why it could not be measured; empty if it was."""
    numbers: Mapping[str, Estimate] = field(default_factory=dict[str, Estimate])
    """Its statistics, by their names in ``STATISTICS``, and "kl_policy_reference_99.9" and "kl_reference_policy_99.9",
    the 99.9 % quantiles over tokens."""
    noise_floor: Estimate | None = None
    """That of its measurement."""
    bytes_on_disk: int | None = None
    """Of the tensors in the files of its weights."""
    bits_per_weight: float | None = None
    letters: str = ""
    """Letters of its groups: candidates that share one are tied."""
    is_on_pareto_front: bool = False
    """Whether no other candidate is at most as large and has at most its KL, with one of them smaller."""
    warnings: tuple[str, ...] = ()
    """Those of its own report."""
    notes: tuple[str, ...] = ()
    """Those of its own report."""
    gate: Gate | None = None
    """Whether its KL is at most the limit of ``--at-most``; absent without that option."""


@dataclass(frozen=True, kw_only=True)
class SweepPair:
    """The difference of two candidates in the statistic that ranks them, paired by cluster."""

    first: int
    """Number of a candidate."""
    second: int
    """Number of the candidate whose mean is taken from it."""
    difference: Estimate
    """``first`` minus ``second``, with its own interval."""
    simultaneous_ci95: tuple[float, float]
    """The intervals of all pairs hold at once with 95 % confidence."""
    is_tie: bool
    """Whether the simultaneous interval does not exclude 0."""


@dataclass(frozen=True, kw_only=True)
class GroupChange:
    """What swapping one group of weights back to the reference's changes."""

    name: str
    """Such as "layer 3", "self_attn.q_proj", "norms" or "embeddings"."""
    parameters: int
    """Number of its weights."""
    is_identical: bool
    """Whether candidate and reference have the same weights in it, so that the change is 0 without a pass."""
    change: Estimate
    """The mean with this group swapped minus that of the candidate, paired by cluster; below 0 if the group's
    weights are a cause of the KL."""
    simultaneous_ci95: tuple[float, float]
    """The intervals of all groups hold at once with 95 % confidence."""

    @property
    def simultaneous_change(self) -> Estimate:
        """The change with the simultaneous interval in place of its own."""
        return replace(self.change, ci95=self.simultaneous_ci95)


@dataclass(frozen=True, kw_only=True)
class Attribution:
    """The changes of a candidate's KL when its weights are swapped back, one group at a time."""

    candidate: int
    """Number of the candidate."""
    grouping: str
    """"layers" or "modules"."""
    failure: str = ""
    """Why there are no numbers; empty if there are."""
    statistic: str = KL_POLICY_REFERENCE
    """The mean per token that is attributed."""
    sequences: int = 0
    tokens: int = 0
    """Scored positions of the sequences that were chosen."""
    clusters: int = 0
    mean: Estimate | None = None
    """The statistic of the candidate on these tokens."""
    groups: tuple[GroupChange, ...] = ()
    """In the order of the network."""
    sum_of_changes: Estimate | None = None
    """Of the single groups."""
    change_of_all: Estimate | None = None
    """With all groups swapped at once."""
    interaction: Estimate | None = None
    """``sum_of_changes`` minus ``change_of_all``: how far single changes are from adding up."""
    control: Estimate | None = None
    """The change of a second pass without a swap, after all others: exactly 0 where passes are repeatable."""
    critical_value: float = float("nan")
    """The 95 % quantile of the largest |t| over all groups."""
    warnings: tuple[str, ...] = ()

    @property
    def largest_first(self) -> list[GroupChange]:
        """The groups in the order of what they add to the KL, the largest part first."""
        return sorted(self.groups, key=lambda group: group.change.value)

    @property
    def has_changes(self) -> bool:
        """Whether there are numbers of groups whose weights differ from the reference's."""
        return not self.failure and not all(group.is_identical for group in self.groups)

    @property
    def changes_together(self) -> dict[str, Estimate]:
        """The changes of several groups, by what they are in words; empty if no group was swapped.

        Errors of several groups can reinforce or cancel each other, so that single changes need not add up.
        """
        numbers = {
            "sum of these": self.sum_of_changes,
            "all at once": self.change_of_all,
            "sum minus all at once": self.interaction,
            "none, a second time": self.control,
        }
        return {name: number for name, number in numbers.items() if number is not None and self.has_changes}

    def share_of(self, group: GroupChange) -> float:
        """The part of the candidate's mean that is gone with this group swapped; NaN if the mean is 0."""
        value = 0.0 if self.mean is None else self.mean.value
        return 0.0 - group.change.value / value if value else float("nan")


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Sweep(MeasuredResult):
    """Several candidates measured against one reference."""

    views: ClassVar[str] = ".summary(), .to_pandas() and .plot()"

    kleash: str
    """Version that measured."""
    reference: str
    rank_by: str
    """The statistic that ranks the candidates."""
    job: Mapping[str, Any]
    """The options."""
    candidates: tuple[SweepCandidate, ...]
    """In the order of the command line."""
    pairs: tuple[SweepPair, ...]
    """All pairs of candidates that were measured."""
    clusters: int
    """Groups of sequences that the errors take to be independent."""
    tokens: int
    """Scored positions of each candidate."""
    critical_value: float
    """The 95 % quantile of the largest |t| over all pairs; NaN with fewer than two candidates."""
    warnings: tuple[str, ...] = ()
    """About the ranking."""
    attributions: tuple[Attribution, ...] = ()
    """What groups of weights contribute to the KL of candidates, if that was asked for."""
    gate: SweepGate | None = None
    """The verdict of ``--at-most``; absent without that option."""
    versions: Mapping[str, str] = field(default_factory=dict[str, str])
    """Of Python and of the packages that measured."""

    @property
    def ranking(self) -> list[SweepCandidate]:
        """The candidates that were measured, the smallest mean first."""
        measured = [candidate for candidate in self.candidates if not candidate.failure]
        return sorted(
            measured, key=lambda candidate: (candidate.numbers[self.rank_by].value, candidate.number)
        )

    @property
    def notes(self) -> list[str]:
        """The notes on the candidates that were measured, each once with the names of those that have it."""
        names = grouped(
            (note.replace(f"the policy {candidate.name}", "the policy"), candidate.name)
            for candidate in self.ranking
            for note in candidate.notes
        )
        return [
            note if len(owners) == len(self.ranking) else f"{', '.join(owners)}: {note}"
            for note, owners in names.items()
        ]

    @property
    def other_direction(self) -> tuple[str, ...]:
        """The KL of the other direction than ``rank_by``, by its name in ``STATISTICS``, if the candidates have it."""
        (name,) = kl_directions(self.rank_by)[1:]
        return (name,) if all(name in candidate.numbers for candidate in self.ranking) else ()

    @property
    def failed(self) -> list[SweepCandidate]:
        """The candidates that could not be measured."""
        return [candidate for candidate in self.candidates if candidate.failure]

    def write(self, folder: Path) -> None:
        """Write ``sweep.json``.

        Raises:
            RunFolderError: if it cannot be written.
        """
        write_checked(folder, folder / SWEEP, self.to_json())

    @classmethod
    def read(cls, folder: Path | str) -> "Sweep":
        """The sweep in a folder.

        Raises:
            RunFolderError: if there is none, it is damaged, or the run of a candidate is another than was ranked.
        """
        folder = Path(folder).expanduser()
        advice, missing = "make it again with kleash sweep --resume", "finish the sweep with --resume"
        sweep = read_result(cls, folder / SWEEP, "a sweep", missing, advice)
        for candidate in sweep.ranking:
            run = folder / candidate.folder / "measurement.json"
            what = f"the measurement of candidate {candidate.number} that was ranked"
            require_sha256(run, candidate.measurement_sha256, what, advice)
        return sweep
