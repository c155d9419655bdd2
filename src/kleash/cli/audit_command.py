"""Runs ``kleash audit`` and prints its verdicts, which takes no more than the base install."""

import json
import shlex
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from kleash.errors import MissingExtraError, OptionError
from kleash.jobs.reading_jobs import AuditJob
from kleash.launch_environment import launched_rank
from kleash.reports.formatting import as_sentence
from kleash.store import Audit, Finding


def run_audit(command: AuditJob) -> int:
    """Run ``kleash audit`` and return its exit code: 1 if a finding is in ``fail_on``."""
    if launched_rank() != 0:  # of several launched processes the first does the work
        return 0
    from kleash.auditing import audits_of, cases_of
    from kleash.auditing.finding_kinds import require_kinds
    from kleash.reports import write_audits
    from kleash.store.codec import encode

    fail_on = [kind for words in command.fail_on for kind in words.split(",") if kind]
    require_kinds(fail_on)
    if command.source is not None and not command.trust_source:
        require_consent(f"this runs code of {command.target} in {command.source}")
    source = None if command.source is None else Path(command.source)
    audits: list[Any] = []
    with redirect_stdout(sys.stderr):  # audited code may print; that is not output of the audit
        pending_audits = audits_of(cases_of(command.target, command.convention, command.set, source))
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
        repeating = shlex.join(
            (
                *("kleash", "audit", command.target),
                *(("--source", command.source) if command.source else ()),
                *(("--convention", command.convention) if command.convention else ()),
                *(("--set", *command.set) if command.set else ()),
            )
        )
        page = write_audits(command.out.expanduser(), audits, repeating)
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


def require_consent(statement: str) -> None:
    """Ask in the terminal whether code may be run, which ``statement`` says.

    Raises:
        OptionError: if the answer is not yes, or there is no terminal.
    """
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise OptionError(f"{statement}; give --trust-source to allow it")
    print(f"{statement}. Run it? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise OptionError("nothing was run")


def print_audit(audit: Audit) -> None:
    """Print the verdict on one function, and the kinds of its findings."""
    arguments = ", ".join(f"{name}={value}" for name, value in audit.arguments.items())
    print(f"\n{audit.target}{f'({arguments})' if arguments else ''}")
    print(f"{audit.summary}, taken as a {audit.place}")
    for line in audit.verdict:
        print(f"  - {as_sentence(line)}")
    faults = dict.fromkeys(f"{finding.kind} ({finding.severity})" for finding in audit.faults)
    if faults:
        print(f"  faults: {', '.join(faults)}")
    notes = dict.fromkeys(finding.kind for finding in audit.findings if finding.severity == "note")
    if notes:
        print(f"  notes: {', '.join(notes)}")
    for kind, remedy in {finding.kind: finding.remedy for finding in audit.faults if finding.remedy}.items():
        print(f"  change {kind}: {remedy}")


def print_audit_counts(audits: Sequence[Audit], page: Path | None) -> None:
    """Print how many functions were audited and have faults, and the path of the page, if there is one."""
    num_faulty = sum(bool(audit.faults) for audit in audits)
    num_wrong = sum(bool(audit.failing({"wrong"})) for audit in audits)
    functions = f"{len(audits)} function{'s' if len(audits) > 1 else ''} audited"
    severities = f": {num_wrong} wrong, {num_faulty - num_wrong} only fragile" if num_faulty else ""
    print(f"\n{functions}, {num_faulty} with faults{severities}")
    if page is not None:
        print(f"page: {page}")


def print_failures(failures: Sequence[tuple[Audit, Finding]]) -> None:
    """Print the findings that made the command fail, at the end of its output."""
    for audit, finding in failures:
        place = f" ({finding.where})" if finding.where else ""
        print(f"kleash: {audit.target} fails: {finding.kind}: {finding.sentence}{place}", file=sys.stderr)
