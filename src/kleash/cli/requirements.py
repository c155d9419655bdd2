"""Checks that the optional packages of a command are installed, before it starts."""

from pathlib import Path

from kleash.cli.parsing import Command
from kleash.extras import require_installed
from kleash.jobs import PPOJob, TrainJob
from kleash.jobs.reading_jobs import AuditJob, CompareJob, EnvJob, ReportJob

PAGES = ("jinja2", "matplotlib")
MODELS = ("transformers", "tokenizers", "safetensors", "pyarrow", *PAGES)
ADAPTERS = "peft"
DEVICE_MAPS = "accelerate"


def require_packages(command: Command) -> None:
    """Check that the packages are installed that ``command`` needs with its options.

    An audit takes no more than the base install, and without Jinja2 and Matplotlib makes no page; env takes no more.

    Raises:
        MissingExtraError: with all that are missing.
    """
    if isinstance(command, AuditJob | EnvJob):
        return
    extra, packages = "models", ["rich", *MODELS]
    if isinstance(command, ReportJob | CompareJob):
        packages = ["rich", "pyarrow", *PAGES]
    elif isinstance(command, TrainJob):
        extra = "train" if isinstance(command, PPOJob) else "trl"
        packages += [DEVICE_MAPS, *(() if isinstance(command, PPOJob) else ("trl", "datasets"))]
    elif getattr(command, "engine", "local") == "ray":
        extra, packages = "ray", [*packages, "ray"]
    models = [getattr(command, role, None) for role in ("policy", "reference", "teacher")]
    models += getattr(command, "candidates", ())
    if getattr(command, "lora_rank", 0) > 0 or any(map(_is_adapter, filter(None, models))):
        packages.append(ADAPTERS)
    if getattr(command, "device_map", None) is not None:
        packages.append(DEVICE_MAPS)
    require_installed(packages, f"'kleash[{extra}]'")
    trackers = getattr(command, "report_to", ())
    if trackers:
        from kleash.reports.trackers import require_trackers

        require_trackers(trackers)


def _is_adapter(name: str) -> bool:
    """Whether ``name`` is the folder of a PEFT adapter."""
    try:
        return (Path(name).expanduser() / "adapter_config.json").exists()
    except (OSError, ValueError, RuntimeError):  # not a valid name of a file
        return False
