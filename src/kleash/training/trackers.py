"""Trackers of a run's metrics: TensorBoard, and those of Accelerate."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kleash.errors import CannotRunError, MissingExtraError
from kleash.extras import import_extra
from kleash.jobs import TrainJob

PROJECT = "kleash"


@dataclass(frozen=True, eq=False, kw_only=True)
class Tracker:
    """A destination of metrics."""

    log: Callable[[Mapping[str, float], int], object]
    """Send the metrics of a step."""
    close: Callable[[], object]
    """Close the connection."""


def open_trackers(job: TrainJob, folder: Path, *, after: int = 0) -> list[Tracker]:
    """The trackers that a job names.

    Args:
        job: ``report_to`` has the names of the trackers; the settings are sent to them.
        folder: folder of the run, to which TensorBoard writes, and whose name is that of the run.
        after: the step after which the run resumes; later steps are removed from TensorBoard.

    Raises:
        MissingExtraError: if a tracker is not installed.
        CannotRunError: if a tracker cannot be started: no account, no network.
    """
    opened: list[Tracker] = []
    for name in dict.fromkeys(job.report_to):
        try:
            opened.append(
                _tensorboard(folder, after)
                if name == "tensorboard"
                else _accelerate_tracker(name, job, folder)
            )
        except BaseException:
            for tracker in opened:
                tracker.close()
            raise
    return opened


def _tensorboard(folder: Path, after: int) -> Tracker:
    import_extra("tensorboard", "train")
    module = import_extra("torch.utils.tensorboard", "train")
    writer = module.SummaryWriter(
        log_dir=str(folder / "tensorboard"), purge_step=after + 1 if after else None
    )

    def log(metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return Tracker(log=log, close=writer.close)


def _accelerate_tracker(name: str, job: TrainJob, folder: Path) -> Tracker:
    try:
        import_extra(name, "train")
    except MissingExtraError as error:
        raise MissingExtraError(f"the tracker {name} is not installed; run: pip install {name}") from error
    tracking = import_extra("accelerate.tracking", "train")
    import_extra("accelerate", "train").PartialState()  # the trackers read the rank from it
    classes = {"wandb": "WandBTracker", "trackio": "TrackioTracker", "mlflow": "MLflowTracker"}
    try:
        tracker = _start_tracker(getattr(tracking, classes[name]), name, folder)
        tracker.store_init_configuration(_plain(job.settings()))
    except Exception as error:  # any exception of the tracker's own code
        line = str(error).strip().splitlines()
        reason = line[0] if line else type(error).__name__
        raise CannotRunError(
            f"the tracker {name} cannot be started: {reason}; set it up, or leave it out"
        ) from error
    return Tracker(log=lambda metrics, step: tracker.log(dict(metrics), step=step), close=tracker.finish)


def _start_tracker(kind: Any, name: str, folder: Path) -> Any:
    """Start a tracker with the name of the run; the argument for it differs."""
    if name == "mlflow":
        tracker = kind(PROJECT, logging_dir=str(folder), run_name=folder.name)
    else:
        tracker = kind(PROJECT, name=folder.name)
    start = getattr(tracker, "start", None)  # older versions of Accelerate start it in __init__
    if start is not None:
        start()
    return tracker


def _plain(settings: Mapping[str, object]) -> dict[str, object]:
    """Settings as trackers accept them: lists joined to texts, without None."""
    return {
        name: " ".join(map(str, value)) if isinstance(value, list) else str(value)
        for name, value in settings.items()
        if value is not None
    }
