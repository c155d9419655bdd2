"""Where a run's numbers go besides its folder: TensorBoard, and the trackers that Accelerate speaks to."""

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
    """Somewhere numbers are sent to."""

    log: Callable[[Mapping[str, float], int], object]
    """Send the numbers of a step."""
    close: Callable[[], object]
    """Finish."""


def open_trackers(job: TrainJob, folder: Path, *, after: int = 0) -> list[Tracker]:
    """The trackers that a job names.

    Args:
        job: whose ``report_to`` names them and told its settings.
        folder: the run's, where TensorBoard writes and whose name the run has.
        after: the step that the run goes on after; TensorBoard forgets what lies beyond it.

    Raises:
        MissingExtraError: if one is not installed.
        CannotRunError: if one cannot be begun: no account, no network.
    """
    opened: list[Tracker] = []
    for name in dict.fromkeys(job.report_to):
        try:
            opened.append(
                _tensorboard(folder, after) if name == "tensorboard" else _of_accelerate(name, job, folder)
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


def _of_accelerate(name: str, job: TrainJob, folder: Path) -> Tracker:
    try:
        import_extra(name, "train")
    except MissingExtraError as error:
        raise MissingExtraError(f"the tracker {name} is not installed; run: pip install {name}") from error
    tracking = import_extra("accelerate.tracking", "train")
    import_extra("accelerate", "train").PartialState()  # the trackers ask it which process they are in
    classes = {"wandb": "WandBTracker", "trackio": "TrackioTracker", "mlflow": "MLflowTracker"}
    try:
        tracker = _begun(getattr(tracking, classes[name]), name, folder)
        tracker.store_init_configuration(_plain(job.settings()))
    except Exception as error:  # other people's services fail in every way there is
        line = str(error).strip().splitlines()
        reason = line[0] if line else type(error).__name__
        raise CannotRunError(
            f"the tracker {name} cannot be begun: {reason}; set it up, or leave it out"
        ) from error
    return Tracker(log=lambda metrics, step: tracker.log(dict(metrics), step=step), close=tracker.finish)


def _begun(kind: Any, name: str, folder: Path) -> Any:
    """A tracker that has been started; each is told of the run's name in its own way."""
    if name == "mlflow":
        tracker = kind(PROJECT, logging_dir=str(folder), run_name=folder.name)
    else:
        tracker = kind(PROJECT, name=folder.name)
    start = getattr(tracker, "start", None)  # older Accelerates start a tracker where they make it
    if start is not None:
        start()
    return tracker


def _plain(settings: Mapping[str, object]) -> dict[str, object]:
    """Settings as trackers take them: no lists, and nothing that is missing."""
    return {
        name: " ".join(map(str, value)) if isinstance(value, list) else str(value)
        for name, value in settings.items()
        if value is not None
    }
