"""Checks that the optional packages of a command are installed, before it starts."""

from typing import Any

from kleash.cli.parsing import Command
from kleash.extras import require_installed
from kleash.jobs import PPOJob, TrainJob
from kleash.jobs.reading_jobs import AuditJob, CompareJob, EnvJob, ReportJob
from kleash.reports.trackers import require_trackers

READING = ("rich", "pyarrow", "jinja2", "matplotlib")
MODELS = ("rich", "transformers", "tokenizers", "safetensors", *READING[1:])
PACKAGES: tuple[tuple[Any, str, tuple[str, ...]], ...] = (
    (AuditJob | EnvJob, "models", ()),
    (ReportJob | CompareJob, "models", READING),
    (PPOJob, "train", (*MODELS, "accelerate")),
    (TrainJob, "trl", (*MODELS, "accelerate", "trl", "datasets")),
)
"""Jobs -> the extra that they need, and its packages; the others need ``MODELS``."""


def require_packages(command: Command) -> None:
    """Check that the packages are installed that ``command`` needs in any case, and the trackers that it names.

    An audit takes no more than the base install, and without Jinja2 and Matplotlib makes no page; env takes no more.

    Raises:
        MissingExtraError: with all that are missing.
    """
    extra, packages = next((row for kind, *row in PACKAGES if isinstance(command, kind)), ("models", MODELS))
    if getattr(command, "engine", "local") == "ray":
        extra, packages = "ray", (*MODELS, "ray")
    require_installed(packages, f"'kleash[{extra}]'")
    require_trackers(getattr(command, "report_to", ()))
