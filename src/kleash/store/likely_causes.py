"""The result of ``kleash doctor``: likely causes of a mismatch between trainer and engine."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kleash.store.notebook import Result


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


@dataclass(frozen=True, kw_only=True)
class Diagnosis(Result):
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
