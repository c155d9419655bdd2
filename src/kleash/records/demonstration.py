"""The demonstration of ``kleash train``: one reward, three leashes."""

from dataclasses import dataclass
from pathlib import Path

from kleash.errors import OptionError
from kleash.records.checksums import Checksums
from kleash.records.codec import to_json
from kleash.records.number import Number
from kleash.records.option_types import check_option_types
from kleash.records.steps import Sample

DEMONSTRATION = "demonstration.json"


@dataclass(frozen=True, kw_only=True)
class DemonstrationJob:
    """See what a leash does: the shipped model and a reward that is easily hacked, three times.

    Once off the leash, once on a good one, once on one that is too tight. About two minutes on two cores.
    """

    seed: int = 0
    """Decides every draw."""
    device: str = "auto"
    """cpu, cuda, cuda:1, mps …; auto is the first GPU if there is one."""
    out: str | None = None
    """Folder for the results; kleash-runs/<date-time> if not given."""
    quiet: bool = False
    """Print nothing but errors."""
    json: bool = False
    """Print the result as JSON instead of a summary."""

    def __post_init__(self) -> None:
        """Refuse what means nothing.

        Raises:
            OptionError: naming the option, what it was and what it may be.
        """
        check_option_types(self)
        if not 0 <= self.seed < 2**63:
            raise OptionError(f"--seed must be a whole number from 0 to 2^63 - 1; it is {self.seed}")


@dataclass(frozen=True, kw_only=True)
class LeashSetting:
    """One of the runs: how tight its leash is, and where it led."""

    name: str
    """Its folder in that of the demonstration."""
    title: str
    description: str
    """How its beta is set, in words."""


@dataclass(frozen=True, kw_only=True)
class BestOf:
    """What keeping the best of n responses of the reference reaches, and what it costs."""

    n: int
    reward: Number
    """Mean reward of the best."""
    kl: Number
    """KL(best of n || reference), in nats per response."""
    bound: float
    """log n - (n - 1)/n, which is often quoted in its place."""


@dataclass(frozen=True, kw_only=True)
class Demonstration:
    """``demonstration.json``: what the runs are, and what best-of-n does instead."""

    kleash: str
    reward: str
    """What is rewarded, by its dotted path."""
    meant: str
    """What it means, in words."""
    runs: tuple[LeashSetting, ...]
    best_of: tuple[BestOf, ...]
    samples: tuple[Sample, ...] = ()
    """Of the reference, before any training."""

    def to_json(self) -> str:
        """As JSON text."""
        return to_json(self)

    @classmethod
    def read(cls, folder: Path) -> "Demonstration":
        """The demonstration in a folder.

        Raises:
            RunFolderError: if there is none, or it is damaged.
        """
        return Checksums.read(folder).read_record(cls, folder / DEMONSTRATION, "a demonstration")
