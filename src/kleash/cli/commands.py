"""The commands as records: their fields are the options."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro

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
    """The page that is written; the numbers lie beside it as .json."""
    json: bool = False
    """Print the comparison as JSON instead of a table."""


Command = (
    Annotated[Measure, tyro.conf.subcommand("measure")]
    | Annotated[Report, tyro.conf.subcommand("report")]
    | Annotated[Compare, tyro.conf.subcommand("compare")]
)
