"""Runs each command but audit and env, and prints its result.

Modules that import torch, which takes seconds, are imported after the first words of a command are on the screen.
"""

import shlex
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

from kleash.cli.entry import EXIT_ERROR
from kleash.cli.parsing import Command, DryRun
from kleash.cli.printing import print_formatted, print_gates, print_summary, print_texts
from kleash.cli.progress import Progress, Steps
from kleash.cli.terminal import trackers_as_sentences
from kleash.errors import CannotRunError
from kleash.jobs import CacheJob, MeasureJob, SweepJob, TrainJob
from kleash.jobs.option_groups import SHIPPED_POLICY, SHIPPED_REFERENCE
from kleash.jobs.reading_jobs import CompareJob, DoctorJob, MismatchJob, ReportJob
from kleash.jobs.train import SHIPPED_REWARD
from kleash.launch_environment import launched_rank, require_one_process
from kleash.reports.formatting import format_bytes, measure_command
from kleash.store import TrainingResult, WrittenLogits
from kleash.store.cache import CacheContents, read_label
from kleash.store.codec import to_json
from kleash.store.comparison import TrainingComparison
from kleash.store.measurement import exit_code_of
from kleash.store.number_rows import NumericResult
from kleash.store.summary import Summary

SHIPPED_PAIR = "this measures the small pair that ships with kleash; --policy and --reference take others"
"""Note of a measurement of the shipped models."""


def run(command: Command | DryRun) -> int:
    """Run a command and return its exit code.

    Raises:
        KleashError: if the command fails.
    """
    with trackers_as_sentences():
        return next(run_job for kind, run_job in COMMANDS.items() if isinstance(command, kind))(command)


def _dry_run(command: DryRun) -> int:
    """Print what a job would load and read, and return the exit code, 0."""
    from kleash.measuring.dry_run import dry_run

    plan = dry_run(command.job)
    if command.job.json:
        sys.stdout.write(to_json(plan))
    else:
        print_texts(plan)
    return 0


def _measure(job: MeasureJob) -> int:
    """Run ``kleash measure`` and return its exit code: 0 if another process of the run makes the measurement."""
    shows_progress = launched_rank() == 0 and not job.quiet
    with Progress() if shows_progress else nullcontext() as progress:
        is_shipped = (job.policy, job.reference) == (SHIPPED_POLICY, SHIPPED_REFERENCE)
        if progress is not None and is_shipped and not job.has_base_logits:
            progress.note(SHIPPED_PAIR)
        from kleash.measuring.run import measure_together

        measurement, is_own = measure_together(job, progress)
    if not is_own:
        return 0
    _print_result(measurement, job, measurement.folder and measurement.folder / "report.html")
    return exit_code_of([measurement.gate])


def _sweep(job: SweepJob) -> int:
    """Run ``kleash sweep`` and return its exit code: 2 if a candidate or an attribution failed, otherwise that of the
    gate of ``--at-most``, or 0.

    It is 0 if another process makes the ranking.
    """
    from kleash.reports.sweep import PAGE

    with Progress() if launched_rank() == 0 and not job.quiet else nullcontext() as progress:
        from kleash.measuring.run import default_out
        from kleash.measuring.sweep_run import PARENT, sweep_together

        if job.out is None:
            job = replace(job, out=default_out(PARENT))
        result, is_own = sweep_together(job, progress)
    if not is_own:
        return 0
    _print_result(result, job, Path(str(job.out)) / PAGE)
    names = {candidate.number: candidate.name for candidate in result.candidates}
    failures = [
        *(f"{each.name} could not be measured: {each.failure}" for each in result.failed),
        *dict.fromkeys(
            f"{names[each.candidate]} could not be attributed: {each.failure}"
            for each in result.attributions
            if each.failure
        ),
    ]
    if job.quiet or job.output_format is not None:
        for failure in failures:
            print(f"kleash: {failure}", file=sys.stderr)
    return EXIT_ERROR if failures else exit_code_of([result.gate])


def _report(job: ReportJob) -> int:
    """Run ``kleash report`` and return its exit code: that of the gate of ``--at-most``, or 0.

    Raises:
        OptionError: if an option is not for what the folder holds, before anything is written.
        CannotRunError: if a tracker failed.
    """
    from kleash.reports.folder_report import read_result, write_report_of
    from kleash.reports.gate_verdicts import with_gate
    from kleash.reports.pictures import write_picture
    from kleash.reports.trackers import send_result

    folder = job.folder.expanduser()
    if job.output_format is job.at_most is job.picture is None and not job.report_to:
        print(write_report_of(folder))  # of a training run, too, which has no other outputs
        return 0
    result: Any = read_result(folder)
    result = with_gate(result, job.at_most, job.gated_statistic)
    if job.output_format is not None:
        print_formatted(result, job.output_format)
    paths = [write_report_of(folder, result)]
    if job.picture is not None:
        paths.append(write_picture(job.picture.expanduser(), result))
    if job.output_format is None:
        print(*paths, sep="\n")
        if job.at_most is not None:
            print_gates(result)
    failures = send_result(job.report_to, result, folder)
    if failures:
        raise CannotRunError("; ".join(failures))
    return 0 if job.at_most is None else exit_code_of([result.gate])


