"""The jobs that read finished work or make a page: ``report``, ``compare`` and ``audit``."""

from dataclasses import dataclass
from pathlib import Path

from kleash.errors import OptionError
from kleash.jobs.directions import GateOptions
from kleash.jobs.output_options import PICTURES, FormatOption, MeasurementFormatOption, TrackerOption


@dataclass(frozen=True, kw_only=True)
class ReportJob(MeasurementFormatOption, TrackerOption, GateOptions):
    """Write the report of a run or the page of a sweep again from its files, or print the result in a format."""

    folder: Path
    """The folder of a run or of a sweep, as in --out of "kleash measure", "kleash train" or "kleash sweep"."""
    at_most: float | None = None
    """A limit in nats for the KL per token: of a measurement as in "kleash measure --at-most", of a sweep as in
    "kleash sweep --at-most"."""
    picture: Path | None = None
    """Also draw a measurement or a sweep into this file, which ends in .png or .svg."""

    def __post_init__(self) -> None:
        """Check the limit, the format, the trackers and the name of the picture; raises OptionError."""
        self.check_gate()
        self.check_format()
        self.check_trackers()
        if self.picture is not None and self.picture.suffix.lower() not in PICTURES:
            raise OptionError(
                f"--picture takes a file that ends in {' or '.join(PICTURES)}; it is {self.picture}"
            )


@dataclass(frozen=True, kw_only=True)
class CompareJob(FormatOption, GateOptions):
    """Compare runs on the same prompts: differences from the first run with intervals, as a table and a page."""

    folders: tuple[Path, ...]
    """Two or more folders of finished runs; each is compared with the first."""
    out: Path = Path("comparison.html")
    """File of the page."""
    at_most: float | None = None
    """A limit in nats for the KL per token of every run but the first. Exit code 0 if no run is above the limit, 1 if
    any is, otherwise 3, as in "kleash measure --at-most"."""
    direction: str | None = None
    """The KL that --at-most limits: policy-reference averages over the policy's next tokens, reference-policy over the
    reference's. If not given, that of the first run's headline."""

    def __post_init__(self) -> None:
        """Check the limit; raises OptionError."""
        self.check_gate()
        self.check_format()


@dataclass(frozen=True, kw_only=True)
class AuditJob:
    """Test what a KL function estimates and what it differentiates, by exact enumeration.

    Without arguments, kleash's functions are audited.
    """

    target: str = "kleash"
    """package.module:function; or kleash, liger, openrlhf, trl or verl for all known KL functions of that package; or
    one case of these, such as "verl:low_var_kl"."""
    convention: str | None = None
    """How package.module:function is called and what it returns: "loss", "reward", "logits" ...; without it, an error
    explains the most common conventions and lists all."""
    set: tuple[str, ...] = ()
    """Keyword arguments to call it with."""
    out: Path = Path("audit.html")
    """File of the page."""
    json: bool = False
    """Print the audits as JSON instead of the verdicts."""
    fail_on: tuple[str, ...] = ()
    """Exit with 1 if there is a finding of one of these kinds or severities: "wrong" (trains on or reports something
    else in ordinary use), "fragile" (only at extremes), "note", or "fault" for wrong and fragile."""
    quiet: bool = False
    """Print only failures."""
