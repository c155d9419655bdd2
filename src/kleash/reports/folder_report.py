"""The report of any folder: of a measurement, a sweep or a training run."""

from dataclasses import replace
from pathlib import Path

from kleash.errors import OptionError, RunFolderError
from kleash.reports.gate_verdicts import gate_of_measurement, gate_of_sweep
from kleash.reports.measurement import write_report
from kleash.reports.sweep import PAGE, write_sweep
from kleash.reports.training import write_training_report
from kleash.store.audit import Audit, read_audits
from kleash.store.job_folder import HEADER
from kleash.store.measurement import Measurement
from kleash.store.steps import STEPS
from kleash.store.sweep import SWEEP, Sweep
from kleash.store.training_folder import TrainingFolder, TrainingResult

MEASUREMENT = "measurement.json"


def kind_of_folder(folder: Path) -> str:
    """The file that says what a folder holds: ``STEPS``, ``SWEEP``, or else ``MEASUREMENT``.

    Raises:
        RunFolderError: if the folder cannot be read.
    """
    try:
        kind = next((name for name in (STEPS, SWEEP) if (folder / name).exists()), None)
        if (
            kind is None
            and (folder / HEADER).exists()
            and "algorithm" in TrainingFolder(folder).header().settings
        ):
            kind = STEPS
    except RunFolderError:
        raise
    except OSError as error:  # the name is too long, or the folder is not readable
        raise RunFolderError(f"{folder} cannot be read: {error.strerror or error}") from error
    return MEASUREMENT if kind is None else kind


def require_measurement(folder: Path, option: str, *, or_sweep: bool = False) -> None:
    """Check that an option of ``kleash report`` is for what a folder holds.

    Args:
        folder: of a finished run.
        option: as it is typed.
        or_sweep: whether it is for sweeps, too.

    Raises:
        OptionError: if not.
        RunFolderError: if the folder cannot be read.
    """
    kind = kind_of_folder(folder)
    if kind == SWEEP and not or_sweep:
        raise OptionError(
            f"{option} is for one measurement, and {folder} is the folder of a sweep; name that of a candidate in "
            f"{folder / 'candidates'}"
        )
    if kind == STEPS:
        kinds = "measurements and sweeps" if or_sweep else "measurements"
        raise OptionError(f"{option} is for {kinds}; {folder} is the folder of a training run")


def read_result(folder: Path) -> Measurement | Sweep:
    """The result in the folder of a measurement or of a sweep.

    Raises:
        RunFolderError: if it is missing or damaged.
    """
    return Sweep.read(folder) if kind_of_folder(folder) == SWEEP else Measurement.read(folder)


def open(path: Path | str) -> Measurement | Sweep | TrainingResult | tuple[Audit, ...]:
    """The result in a folder: of a measurement, a sweep or a finished training run; or in the file of audits.

    >>> measurement = kleash.measure(text=["The sea was calm."], out="opened")
    >>> kleash.open("opened").to_json() == measurement.to_json()
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


def with_gate(
    result: Measurement | Sweep, at_most: float, statistic: str | None = None
) -> Measurement | Sweep:
    """The result with the verdict for a limit in nats; ``statistic`` as for ``gate_of_measurement``."""
    if isinstance(result, Sweep):
        return gate_of_sweep(result, at_most, statistic)
    return replace(result, gate=gate_of_measurement(result, at_most, statistic))


def write_report_of(folder: Path, at_most: float | None = None, statistic: str | None = None) -> Path:
    """Write the page of a folder from its files: of a measurement, a sweep or a training run.

    Args:
        folder: of a finished run.
        at_most: a limit in nats for the KL of a measurement or a sweep, whose verdict the page then has.
        statistic: the KL's name in ``STATISTICS``; None for the headline.

    Returns:
        The page's path: ``report.html``, of a sweep ``sweep.html``.

    Raises:
        OptionError: if there is a limit, and the folder is that of a training run.
        RunFolderError: if the folder holds none of these, a file is damaged, or the report cannot be written.
        MissingExtraError: if a dependency of reports is not installed.
    """
    if at_most is not None:
        require_measurement(folder, "--at-most", or_sweep=True)
    kind = kind_of_folder(folder)
    if kind == SWEEP:
        sweep = Sweep.read(folder)
        return write_sweep(
            folder / PAGE, sweep if at_most is None else gate_of_sweep(sweep, at_most, statistic)
        )
    return write_training_report(folder) if kind == STEPS else write_report(folder, at_most, statistic)
