"""Checks that the optional packages of a command are installed, before it starts."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from kleash.cli.commands import AuditJob, Command, CompareJob, ReportJob
from kleash.extras import is_installed, require_installed
from kleash.jobs import CacheJob, MeasureJob, PPOJob, SweepJob, TrainJob
from kleash.jobs.rollout_jobs import DoctorJob, MismatchJob

PAGES = ("jinja2", "matplotlib")
MODELS = ("transformers", "tokenizers", "safetensors", "pyarrow", *PAGES)
ADAPTERS = "peft"
DEVICE_MAPS = "accelerate"
TRACKER_MODULES = ("wandb", "trackio", "mlflow")
"""Packages of experiment trackers, which no extra of kleash installs."""
EXTRAS_WITH_TENSORBOARD = {
    "'kleash[models]'": "'kleash[train]'",
    "'kleash[ray]'": "'kleash[ray,train]'",
}
"""Extras without TensorBoard -> what has all of them and TensorBoard, which is in kleash[train]."""


def require_packages(command: Command) -> None:
    """Check that the packages are installed that ``command`` needs with its options.

    Raises:
        MissingExtraError: with all that are missing.
    """
    match command:
        case MeasureJob() if command.engine == "ray":
            packages = ["rich", *MODELS, *_for_loading(command), "ray"]
            _require_with_trackers(packages, command.report_to, "'kleash[ray]'")
        case MeasureJob():
            packages = ["rich", *MODELS, *_for_loading(command)]
            _require_with_trackers(packages, command.report_to, "'kleash[models]'")
        case SweepJob():
            packages = ["rich", *MODELS, *_for_loading(command)]
            _require_with_trackers(packages, command.report_to, "'kleash[models]'")
        case CacheJob():
            require_installed(("rich", *MODELS, *_for_loading(command)), "'kleash[models]'")
        case DoctorJob():
            adapters = _for_adapters((command.policy, command.reference))
            require_installed(("rich", *MODELS, *adapters), "'kleash[models]'")
        case TrainJob():
            _require_for_training(command)
        case ReportJob():
            _require_with_trackers(["rich", "pyarrow", *PAGES], command.report_to, "'kleash[models]'")
        case CompareJob():
            require_installed(("rich", "pyarrow", *PAGES), "'kleash[models]'")
        case MismatchJob():
            require_installed(("rich", *MODELS), "'kleash[models]'")
        case AuditJob():  # it takes no more than the base install, and without Jinja2 and Matplotlib makes no page
            return


def _for_loading(command: MeasureJob | CacheJob | SweepJob) -> Iterator[str]:
    """The packages beyond transformers that loading the models needs, by the options and the folders."""
    names = [command.reference]
    if isinstance(command, MeasureJob):
        names.append(command.policy)
    if isinstance(command, SweepJob):
        names += command.candidates
    yield from _for_adapters(names)
    if command.device_map is not None:
        yield DEVICE_MAPS


def _for_adapters(names: Iterable[str | None]) -> tuple[str, ...]:
    """The package that adapters need, if one of these models is an adapter."""
    return (ADAPTERS,) if any(name is not None and is_adapter(name) for name in names) else ()


def _require_for_training(job: TrainJob) -> None:
    """Check the packages of a training run: kleash's PPO, or TRL."""
    uses_trl = not isinstance(job, PPOJob)
    packages = ["rich", *MODELS, DEVICE_MAPS, *(["trl", "datasets"] if uses_trl else [])]
    adapters = _for_adapters((job.policy, job.reference, getattr(job, "teacher", None)))
    packages += (ADAPTERS,) if job.lora_rank > 0 else adapters
    _require_with_trackers(packages, job.report_to, "'kleash[trl]'" if uses_trl else "'kleash[train]'")


def _require_with_trackers(packages: Sequence[str], report_to: Sequence[str], extra: str) -> None:
    """Check packages of an extra, and those of trackers."""
    trackers = [name for name in report_to if name in TRACKER_MODULES]
    needed = [*packages, *([DEVICE_MAPS] if trackers else [])]
    if "tensorboard" in report_to:
        needed.append("tensorboard")
        extra = EXTRAS_WITH_TENSORBOARD.get(extra, extra)
    missing_trackers = " ".join(name for name in trackers if not is_installed(name))
    has_extra = all(is_installed(package) for package in needed)
    to_install = missing_trackers if has_extra else f"{extra} {missing_trackers}".strip()
    require_installed((*needed, *trackers), to_install)


def is_adapter(name: str) -> bool:
    """Whether ``name`` is the folder of a PEFT adapter."""
    try:
        return (Path(name).expanduser() / "adapter_config.json").exists()
    except (OSError, ValueError, RuntimeError):  # not a valid name of a file
        return False