def _compare(job: CompareJob) -> int:
    """Run ``kleash compare`` and return its exit code."""
    from kleash.measuring.comparison import compare
    from kleash.reports import write_comparison, write_training_comparison

    comparison = compare(job.folders, at_most=job.at_most, direction=job.direction)
    page = job.out.expanduser()
    if isinstance(comparison, TrainingComparison):
        _print_result(comparison, job, write_training_comparison(page, comparison))
        return 0
    _print_result(comparison, job, write_comparison(page, comparison))
    return exit_code_of(run.gate for run in comparison.runs)


def _mismatch(job: MismatchJob) -> int:
    """Run ``kleash mismatch`` and return its exit code: that of the gate, or 0."""
    from kleash.diagnosis import measure_mismatch

    record = measure_mismatch(job.rollouts, names=job.names, at_most=job.at_most)
    _print_result(record, job)
    return exit_code_of([record.gate])


def _doctor(job: DoctorJob) -> int:
    """Run ``kleash doctor`` and return its exit code, 0."""
    from kleash.diagnosis.doctor import diagnose_file

    _print_result(diagnose_file(job), job)
    return 0


def _cache(job: CacheJob) -> int:
    """Run ``kleash cache``, print what was written and the command that uses it, and return its exit code, 0."""
    require_one_process("kleash cache")
    with nullcontext() if job.quiet else Progress(activity="caching", step="reading") as progress:
        from kleash.measuring import cache_reference
        from kleash.measuring.run import default_out

        job = replace(job, out=job.out if job.out is not None else default_out("kleash-caches"))
        contents = cache_reference(job, progress)
    if job.json:
        sys.stdout.write(contents.to_json())
    elif not job.quiet:
        print_texts(summary_of_cache(job, contents))
    return 0


def summary_of_cache(job: CacheJob, contents: CacheContents | WrittenLogits) -> Summary:
    """What was written, with the command that measures a policy against it, its options those that must agree."""
    if isinstance(contents, WrittenLogits):
        use = f"kleash measure --policy MODEL --reference-cache {shlex.quote(contents.path)}"
        return Summary(
            headline=f"chunks of {contents.context} tokens over {contents.vocabulary} logits: {contents.chunks}, in "
            f"{contents.path}, {contents.bytes:,} bytes",
            facts=(*(("note", note) for note in contents.notes), ("use it with", use)),
        )
    settings: dict[str, Any] = {**vars(job.measurement()), "reference_cache": job.out}
    if job.from_hidden_states is not None:
        settings["dtype"] = read_label(Path(str(job.out)).expanduser()).reference.dtype
    ratio = contents.logits_bytes / contents.hidden_bytes
    return Summary(
        headline=f"{contents.tokens:,} tokens in {contents.sequences:,} sequences are cached in {job.out}: "
        f"{format_bytes(contents.hidden_bytes)} of hidden states, {ratio:.0f} times less than their logits, and a "
        f"head of {format_bytes(contents.head_bytes)}",
        facts=(("use it with", measure_command({**settings, "policy": "POLICY", "revision_policy": None})),),
    )


def _train(job: TrainJob) -> int:
    """Run a training job and return its exit code: 0, or 1 if it stopped before its last step.

    It is 0 for all ranks but the first: torchrun ends all ranks when one ends with another code, and the first may
    still be writing and printing.
    """
    steps = (
        None
        if job.quiet or launched_rank() != 0
        else Steps(job.steps, target_per=getattr(job, "target_per", TrainingResult.target_per))
    )
    if steps is not None:
        for sentence in job.without_effect():
            steps.note(sentence)
        if job.policy == SHIPPED_REFERENCE:
            steps.note("the policy is the small model that ships with kleash; give --policy for another one")
        if getattr(job, "reward", None) == ():
            steps.note(f"the reward is the example {SHIPPED_REWARD}; give --reward for another one")
    from kleash.training import train

    with redirect_stdout(sys.stderr):  # rewards may print; that is not output of the training
        result = train(job, steps)
    if launched_rank() != 0:
        return 0
    _print_result(result, job, Path(result.out) / "report.html")
    return 0 if result.stopped is None else 1


def _print_result(result: NumericResult | TrainingResult, job: Any, page: Path | None = None) -> None:
    """Print a result in the format of a job, or, unless the job is quiet, its summary and the path of its page."""
    if job.output_format is not None:
        print_formatted(result, job.output_format)
    elif not getattr(job, "quiet", False):
        print_summary(result, page)


COMMANDS: Mapping[type, Callable[[Any], int]] = {
    DryRun: _dry_run,
    MeasureJob: _measure,
    SweepJob: _sweep,
    ReportJob: _report,
    CompareJob: _compare,
    MismatchJob: _mismatch,
    DoctorJob: _doctor,
    CacheJob: _cache,
    TrainJob: _train,
}
"""Record of a command -> the function that runs it and returns its exit code."""
