"""Trackers of the metrics of a training run, and of the numbers of a measurement or a sweep."""

import math
import os
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kleash.errors import CannotRunError, MissingExtraError
from kleash.extras import import_extra, is_installed
from kleash.store.gate import Verdict
from kleash.store.measurement import Measurement
from kleash.store.number_rows import NumberRow, candidate_rows, measurement_rows
from kleash.store.sweep import Sweep

PROJECT = "kleash"
TENSORBOARD = "tensorboard"
LAUNCHER_VARIABLES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "LOCAL_RANK")
"""Variables by which Accelerate learns that it is one of several processes."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Tracker:
    """A destination of metrics."""

    name: str
    log: Callable[[Mapping[str, float], int], object]
    """Send the metrics of a step."""
    close: Callable[[], object]
    """Close the connection."""


def open_trackers(
    names: Sequence[str], settings: Mapping[str, object], folder: Path, *, after: int = 0
) -> list[Tracker]:
    """The trackers of these names, each once.

    Args:
        names: as in ``report_to`` of a job.
        settings: are sent to the trackers.
        folder: folder of the run, to which TensorBoard writes, and whose name is that of the run.
        after: the step after which the run resumes; later steps are removed from TensorBoard.

    Raises:
        MissingExtraError: if a tracker is not installed.
        CannotRunError: if a tracker cannot be started: no account, no network.
    """
    opened: list[Tracker] = []
    for name in dict.fromkeys(names):
        try:
            with redirect_stdout(sys.stderr):
                tracker = (
                    _tensorboard(settings, folder, after)
                    if name == TENSORBOARD
                    else _accelerate_tracker(name, settings, folder)
                )
        except BaseException:
            for tracker in opened:
                tracker.close()
            raise
        opened.append(
            replace(tracker, log=_printing_apart(tracker.log), close=_printing_apart(tracker.close))
        )
    return opened


def _printing_apart(function: Callable[..., object]) -> Callable[..., object]:
    """The function, which prints on standard error: standard output is that of the command, perhaps JSON."""

    def call(*args: Any) -> object:
        with redirect_stdout(sys.stderr):
            return function(*args)

    return call


def _tensorboard(settings: Mapping[str, object], folder: Path, after: int) -> Tracker:
    import_extra(TENSORBOARD, "train")
    module = import_extra("torch.utils.tensorboard", "train")
    writer = module.SummaryWriter(
        log_dir=str(folder / "tensorboard"), purge_step=after + 1 if after else None
    )

    if not after:
        lines = [f"    {name}: {value}" for name, value in _plain(settings).items()]
        writer.add_text("settings", "\n".join(lines))

    def log(metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return Tracker(name=TENSORBOARD, log=log, close=writer.close)


def require_trackers(names: Sequence[str]) -> None:
    """Check that trackers are installed, before a long run.

    Raises:
        MissingExtraError: if one is not.
    """
    for name in names:
        if not is_installed(name):
            raise _missing(name)


def _missing(name: str) -> MissingExtraError:
    """The error about a tracker that is not installed."""
    package = "'kleash[train]'" if name == TENSORBOARD else name
    return MissingExtraError(f"the tracker {name} is not installed; run: pip install {package}")


def _accelerate_tracker(name: str, settings: Mapping[str, object], folder: Path) -> Tracker:
    try:
        module = import_extra(name, "train")
    except MissingExtraError as error:
        raise _missing(name) from error
    tracking = import_extra("accelerate.tracking", "train")
    import_extra("accelerate", "train").PartialState()  # the trackers read the rank from it
    classes = {"wandb": "WandBTracker", "trackio": "TrackioTracker", "mlflow": "MLflowTracker"}
    arguments = (
        {"logging_dir": str(folder), "run_name": folder.name} if name == "mlflow" else {"name": folder.name}
    )
    try:
        tracker = getattr(tracking, classes[name])(PROJECT, **arguments)
        tracker.start()
        tracker.store_init_configuration(_plain(settings))
    except Exception as error:  # any exception of the tracker's own code
        raise CannotRunError(
            f"the tracker {name} cannot be started: {reason_of(error)}; set it up, or leave it out"
        ) from error
    # Accelerate finishes a run of trackio without its knowledge, which finishes it again when the process ends.
    close = getattr(module, "finish", tracker.finish) if name == "trackio" else tracker.finish
    return Tracker(name=name, log=lambda metrics, step: tracker.log(dict(metrics), step=step), close=close)


def _plain(settings: Mapping[str, object]) -> dict[str, object]:
    """Settings as trackers accept them: lists joined to texts, without None."""
    return {
        name: " ".join(map(str, value)) if isinstance(value, list) else str(value)
        for name, value in settings.items()
        if value is not None
    }


def send_measurement(names: Sequence[str], measurement: Measurement, folder: Path) -> list[str]:
    """Send the numbers of a finished measurement and its settings to trackers.

    Each number is a scalar of step 0, ``measurement/NAME``, and so are its standard error and the ends of its interval,
    where they are known. One process calls this, whatever launched it.

    Args:
        names: of the trackers; each is sent to whether others fail or not.
        measurement: is on disk already.
        folder: of the run, whose name is that of the run in the tracker.

    Returns:
        A sentence for each tracker that failed.
    """
    return _send(names, {0: scalars_of(measurement)}, _settings_of(measurement), folder, "measurement")


def send_sweep(names: Sequence[str], sweep: Sweep, folder: Path) -> list[str]:
    """Send the numbers of the candidates of a finished sweep, and its settings, to trackers.

    The step is the number of the candidate, so that the checkpoints of a run make a curve: ``sweep/NAME``, its standard
    error, the ends of its interval, and ``sweep/rank``. Names, letters and failures of the candidates are settings.

    Args and Returns: as of ``send_measurement``.
    """
    return _send(names, sweep_scalars(sweep), _settings_of_sweep(sweep), folder, "sweep")


def _send(
    names: Sequence[str],
    scalars: Mapping[int, Mapping[str, float]],
    settings: Mapping[str, object],
    folder: Path,
    kind: str,
) -> list[str]:
    """Send scalars by step and settings to trackers; returns a sentence for each that failed."""
    failures: list[str] = []
    for name in dict.fromkeys(names):
        try:
            with _alone():
                (tracker,) = open_trackers((name,), settings, folder)
                try:
                    for step, scalars_of_step in scalars.items():
                        tracker.log(scalars_of_step, step)
                finally:
                    tracker.close()
        except Exception as error:  # any exception of the tracker's own code: the result is not lost
            failures.append(
                f"the tracker {name} did not get the {kind} ({reason_of(error)}), which is in {folder}; send it "
                f"with kleash report {folder} --report-to {name}"
            )
    return failures


def reason_of(error: Exception) -> str:
    """The first line of an error of a tracker, or its type if it has no words."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def scalars_of(measurement: Measurement) -> dict[str, float]:
    """The numbers of a measurement by the names that trackers see; what is NaN is left out."""
    counts = measurement.counts
    scalars: dict[str, float] = {
        "tokens": counts.tokens,
        "sequences": counts.sequences,
        "clusters": counts.clusters,
    }
    scalars |= _scalars_of_rows(measurement_rows(measurement))
    return {f"measurement/{name}": value for name, value in scalars.items()}


