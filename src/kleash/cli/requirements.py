"""Which optional packages a command needs: all that are missing are named at once, before anything is done."""

from collections.abc import Iterator
from pathlib import Path

from kleash.cli.commands import AuditJob, Command, CompareJob, ReportJob
from kleash.extras import is_installed, require_installed
from kleash.jobs import CacheJob, DemonstrationJob, MeasureJob, PPOJob, TrainJob

PAGES = ("jinja2", "plotly")
MODELS = ("transformers", "tokenizers", "safetensors", "pyarrow", *PAGES)
ADAPTERS = "peft"
SPREADING = "accelerate"
TRACKER_MODULES = ("wandb", "trackio", "mlflow")
"""Trackers that no extra of kleash brings."""


def require_packages(command: Command) -> None:
    """See that the packages are there that ``command`` needs with its options.

    Raises:
        MissingExtraError: naming all that are not.
    """
    match command:
        case MeasureJob() | CacheJob():
            require_installed(("rich", *MODELS, *_for_loading(command)), "'kleash[models]'")
        case DemonstrationJob():
            require_installed(("rich", *MODELS, SPREADING, ADAPTERS), "'kleash[train]'")
        case TrainJob():
            _require_for_training(command)
        case ReportJob() | CompareJob():
            require_installed(("rich", "pyarrow", *PAGES), "'kleash[models]'")
        case AuditJob():
            require_installed(("rich",), "'kleash[models]'")


def _for_loading(command: MeasureJob | CacheJob) -> Iterator[str]:
    """What loading the models needs beyond transformers: as far as the options and the folders say."""
    names = [command.reference, *([command.policy] if isinstance(command, MeasureJob) else [])]
    if any(is_adapter(name) for name in names):
        yield ADAPTERS
    if command.device_map is not None:
        yield SPREADING


def _require_for_training(job: TrainJob) -> None:
    ours = isinstance(job, PPOJob)
    needed = ["rich", *MODELS, SPREADING, *([] if ours else ["trl", "datasets"])]
    named = [job.policy, job.reference or "", getattr(job, "teacher", None) or ""]
    if job.lora_rank > 0 or any(is_adapter(name) for name in named):
        needed.append(ADAPTERS)
    if "tensorboard" in job.report_to:
        needed.append("tensorboard")
    tracker_names = [name for name in job.report_to if name in TRACKER_MODULES]
    missing = " ".join(name for name in tracker_names if not is_installed(name))
    extra = "train" if ours else "trl"
    whole = all(is_installed(module) for module in needed)
    require_installed((*needed, *tracker_names), missing if whole else f"'kleash[{extra}]' {missing}".strip())


def is_adapter(name: str) -> bool:
    """Whether ``name`` is the folder of a PEFT adapter."""
    try:
        return (Path(name).expanduser() / "adapter_config.json").exists()
    except (OSError, ValueError, RuntimeError):  # a name that no file can have
        return False
