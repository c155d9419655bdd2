"""Running ``kleash mismatch`` and ``kleash doctor``, and printing their results."""

import json
from collections.abc import Mapping

from rich.table import Table
from rich.text import Text

from kleash.cli.formats import print_formatted
from kleash.cli.summary import NO_INTERVAL, print_gate, print_table
from kleash.cli.terminal import Terminal, remark, say
from kleash.jobs.rollout_jobs import DoctorJob, MismatchJob
from kleash.store import Diagnosis, MismatchRecord
from kleash.store.measurement_summary import merge_warnings
from kleash.store.mismatch_record import LABELS
from kleash.store.number import cells

MAX_SHOWN_FILES = 12
"""Files in the table of ``kleash mismatch``."""


def run_mismatch(job: MismatchJob) -> int:
    """Run ``kleash mismatch`` and return its exit code: that of the gate, or 0.

    Raises:
        KleashError: if the job fails.
    """
    from kleash.diagnosis import measure_mismatch

    record = measure_mismatch(job.rollouts, names=job.names, at_most=job.at_most)
    if job.output_format is not None:
        print_formatted(record, job.output_format)
    else:
        print_mismatch(record)
    return 0 if record.gate is None else record.gate.exit_code


def print_mismatch(record: MismatchRecord) -> None:
    """Print the numbers of a mismatch with intervals, or its renamed metrics, and the verdict of its gate."""
    console = Terminal()
    prompts = f"{record.prompts:,} prompt{'' if record.prompts == 1 else 's'}"
    responses = f"{record.sequences:,} response{'' if record.sequences == 1 else 's'}"
    say(
        console,
        f"{record.tokens:,} tokens in {responses} to {prompts}{_files(record.files)}",
        style="dim",
    )
    if record.renamed:
        for name, value in record.renamed.items():
            say(console, f"{name} {json.dumps(value)}")
    else:
        print_table(console, _table(record))
        if record.kl_by_file:
            console.print()
            print_table(console, _table_of_files(record))
        effective, largest = record.values["effective_sample_size"], record.values["largest_log_ratio"]
        say(console, f"effective sample size: {effective:,.0f} of {record.tokens:,} tokens")
        say(console, f"largest log ratio: {largest:.4g} nats")
        labelled_numbers = ((label, record.numbers[name]) for name, label in LABELS.items())
        for warning in merge_warnings(labelled_numbers):
            remark(console, "warning", warning)
    for note in record.notes:
        remark(console, "note", note)
    if record.gate is not None:
        print_gate(record.gate)


def _files(files: Mapping[str, int]) -> str:
    """How many files were read, where they are several."""
    return f", from {len(files)} files" if len(files) > 1 else ""


def _table(record: MismatchRecord) -> Table:
    """The table of the numbers with errors."""
    table = Table(box=None, pad_edge=False)
    for heading in ("", "mean", "95 % interval", "standard error", ""):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for name, label in LABELS.items():
        value, interval, error, unit = cells(record.numbers[name])
        table.add_row(label, value, interval or NO_INTERVAL.partition(":")[0], error or "unknown", unit)
    return table


def _table_of_files(record: MismatchRecord) -> Table:
    """The KL of each file, the largest first."""
    table = Table(box=None, pad_edge=False)
    for heading in (LABELS["kl_engine_trainer"], "responses", "mean", "95 % interval"):
        table.add_column(heading, justify="right" if table.columns else "left", no_wrap=True)
    ordered = record.files_by_kl()
    for name, number in ordered[:MAX_SHOWN_FILES]:
        value, interval, _, _ = cells(number)
        table.add_row(Text(name), f"{record.files[name]:,}", value, interval or NO_INTERVAL.partition(":")[0])
    if len(ordered) > MAX_SHOWN_FILES:
        table.add_row(f"{len(ordered) - MAX_SHOWN_FILES} more files: --json", "", "", "")
    return table


def run_doctor(job: DoctorJob) -> int:
    """Run ``kleash doctor`` and return its exit code, 0.

    Raises:
        KleashError: if the job fails.
    """
    from kleash.diagnosis.doctor import diagnose_file

    diagnosis = diagnose_file(job)
    if job.output_format is not None:
        print_formatted(diagnosis, job.output_format)
    else:
        print_diagnosis(diagnosis)
    return 0


def print_diagnosis(diagnosis: Diagnosis) -> None:
    """Print the likely causes of a mismatch, each with its evidence and the next test."""
    console = Terminal()
    models = f", scored again by {' and '.join(diagnosis.models)}" if diagnosis.models else ""
    say(
        console,
        f"{diagnosis.tokens:,} tokens in {diagnosis.sequences:,} responses{_files(diagnosis.files)}{models}",
        style="dim",
    )
    if not diagnosis.findings:
        say(
            console, "no finding: rounding explains the differences" if diagnosis.examined else "no diagnosis"
        )
    for place, finding in enumerate(diagnosis.findings, start=1):
        alike = "".join(f" or {name}" for name in finding.alike)
        console.print()
        say(console, f"{place}. {finding.cause}{alike} (probability {finding.probability:.0%})", style="bold")
        say(console, f"   {finding.meaning}")
        say(console, f"   evidence: {finding.evidence}")
        say(console, f"   next: {finding.next_test}")
        if finding.alike:
            say(
                console,
                "   the log-probabilities alone cannot tell these apart; --policy and --reference can",
            )
    for note in diagnosis.notes:
        remark(console, "note", note)