def sweep_scalars(sweep: Sweep) -> dict[int, dict[str, float]]:
    """The numbers of the candidates that were measured: the candidate's number → names that trackers see → value."""
    ranks = {candidate.number: rank for rank, candidate in enumerate(sweep.ranking, start=1)}
    return {
        candidate.number: {
            f"sweep/{name}": value
            for name, value in (
                *_scalars_of_rows(candidate_rows(sweep, candidate)).items(),
                ("rank", float(ranks[candidate.number])),
            )
        }
        for candidate in sweep.candidates
        if candidate.number in ranks
    }


def _scalars_of_rows(rows: Iterable[NumberRow]) -> dict[str, float]:
    """Numbers, their standard errors and the ends of their intervals by name; what is NaN is left out."""
    scalars: dict[str, float] = {}
    for row in rows:
        low, high = (None, None) if row.ci95 is None else row.ci95
        for suffix, value in (
            *(("", row.value), ("_standard_error", row.standard_error)),
            *(("_ci95_low", low), ("_ci95_high", high)),
        ):
            if value is not None and not math.isnan(value):
                scalars[f"{row.name}{suffix}"] = float(value)
    return scalars


def _settings_of_sweep(sweep: Sweep) -> dict[str, object]:
    """The options of a sweep, and names, letters and failures of its candidates."""
    candidates = {f"candidate_{each.number}": each.name for each in sweep.candidates}
    letters = {f"letters_{each.number}": each.letters for each in sweep.ranking if each.letters}
    failures = {f"failure_{each.number}": each.failure for each in sweep.failed}
    counts = {"tokens": sweep.tokens, "clusters": sweep.clusters}
    return {
        **sweep.job,
        **counts,
        **candidates,
        **letters,
        **failures,
        **_settings_of_gate(sweep.gate),
        "kleash": sweep.kleash,
    }


def _settings_of(measurement: Measurement) -> dict[str, object]:
    """What decided the result of a measurement, by name, and the verdict of its gate."""
    fingerprints = {f"fingerprint_{role}": model.fingerprint for role, model in measurement.models.items()}
    return {
        **measurement.job,
        **fingerprints,
        "source_sha256": measurement.source_sha256,
        "estimand": measurement.estimand,
        "kleash": measurement.kleash,
        "headline": measurement.headline,
        **_settings_of_gate(measurement.gate),
    }


def _settings_of_gate(gate: Verdict | None) -> dict[str, object]:
    """The verdict of a gate, its limit and the quantity that it limits; none without a gate."""
    if gate is None:
        return {}
    return {"gate": gate.verdict, "at_most": gate.at_most, "gate_quantity": gate.quantity}


@contextmanager
def _alone() -> Generator[None]:
    """Context in which Accelerate's state is that of a single process, unless the program has one already.

    Otherwise Accelerate would wait for the other processes of a launcher, which do not report.
    """
    state = import_extra("accelerate", "train").PartialState
    if state._shared_state:
        yield
        return
    hidden = {name: os.environ.pop(name) for name in LAUNCHER_VARIABLES if name in os.environ}
    try:
        state()
    finally:
        os.environ.update(hidden)
    try:
        yield
    finally:
        state._reset_state()
