"""The report of whatever a folder holds."""

from pathlib import Path

from kleash.records.demonstration import DEMONSTRATION
from kleash.records.steps import STEPS
from kleash.reports.demonstration import write_demonstration
from kleash.reports.measurement import write_report
from kleash.reports.training import write_training_report


def write_report_of(folder: Path) -> Path:
    """Make ``report.html`` of a folder from its files: of a measurement, a training run or a demonstration.

    Returns:
        The report's path.

    Raises:
        RunFolderError: if it holds none of these, a file is damaged, or the report cannot be written.
        MissingExtraError: if something that reports need is not installed.
    """
    if (folder / DEMONSTRATION).exists():
        return write_demonstration(folder)
    if (folder / STEPS).exists():
        return write_training_report(folder)
    return write_report(folder)
