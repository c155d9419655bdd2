"""Trackers of the metrics of a training run, and of the numbers of a measurement or a sweep."""

import math
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from kleash.errors import CannotRunError, summarise_error
from kleash.extras import import_extra, require_installed
from kleash.store.measurement import Measurement
from kleash.store.number_rows import NumberRow, candidate_rows, measurement_rows
from kleash.store.sweep import Sweep

PROJECT = "kleash"
TENSORBOARD = "tensorboard"
MLFLOW_VARIABLES = {"MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID", "MLFLOW_RUN_ID"}
"""Environment variables of which each says where a run of MLflow belongs."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Tracker:
    """A destination of metrics. What it prints goes to standard error: standard output is that of the command."""

    name: str
    send: Callable[[Mapping[str, float], int], object]
    """Send the metrics of a step."""
    finish: Callable[[], object]
    """Close the connection."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send the metrics of a step."""
        with redirect_stdout(sys.stderr):
            self.send(dict(metrics), step)

    def close(self) -> None:
        """Close the connection."""
        with redirect_stdout(sys.stderr):
            self.finish()


def open_trackers(
    names: Sequence[str], settings: Mapping[str, object], folder: Path, *, after: int = 0
) -> list[Tracker]:
    """The trackers of these names, each once.

    Args:
        names: as in ``report_to`` of a job.
        settings: are sent to the trackers.
        folder: folder of the run, to which TensorBoard writes, and whose name is that of the run, in the project
            ``PROJECT``; unless the environment names them.
        after: the step after which the run resumes; later steps are removed from TensorBoard.

    Raises:
        MissingExtraError: if a tracker is not installed.
        CannotRunError: if a tracker cannot be started: no account, no network.
    """
    require_trackers(names)
    opened: list[Tracker] = []
    texts = {
        name: " ".join(map(str, value)) if isinstance(value, list) else str(value)
        for name, value in settings.items()
        if value is not None
    }
    for name in dict.fromkeys(names):
        try:
            with redirect_stdout(sys.stderr):
                opened.append(_open(name, texts, folder, after))
        except Exception as error:  # any exception of the tracker's own code
            for tracker in opened:
                tracker.close()
            raise CannotRunError(
                f"the tracker {name} cannot be started: {summarise_error(error)}; set it up, or leave it out"
            ) from error
    return opened


def _open(name: str, settings: Mapping[str, str], folder: Path, after: int) -> Tracker:
    """A tracker, by its own interface; trackio has that of wandb."""
    module: Any = import_module(name)
    if name == TENSORBOARD:
        tensorboard = import_extra("torch.utils.tensorboard", "train")
        writer = tensorboard.SummaryWriter(
            log_dir=str(folder / "tensorboard"), purge_step=after + 1 if after else None
        )
        if not after:
            writer.add_text("settings", "\n".join(f"    {each}: {text}" for each, text in settings.items()))

        def write(metrics: Mapping[str, float], step: int) -> None:
            for metric, value in metrics.items():
                writer.add_scalar(metric, value, step)
            writer.flush()

        return Tracker(name=name, send=write, finish=writer.close)
    if name == "mlflow":
        if os.environ.keys().isdisjoint(MLFLOW_VARIABLES):
            module.set_experiment(PROJECT)
        module.start_run(run_name=folder.name)
        module.log_params(settings)
        return Tracker(name=name, send=module.log_metrics, finish=module.end_run)
    # those of the environment, which arguments override in wandb
    project, run = (os.environ.get(f"{name.upper()}_{what}") for what in ("PROJECT", "NAME"))
    module.init(project=project or PROJECT, name=run or folder.name, config=settings)
    return Tracker(name=name, send=module.log, finish=module.finish)


def require_trackers(names: Sequence[str]) -> None:
    """Check that trackers are installed, before a long run.

    Raises:
        MissingExtraError: if one is not.
    """
    for name in names:
        require_installed([name], "'kleash[train]'" if name == TENSORBOARD else name)


