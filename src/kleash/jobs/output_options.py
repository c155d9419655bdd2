"""The options of what is done with a result: printed in a format, sent to trackers, held against a limit."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated

from kleash.jobs.options import JsonOption, Limit, Options, Refusal, one_of

FORMATS = ("csv", "markdown")
"""Formats of every result, besides ``--json``."""
MEASUREMENT_FORMATS = (*FORMATS, "model-card", "llama.cpp")
"""Those of a measurement."""
PICTURES = (".png", ".svg")
"""How the names of pictures end."""
DIRECTIONS: Mapping[str, str] = MappingProxyType(
    {"policy-reference": "kl_policy_reference", "reference-policy": "kl_reference_policy"}
)
"""Word of ``--direction`` -> name of the KL in ``STATISTICS``; the model that is named first is averaged over."""
DIRECTION_OF_SWEEPS = "reference-policy"
Tracker = Annotated[str, one_of(("tensorboard", "wandb", "trackio", "mlflow"))]
Direction = Annotated[str, one_of(tuple(DIRECTIONS))]


@dataclass(frozen=True, kw_only=True)
class FormatOption(JsonOption):
    """In which format a result is printed."""

    format: Annotated[str, one_of(FORMATS, ", or else --json")] | None = None
    """Print the result in this format instead of a summary: csv, a row for each number; or markdown, tables for
    an issue or a page."""

    def _refusals(self) -> Iterable[Refusal]:
        return (
            Refusal(
                self.json and self.format is not None,
                f"--json prints JSON; give it or --format {self.format}, not both",
            ),
        )

    @property
    def output_format(self) -> str | None:
        """The format that is printed; None for a summary in words."""
        return super().output_format or self.format


@dataclass(frozen=True, kw_only=True)
class MeasurementFormatOption(FormatOption):
    """In which format a measurement is printed."""

    format: Annotated[str, one_of(MEASUREMENT_FORMATS, ", or else --json")] | None = None
    """Print the result in this format instead of a summary: csv, a row for each number; markdown, tables for an
    issue or a page; model-card, metadata and a section for the README of a model on the Hugging Face hub; or
    llama.cpp, the statistics that llama-perplexity prints."""


@dataclass(frozen=True, kw_only=True)
class TrackerOption(Options):
    """Which trackers a result is sent to."""

    report_to: tuple[Tracker, ...] = ()
    """Where the numbers are sent as well, with intervals and settings: tensorboard, wandb, trackio, mlflow."""


@dataclass(frozen=True, kw_only=True)
class GateOptions(Options):
    """The limit of a gate, and the KL that it limits."""

    at_most: Limit | None = None
    """A limit in nats for the KL per token. Exit code 0 if the upper end of its interval plus the noise floor is not
    above the limit, 1 if the lower end minus the noise floor is above it, otherwise 3, and how many more tokens may
    decide. Never 0 below 30 clusters."""
    direction: Direction | None = None
    """The KL that --at-most limits: policy-reference averages over the policy's next tokens, reference-policy over the
    reference's. If not given, that of the headline: reference-policy with --text, otherwise policy-reference."""

    def _refusals(self) -> Iterable[Refusal]:
        return (
            Refusal(
                self.direction is not None and self.at_most is None,
                "--direction says which KL --at-most limits; add that, or leave it out",
            ),
        )

    @property
    def gated_statistic(self) -> str | None:
        """The name in ``STATISTICS`` of the KL of ``direction``; None for that of the headline."""
        return None if self.direction is None else DIRECTIONS[self.direction]
