"""Runs each command but audit: measure, compare, mismatch and doctor here, the rest in modules of their own."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from kleash.cli.caching import run_cache
from kleash.cli.commands import CompareJob, ReportJob, RichCommand
from kleash.cli.formats import print_formatted
from kleash.cli.progress import Progress
from kleash.cli.report_command import run_report
from kleash.cli.summary import print_summary
from kleash.cli.sweeping import run_sweep
from kleash.cli.terminal import trackers_as_sentences
from kleash.cli.training import run_train
from kleash.errors import OptionError
from kleash.jobs import CacheJob, MeasureJob, SweepJob, TrainJob
from kleash.jobs.option_groups import SHIPPED_POLICY, SHIPPED_REFERENCE
from kleash.jobs.rollout_jobs import DoctorJob, MismatchJob
from kleash.launch_environment import launched_rank
from kleash.store.gate import exit_code_of
from kleash.store.number_rows import NumericResult

SHIPPED_PAIR = (
    "no models were given: this measures the small pair that ships with kleash; --policy and --reference "
    "take others"
)
"""Note of a measurement of the shipped models."""

FIRST_RANK_ONLY = (ReportJob, CompareJob, MismatchJob, DoctorJob)
"""Commands of which the first of several launched processes does the work; the others exit with 0 at once."""


def run(command: RichCommand) -> int:
    """Run a command and return its exit code.

    Raises:
        KleashError: if the command fails.
    """
    if isinstance(command, FIRST_RANK_ONLY) and launched_rank() != 0:
        return 0
    match command:
        case MeasureJob():
            return _measure(command)
        case SweepJob():
            return run_sweep(command)
        case ReportJob():
            return run_report(command)
        case CompareJob():
            return _compare(command)
        case MismatchJob():
            return _mismatch(command)
        case DoctorJob():
            return _doctor(command)
        case CacheJob():
            return run_cache(command)
        case TrainJob():
            return run_train(command)


def _measure(job: MeasureJob) -> int:
    """Run ``kleash measure`` and return its exit code: 0 if another process of the run makes the measurement."""
    from kleash.measuring.run import default_out, measure_together, require_folder_of_all

    if job.out is None:
        require_folder_of_all("the run")
        job = replace(job, out=default_out())
    shows_progress = launched_rank() == 0 and not job.quiet
    with trackers_as_sentences(), Progress() if shows_progress else nullcontext() as progress:
        is_shipped = (job.policy, job.reference) == (SHIPPED_POLICY, SHIPPED_REFERENCE)
        if progress is not None and is_shipped and not job.has_base_logits:
            progress.note(SHIPPED_PAIR)
        result = measure_together(job, progress)
    if not result.is_own:
        return 0
    measurement, folder = result.measurement, Path(str(job.out))
    if job.output_format is not None:
        print_formatted(measurement, job.output_format, folder.expanduser())
    elif not job.quiet:
        print_summary(measurement, folder / "report.html")
    return 0 if measurement.gate is None else measurement.gate.exit_code


def _compare(command: CompareJob) -> int:
    """Run ``kleash compare`` and return its exit code."""
    from kleash.measuring.comparison import compare
    from kleash.reports import write_comparison

    if len(command.folders) < 2:
        raise OptionError(f"compare takes two or more run folders; {len(command.folders)} was given")
    comparison = compare(command.folders, at_most=command.at_most, direction=command.direction)
    path = write_comparison(command.out.expanduser(), comparison)
    _print_result(comparison, command.output_format, path)
    return exit_code_of(run.gate for run in comparison.runs if run.gate is not None)


def _mismatch(job: MismatchJob) -> int:
    """Run ``kleash mismatch`` and return its exit code: that of the gate, or 0."""
    from kleash.diagnosis import measure_mismatch

    record = measure_mismatch(job.rollouts, names=job.names, at_most=job.at_most)
    _print_result(record, job.output_format)
    return 0 if record.gate is None else record.gate.exit_code


def _doctor(job: DoctorJob) -> int:
    """Run ``kleash doctor`` and return its exit code, 0."""
    from kleash.diagnosis.doctor import diagnose_file

    _print_result(diagnose_file(job), job.output_format)
    return 0


def _print_result(result: NumericResult, output_format: str | None, page: Path | None = None) -> None:
    """Print a result in a format, or its summary and the path of its page."""
    if output_format is not None:
        print_formatted(result, output_format)
    else:
        print_summary(result, page)
