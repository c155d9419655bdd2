"""The options of where a result goes: printed in a format, and sent to trackers."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from kleash.errors import OptionError

FORMATS = ("json", "csv", "markdown")
"""Formats of every result."""
MEASUREMENT_FORMATS = (*FORMATS, "model-card", "llama.cpp")
"""Those of a measurement."""
PICTURES = (".png", ".svg")
"""How the names of pictures end."""
TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow")


@dataclass(frozen=True, kw_only=True)
class FormatOption:
    """In which format a result is printed."""

    formats: ClassVar[tuple[str, ...]] = FORMATS
    """What ``format`` may be."""
    json: bool = False
    """Print the result as JSON instead of a summary: the same as --format json."""
    format: str | None = None
    """Print the result in this format instead of a summary: json; csv, a row for each number; or markdown, tables for
    an issue or a page."""

    def check_format(self) -> None:
        """Check the format; raises OptionError."""
        if self.format is not None and self.format not in self.formats:
            raise OptionError(f"--format must be one of {', '.join(self.formats)}; it is {self.format!r}")
        if self.json and self.format not in (None, "json"):
            raise OptionError(f"--json is --format json; give it or --format {self.format}, not both")

    @property
    def output_format(self) -> str | None:
        """The format that is printed; None for a summary in words."""
        return "json" if self.json else self.format


@dataclass(frozen=True, kw_only=True)
class MeasurementFormatOption(FormatOption):
    """In which format a measurement is printed."""

    formats: ClassVar[tuple[str, ...]] = MEASUREMENT_FORMATS
    format: str | None = None
    """Print the result in this format instead of a summary: json; csv, a row for each number; markdown, tables for an
    issue or a page; model-card, metadata and a section for the README of a model on the Hugging Face hub; or
    llama.cpp, the statistics that llama-perplexity prints."""


@dataclass(frozen=True, kw_only=True)
class TrackerOption:
    """Which trackers a result is sent to."""

    report_to: tuple[str, ...] = ()
    """Where the numbers are sent as well, with intervals and settings: tensorboard, wandb, trackio, mlflow."""

    def check_trackers(self) -> None:
        """Check the names of the trackers; raises OptionError."""
        require_trackers_known(self.report_to)


def require_trackers_known(names: Iterable[str]) -> None:
    """Check that trackers are known.

    Raises:
        OptionError: naming the first that is not.
    """
    for name in names:
        if name not in TRACKERS:
            raise OptionError(f"--report-to must be one of {', '.join(TRACKERS)}; it is {name!r}")
