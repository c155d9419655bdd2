"""Each command, carried out."""

import sys
from dataclasses import replace
from pathlib import Path

from kleash.cli.commands import Command, Compare, Measure, Report
from kleash.cli.progress import Progress
from kleash.cli.summary import print_comparison, print_measurement
from kleash.errors import OptionError
from kleash.records import MeasureJob


def run(command: Command) -> int:
    """Do what ``command`` says; 0 when it is done.

    Raises:
        KleashError: if it cannot be done.
    """
    match command:
        case Measure():
            return _measure(command.job())
        case Report():
            return _report(command)
        case Compare():
            return _compare(command)


def _measure(job: MeasureJob) -> int:
    from kleash.measuring import default_out, measure
    from kleash.measuring.watching import Nobody

    job = replace(job, out=job.out if job.out is not None else default_out())
    if job.quiet:
        measurement = measure(job, Nobody())
    else:
        with Progress() as progress:
            measurement = measure(job, progress)
    if job.json:
        sys.stdout.write(measurement.to_json())
    elif not job.quiet:
        print_measurement(measurement, Path(str(job.out)))
    return 0


def _report(command: Report) -> int:
    from kleash.reports import write_report

    print(write_report(command.folder))
    return 0


def _compare(command: Compare) -> int:
    from kleash.measuring.comparing import compare
    from kleash.reports import write_comparison

    if len(command.folders) < 2:
        raise OptionError(f"compare takes two or more run folders; {len(command.folders)} was given")
    comparison = compare(command.folders)
    path = write_comparison(command.out, comparison)
    if command.json:
        sys.stdout.write(comparison.to_json())
    else:
        print_comparison(comparison, path)
    return 0
