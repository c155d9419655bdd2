"""The report of any folder: of a measurement, a training run or a demonstration."""

from pathlib import Path

from kleash.errors import OptionError, RunFolderError
from kleash.reports.demonstration import write_demonstration
from kleash.reports.measurement import write_report
from kleash.reports.training import write_training_report
from kleash.store.checksums import damage_as_sentence
from kleash.store.demonstration import DEMONSTRATION
from kleash.store.job_folder import HEADER, read_header
from kleash.store.steps import STEPS


def write_report_of(folder: Path, at_most: float | None = None) -> Path:
    """Write ``report.html`` of a folder from its files: of a measurement, a training run or a demonstration.

    Args:
        folder: of a finished run.
        at_most: a limit in nats for a measurement's KL, whose verdict the report then has.

    Returns:
        The report's path.

    Raises:
        OptionError: if there is a limit, and the folder is not of a measurement.
        RunFolderError: if the folder holds none of these, a file is damaged, or the report cannot be written.
        MissingExtraError: if a dependency of reports is not installed.
    """
    try:
        kind = next((name for name in (DEMONSTRATION, STEPS) if (folder / name).exists()), None)
        if kind is None and (folder / HEADER).exists() and "algorithm" in read_header(folder).settings:
            kind = STEPS
    except RunFolderError:
        raise
    except OSError as error:  # the name is too long, or the folder is not readable
        raise RunFolderError(f"{folder} cannot be read: {error.strerror or error}") from error
    if kind is not None and at_most is not None:
        raise OptionError(f"--at-most is for measurements; {folder} is the folder of a training run")
    with damage_as_sentence(folder):
        if kind == DEMONSTRATION:
            return write_demonstration(folder)
        return write_training_report(folder) if kind == STEPS else write_report(folder, at_most)
