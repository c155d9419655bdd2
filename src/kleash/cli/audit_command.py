"""Runs ``kleash audit`` and prints its verdicts, which takes no more than the base install."""

import shlex
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import fields
from pathlib import Path
from typing import TextIO

from kleash.auditing import audits_of, cases_of
from kleash.auditing.finding_kinds import kinds_of
from kleash.errors import MissingExtraError, OptionError
from kleash.jobs.reading_jobs import AuditJob
from kleash.reports import write_audits
from kleash.reports.audit import audit_title
from kleash.reports.formatting import as_sentence, command_line
from kleash.store import Audit
from kleash.store.codec import to_json
from kleash.store.summary import counted

REPEATED = ("source", "convention", "set")
"""Options of the command that makes the page again."""


def run(command: AuditJob) -> int:
    """Run ``kleash audit`` and return its exit code: 1 if a finding is in ``fail_on``."""
    fail_on = kinds_of(command.fail_on)
    if command.source is not None and not command.trust_source:
        require_consent(f"this runs code of {command.target} in {command.source}")
    source = None if command.source is None else Path(command.source)
    output, audits = sys.stdout, list[Audit]()
    with redirect_stdout(sys.stderr):  # audited code may print; that is not output of the audit
        for audit in audits_of(cases_of(command.target, command.convention, command.set, source)):
            audits.append(audit)
            if not command.quiet and not command.json:
                print_audit(audit, output)
    page = None
    try:
        options = [option for option in fields(AuditJob) if option.name in REPEATED]
        repeating = command_line(("kleash", "audit", shlex.quote(command.target)), options, vars(command))
        page = write_audits(command.out.expanduser(), audits, repeating)
    except MissingExtraError as error:
        if not command.quiet:
            print(f"kleash: no page was made: {error}", file=sys.stderr)
    if command.json:
        sys.stdout.write(to_json({"audits": audits}))
    elif not command.quiet:
        print_audit_counts(audits, page)
    failures = [(audit, finding) for audit in audits for finding in audit.failing(fail_on)]
    for audit, finding in failures:
        print(f"kleash: {audit.target} fails: {finding}", file=sys.stderr)
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


def print_audit(audit: Audit, output: TextIO) -> None:
    """Print the verdict on one function, and the kinds of its findings."""
    kinds = {
        "faults": dict.fromkeys(f"{finding.kind} ({finding.severity})" for finding in audit.faults),
        "notes": dict.fromkeys(finding.kind for finding in audit.findings if finding.severity == "note"),
    }
    lines = [
        f"\n{audit_title(audit)}",
        f"{audit.summary}, taken as a {audit.place}; p is the policy, q the reference",
        *(f"  {as_sentence(note)}" for note in audit.notes),
        *(f"  - {as_sentence(line)}" for line in audit.verdict),
        *(f"  {label}: {', '.join(names)}" for label, names in kinds.items() if names),
        *dict.fromkeys(f"  change {finding.kind}: {finding.remedy}" for finding in audit.faults),
    ]
    print("\n".join(lines), file=output)


def print_audit_counts(audits: Sequence[Audit], page: Path | None) -> None:
    """Print how many functions were audited and have faults, and the path of the page, if there is one."""
    num_faulty = sum(bool(audit.faults) for audit in audits)
    num_wrong = sum(bool(audit.failing({"wrong"})) for audit in audits)
    severities = f": {num_wrong} wrong, {num_faulty - num_wrong} only fragile" if num_faulty else ""
    print(f"\n{counted(len(audits), 'function')} audited, {num_faulty} with faults{severities}")
    if page is not None:
        print(f"page: {page}")
