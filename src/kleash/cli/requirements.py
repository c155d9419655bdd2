"""Checks that the optional packages of a command are installed, before it starts."""

from kleash.cli.parsing import Command
from kleash.extras import require_installed
from kleash.jobs import PPOJob, TrainJob
from kleash.jobs.reading_jobs import AuditJob, CompareJob, EnvJob, ReportJob
from kleash.reports.trackers import require_trackers

READING = ("rich", "pyarrow", "jinja2", "matplotlib")
MODELS = ("rich", "transformers", "tokenizers", "safetensors", *READING[1:])


def require_packages(command: Command) -> None:
    """Check that the packages are installed that ``command`` needs in any case, and the trackers that it names.

    An audit takes no more than the base install, and without Jinja2 and Matplotlib makes no page; env takes no more.

    Raises:
        MissingExtraError: with all that are missing.
    """
    extra, packages = "models", MODELS
    match command:
        case AuditJob() | EnvJob():
            return
        case ReportJob() | CompareJob():
            packages = READING
        case PPOJob():
            extra, packages = "train", (*MODELS, "accelerate")
        case TrainJob():
            extra, packages = "trl", (*MODELS, "accelerate", "trl", "datasets")
        case _ if getattr(command, "engine", "local") == "ray":
            extra, packages = "ray", (*MODELS, "ray")
        case _:
            pass
    require_installed(packages, f"'kleash[{extra}]'")
    require_trackers(getattr(command, "report_to", ()))