def send_result(names: Sequence[str], result: Measurement | Sweep, folder: Path) -> list[str]:
    """Send the numbers of a finished measurement or sweep and its settings to trackers; one process calls this.

    Each number is a scalar, and so are its standard error and the ends of its interval, where they are known: of a
    measurement at step 0, ``measurement/NAME``; of a sweep, where names, letters and failures of the candidates are
    settings, as of ``sweep_scalars``.

    Args:
        names: of the trackers; each is sent to whether others fail or not.
        result: is on disk already.
        folder: of the run, whose name is that of the run in the tracker.

    Returns:
        A sentence for each tracker that failed.
    """
    is_sweep = isinstance(result, Sweep)
    scalars = sweep_scalars(result) if is_sweep else {0: scalars_of(result)}
    failures: list[str] = []
    for name in dict.fromkeys(names):
        try:
            (opened,) = open_trackers((name,), _settings_of(result), folder)
            with closing(opened) as tracker:
                for step, scalars_of_step in scalars.items():
                    tracker.log(scalars_of_step, step)
        except Exception as error:  # any exception of the tracker's own code: the result is not lost
            failures.append(
                f"the tracker {name} did not get the {'sweep' if is_sweep else 'measurement'} "
                f"({summarise_error(error)}), which is in {folder}; send it with kleash report "
                f"{shlex.quote(str(folder))} --report-to {name}"
            )
    return failures


def scalars_of(measurement: Measurement) -> dict[str, float]:
    """The numbers of a measurement by the names that trackers see; what is NaN is left out."""
    counts = measurement.counts
    scalars: dict[str, float] = {
        "tokens": counts.tokens,
        "sequences": counts.sequences,
        "clusters": counts.clusters,
        **_scalars_of_rows(measurement_rows(measurement)),
    }
    return {f"measurement/{name}": value for name, value in scalars.items()}


def sweep_scalars(sweep: Sweep) -> dict[int, dict[str, float]]:
    """The numbers of the candidates that were measured, ``sweep/NAME`` and ``sweep/rank``, by the candidate's number.

    That is the step, so that the checkpoints of a run make a curve.
    """
    ranks = {candidate.number: rank for rank, candidate in enumerate(sweep.ranking, start=1)}
    scalars = {
        candidate.number: {
            **_scalars_of_rows(candidate_rows(sweep, candidate)),
            "rank": ranks[candidate.number],
        }
        for candidate in sweep.candidates
        if candidate.number in ranks
    }
    return {
        number: {f"sweep/{name}": float(value) for name, value in values.items()}
        for number, values in scalars.items()
    }


def _scalars_of_rows(rows: Iterable[NumberRow]) -> dict[str, float]:
    """Numbers, their standard errors and the ends of their intervals by name; what is NaN is left out."""
    return {
        f"{row.name}_{kind}".removesuffix("_value"): float(number)
        for row in rows
        for kind, number in row.numbers.items()
        if number is not None and not math.isnan(number)
    }


def _settings_of(result: Measurement | Sweep) -> dict[str, object]:
    """What decided a result, by name, the verdict of its gate, and what the candidates of a sweep are."""
    gate = result.gate and {
        "gate": result.gate.verdict,
        "at_most": result.gate.at_most,
        "gate_quantity": result.gate.quantity,
    }
    settings: dict[str, object] = {**result.job, "kleash": result.kleash, **(gate or {})}
    if isinstance(result, Measurement):
        fingerprints = {f"fingerprint_{role}": model.fingerprint for role, model in result.models.items()}
        kinds = ("source_sha256", "estimand", "headline")
        return {**settings, **fingerprints, **{name: getattr(result, name) for name in kinds}}
    of_candidates = {
        f"{name}_{candidate.number}": text
        for candidate in result.candidates
        for name, text in (
            ("candidate", candidate.name),
            ("letters", candidate.letters),
            ("failure", candidate.failure),
        )
        if text
    }
    return {**settings, "tokens": result.tokens, "clusters": result.clusters, **of_candidates}
