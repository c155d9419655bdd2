"""The jobs whose result is a page: ``report``, ``compare`` and ``audit``."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class ReportJob:
    """Rebuild the report of a run from its files."""

    folder: Path
    """The run's folder, as given to "kleash measure --out"."""


@dataclass(frozen=True, kw_only=True)
class CompareJob:
    """Compare runs on the same prompts: differences from the first one, with intervals, and a picture."""

    folders: tuple[Path, ...]
    """Two or more folders of finished runs; the others are compared with the first."""
    out: Path = Path("comparison.html")
    """The page that is written."""
    json: bool = False
    """Print the comparison as JSON instead of a table."""


@dataclass(frozen=True, kw_only=True)
class AuditJob:
    """Say what a KL function really estimates and differentiates, anyone's, by exact enumeration.

    Without arguments: kleash's own.
    """

    target: str = "kleash"
    """package.module:function; or kleash, liger, openrlhf, trl or verl, all the KL code that is known of
    that package; or one case of it, "verl:low_var_kl"."""
    convention: str | None = None
    """How package.module:function is called and what it returns: "loss", "reward", "logits" ...; without it,
    the most usual are explained and all are listed."""
    set: tuple[str, ...] = ()
    """Keyword arguments to call it with."""
    out: Path = Path("audit.html")
    """The page that is written."""
    json: bool = False
    """Print the audits as JSON instead of the verdicts."""
    fail_on: tuple[str, ...] = ()
    """Exit with 1 if there is a finding of one of these kinds; "wrong" (trains on or reports something else in ordinary
    use), "fragile" (only at extremes), "note" stand for all such, "fault" for wrong and fragile."""
    quiet: bool = False
    """Print nothing but what fails."""
