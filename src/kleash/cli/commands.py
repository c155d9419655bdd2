"""The commands as records: their fields are the options."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro

from kleash.cli.caching import Cache
from kleash.cli.training import Train
from kleash.records import MeasureJob

SOURCE = tyro.conf.create_mutex_group(required=False, title="source: what the models read")


@dataclass(frozen=True, kw_only=True)
class Measure(MeasureJob):
    """Measure how far one language model has drifted from another, and write a report.

    Without arguments: the small pair that ships with kleash.
    """

    prompts: Annotated[str | None, SOURCE] = None
    text: Annotated[str | None, SOURCE] = None
    responses: Annotated[str | None, SOURCE] = None

    def __post_init__(self) -> None:
        """Leave the checks to the job, whose errors are one line."""

    def job(self) -> MeasureJob:
        """The job that was asked for.

        Raises:
            OptionError: if it means nothing.
        """
        return MeasureJob(**asdict(self))


@dataclass(frozen=True, kw_only=True)
class Report:
    """Rebuild the report of a run from its files."""

    folder: tyro.conf.Positional[Path]
    """The run's folder, as given to "kleash measure --out"."""


@dataclass(frozen=True, kw_only=True)
class Compare:
    """Compare runs on the same prompts: differences from the first one, with intervals, and a picture."""

    folders: tyro.conf.Positional[tuple[Path, ...]]
    """Two or more folders of finished runs; the others are compared with the first."""
    out: Path = Path("comparison.html")
    """The page that is written."""
    json: bool = False
    """Print the comparison as JSON instead of a table."""


@dataclass(frozen=True, kw_only=True)
class Audit:
    """Say what a KL function really estimates and differentiates, anyone's, by exact enumeration.

    Without arguments: kleash's own.
    """

    target: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="TARGET")] = "kleash"
    """package.module:function; or kleash, liger, openrlhf, trl or verl, all the KL code that is known of
    that package; or one case of it, "verl:low_var_kl"."""
    convention: str | None = None
    """How package.module:function is called and what it returns: "loss", "reward", "logits" ...; without it,
    they are listed."""
    set: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME=VALUE ...")] = ()
    """Keyword arguments to call it with."""
    out: Path = Path("audit.html")
    """The page that is written."""
    json: bool = False
    """Print the audits as JSON instead of the verdicts."""
    fail_on: Annotated[tuple[str, ...], tyro.conf.arg(metavar="KIND ...")] = ()
    """Exit with 1 if there is a finding of one of these kinds; "fault" and "note" stand for all such."""
    quiet: bool = False
    """Print nothing but what fails."""


Command = (
    Annotated[Measure, tyro.conf.subcommand("measure")]
    | Annotated[Report, tyro.conf.subcommand("report")]
    | Annotated[Compare, tyro.conf.subcommand("compare")]
    | Annotated[Cache, tyro.conf.subcommand("cache")]
    | Annotated[Audit, tyro.conf.subcommand("audit")]
    | Annotated[Train, tyro.conf.subcommand("train"), tyro.conf.OmitArgPrefixes]
)
