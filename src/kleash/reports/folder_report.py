"""The report of any folder: of a measurement, a sweep or a training run."""

from pathlib import Path
from typing import Any

from kleash.errors import OptionError, RunFolderError
from kleash.reports.measurement import write_report
from kleash.reports.sweep import PAGE, write_sweep
from kleash.reports.training import write_training_report
from kleash.store.audit import read_audits
from kleash.store.checksums import is_there, reading
from kleash.store.job_folder import HEADER
from kleash.store.measurement import Measurement
from kleash.store.run_folder import MEASUREMENT
from kleash.store.steps import STEPS
from kleash.store.sweep import SWEEP, Sweep
from kleash.store.training_folder import TrainingFolder, TrainingResult


def kind_of_folder(folder: Path) -> str:
    """The file that says what a folder holds: ``STEPS``, ``SWEEP``, or else ``MEASUREMENT``.

    Raises:
        RunFolderError: if the folder cannot be read.
    """
    with reading(folder, "give the folder of a run"):
        there = [name for name in (STEPS, SWEEP, HEADER) if is_there(folder / name)]
    if STEPS in there or (there == [HEADER] and "algorithm" in TrainingFolder(folder).header().settings):
        return STEPS
    return SWEEP if SWEEP in there else MEASUREMENT


def read_result(folder: Path) -> Measurement | Sweep:
    """The result in the folder of a measurement or of a sweep.

    Raises:
        OptionError: if it is the folder of a training run, which has no numbers but those of its steps.
        RunFolderError: if the result is missing or damaged.
    """
    kind = kind_of_folder(folder)
    if kind == STEPS:
        raise OptionError(
            f"{folder} is the folder of a training run, and --at-most, --format, --json, --picture and --report-to are "
            "for measurements and sweeps; leave them out"
        )
    return Sweep.read(folder) if kind == SWEEP else Measurement.read(folder)


def open(path: Path | str) -> Measurement | Sweep | TrainingResult | Any:
    """The result in a folder: of a measurement, a sweep or a finished training run; or a tuple of audits in a file.

    >>> measurement = kleash.measure(text=["The sea was calm."], out="opened")
    >>> kleash.open("opened") == measurement
    True

    Args:
        path: the folder, or what ``kleash audit --json`` printed, as a file.

    Raises:
        RunFolderError: if there is no result, it is damaged, or its job has not finished.
    """
    path = Path(path).expanduser()
    if path.is_file():
        return read_audits(path)
    if kind_of_folder(path) != STEPS:
        return read_result(path)
    result = TrainingFolder(path).result()
    if result is None:
        raise RunFolderError(f"the training run in {path} has not finished; go on with it with --resume")
    return result


def write_report_of(folder: Path, result: Measurement | Sweep | None = None) -> Path:
    """Write the page of a folder from its files: of a measurement, a sweep or a training run.

    Args:
        folder: of a finished run.
        result: that of a measurement or a sweep, such as with the verdict for another limit; None to read it.

    Returns:
        The page's path: ``report.html``, of a sweep ``sweep.html``.

    Raises:
        RunFolderError: if the folder holds none of these, a file is damaged, or the report cannot be written.
        MissingExtraError: if a dependency of reports is not installed.
    """
    if result is None and kind_of_folder(folder) == STEPS:
        return write_training_report(folder)
    result = read_result(folder) if result is None else result
    return write_sweep(folder / PAGE, result) if isinstance(result, Sweep) else write_report(folder, result)
