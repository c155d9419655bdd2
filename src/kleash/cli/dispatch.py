"""Runs each command: measure, merge, compare and audit here, the rest in modules of their own."""

import json
import shlex
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

from kleash.cli.caching import run_cache
from kleash.cli.commands import AuditJob, Command, CompareJob, MergeJob, ReportJob
from kleash.cli.formats import print_formatted
from kleash.cli.logits_command import run_logits
from kleash.cli.progress import Progress
from kleash.cli.report_command import run_report
from kleash.cli.rollout_commands import run_doctor, run_mismatch
from kleash.cli.summary import print_comparison, print_measurement, print_part
from kleash.cli.sweeping import run_sweep
from kleash.cli.terminal import trackers_as_sentences
from kleash.cli.training import run_demonstration, run_train
from kleash.errors import MissingExtraError, OptionError
from kleash.jobs import CacheJob, LogitsJob, MeasureJob, SweepJob, TrainJob
from kleash.jobs.demonstration import DemonstrationJob
from kleash.jobs.option_groups import SHIPPED_POLICY, SHIPPED_REFERENCE
from kleash.jobs.rollout_jobs import DoctorJob, MismatchJob
from kleash.launch_environment import launched_rank, require_one_process
from kleash.store import Measurement
from kleash.store.codec import to_json
from kleash.store.gate import exit_code_of

SHIPPED_PAIR = (
    "no models were given: this measures the small pair that ships with kleash; --policy and --reference "
    "take others"
)
"""Note of a measurement of the shipped models."""

FIRST_RANK_ONLY = (ReportJob, CompareJob, MismatchJob, DoctorJob, AuditJob)
"""Commands of which the first of several launched processes does the work; the others exit with 0 at once."""


def run(command: Command) -> int:
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
        case MergeJob():
            return _merge(command)
        case ReportJob():
            return run_report(command)
        case CompareJob():
            return _compare(command)
        case MismatchJob():
            return run_mismatch(command)
        case DoctorJob():
            return run_doctor(command)
        case CacheJob():
            return run_cache(command)
        case LogitsJob():
            return run_logits(command)
        case AuditJob():
            return _audit(command)
        case DemonstrationJob():
            return run_demonstration(command)
        case TrainJob():
            return run_train(command)


def _measure(job: MeasureJob) -> int:
    """Run ``kleash measure`` and return its exit code."""
    from kleash.measuring import launched_ranks, measure, measure_part
    from kleash.measuring.run import default_out

    ranks = launched_ranks()
    if job.out is None and ranks.world_size == 1:
        job = replace(job, out=default_out())
    shows_progress = ranks.is_first and not job.quiet
    with trackers_as_sentences(), Progress() if shows_progress else nullcontext() as progress:
        if progress is not None and job.policy == SHIPPED_POLICY and job.reference == SHIPPED_REFERENCE:
            progress.note(SHIPPED_PAIR)
        run_job = measure if job.shard is None else measure_part
        result = run_job(job, progress, ranks)
    if not ranks.is_first:
        return 0
    if isinstance(result, Measurement):
        _print_result(result, Path(str(job.out)), job.output_format, quiet=job.quiet)
    elif job.output_format == "json":
        sys.stdout.write(to_json(result))
    elif not job.quiet:
        print_part(result, job)
    return _exit_code_of_gate(result) if isinstance(result, Measurement) else 0


def _merge(command: MergeJob) -> int:
    """Run ``kleash merge`` and return its exit code."""
    require_one_process("kleash merge")
    from kleash.measuring import merge

    folder = command.folder.expanduser()
    with trackers_as_sentences(), nullcontext() if command.quiet else Progress() as progress:
        measurement = merge(
            folder,
            progress,
            at_most=command.at_most,
            direction=command.direction,
            report_to=command.report_to,
        )
    _print_result(measurement, folder, command.output_format, quiet=command.quiet)
    return _exit_code_of_gate(measurement)


def _exit_code_of_gate(measurement: Measurement) -> int:
    """The exit code of a measurement's gate; 0 if it has none."""
    return 0 if measurement.gate is None else measurement.gate.exit_code


def _print_result(measurement: Measurement, folder: Path, output_format: str | None, *, quiet: bool) -> None:
    """Print a measurement in a format, as a summary, or not at all."""
    if output_format is not None:
        print_formatted(measurement, output_format, folder.expanduser())
    elif not quiet:
        print_measurement(measurement, folder)


def _compare(command: CompareJob) -> int:
    """Run ``kleash compare`` and return its exit code."""
    from kleash.measuring.comparison import compare
    from kleash.reports import write_comparison

    if len(command.folders) < 2:
        raise OptionError(f"compare takes two or more run folders; {len(command.folders)} was given")
    comparison = compare(command.folders, at_most=command.at_most, direction=command.direction)
    path = write_comparison(command.out.expanduser(), comparison)
    if command.output_format is not None:
        print_formatted(comparison, command.output_format)
    else:
        print_comparison(comparison, path)
    return exit_code_of(run.gate for run in comparison.runs if run.gate is not None)


def _audit(command: AuditJob) -> int:
    """Run ``kleash audit`` and return its exit code: 1 if a finding is in ``fail_on``."""
    from kleash.auditing import audits_of, cases_of
    from kleash.auditing.findings.finding_kinds import require_kinds
    from kleash.cli.verdicts import print_audit, print_audit_counts, print_failures
    from kleash.reports import write_audits
    from kleash.store.codec import encode

    fail_on = [kind for words in command.fail_on for kind in words.split(",") if kind]
    require_kinds(fail_on)
    audits: list[Any] = []
    with redirect_stdout(sys.stderr):  # audited code may print; that is not output of the audit
        pending_audits = audits_of(cases_of(command.target, command.convention, command.set))
    while True:
        with redirect_stdout(sys.stderr):
            audit = next(pending_audits, None)
        if audit is None:
            break
        audits.append(audit)
        if not command.quiet and not command.json:
            print_audit(audit)
    page, page_error = None, ""
    try:
        page = write_audits(command.out.expanduser(), audits, _audit_command(command))
    except MissingExtraError as error:
        page_error = str(error)
    if command.json:
        text = json.dumps({"audits": encode(audits)}, indent=2, allow_nan=False, ensure_ascii=False)
        sys.stdout.write(text + "\n")
    elif not command.quiet:
        print_audit_counts(audits, page)
    if page_error and not command.quiet:
        print(f"kleash: no page was made: {page_error}", file=sys.stderr)
    failures = [(audit, finding) for audit in audits for finding in audit.failing(fail_on)]
    print_failures(failures)
    return 1 if failures else 0


def _audit_command(command: AuditJob) -> str:
    """The command line that repeats the audits."""
    words: Sequence[str] = [
        *("kleash", "audit", command.target),
        *(("--convention", command.convention) if command.convention else ()),
        *(("--set", *command.set) if command.set else ()),
    ]
    return shlex.join(words)
