"""Running ``kleash report``: the page of a folder, its picture, its result in a format, its numbers for trackers."""

from pathlib import Path

from kleash.cli.commands import ReportJob
from kleash.cli.formats import print_formatted
from kleash.cli.summary import print_gates
from kleash.errors import CannotRunError
from kleash.jobs.output_options import FORMATS
from kleash.store import Measurement
from kleash.store.sweep import Sweep


def run_report(command: ReportJob) -> int:
    """Run ``kleash report`` and return its exit code: that of the gate of ``--at-most``, or 0.

    Raises:
        KleashError: if the page cannot be written, or an option is not for what the folder holds.
    """
    from kleash.reports.folder_report import read_result, with_gate, write_report_of

    folder = command.folder.expanduser()
    _require_suitable(command, folder)
    page = write_report_of(folder, command.at_most, command.gated_statistic)
    if command.output_format is None:
        print(page)
    options = (command.output_format, command.at_most, command.picture, command.report_to or None)
    if all(option is None for option in options):
        return 0
    result = read_result(folder)
    if command.at_most is not None:
        result = with_gate(result, command.at_most, command.gated_statistic)
    if command.picture is not None:
        _draw(result, command.picture.expanduser(), is_printed=command.output_format is None)
    if command.output_format is not None:
        print_formatted(result, command.output_format, folder)
    if command.at_most is not None and command.output_format is None:
        print_gates(result)
    _send(result, command.report_to, folder)
    return 0 if command.at_most is None or result.gate is None else result.gate.exit_code


def _require_suitable(command: ReportJob, folder: Path) -> None:
    """Check that the options are for what the folder holds, before anything is written.

    Raises:
        OptionError: if one is not.
    """
    from kleash.reports.folder_report import require_measurement

    if command.output_format is not None:
        is_general = command.output_format in FORMATS
        require_measurement(folder, f"--format {command.output_format}", or_sweep=is_general)
    if command.picture is not None:
        require_measurement(folder, "--picture", or_sweep=True)
    if command.report_to:
        require_measurement(folder, "--report-to", or_sweep=True)


def _draw(result: Measurement | Sweep, path: Path, *, is_printed: bool) -> None:
    """Draw a result, and print the path of the picture if ``is_printed``."""
    from kleash.reports.pictures import write_picture

    write_picture(path, result)
    if is_printed:
        print(path)


def _send(result: Measurement | Sweep, report_to: tuple[str, ...], folder: Path) -> None:
    """Send a result to trackers.

    Raises:
        CannotRunError: if one failed.
    """
    from kleash.reports.trackers import send_measurement, send_sweep

    if isinstance(result, Measurement):
        failures = send_measurement(report_to, result, folder)
    else:
        failures = send_sweep(report_to, result, folder)
    if failures:
        raise CannotRunError("; ".join(failures))
