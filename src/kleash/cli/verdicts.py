"""Printing of audits on the terminal: verdicts, counts and failures."""

from collections.abc import Sequence
from pathlib import Path

from rich.markup import escape

from kleash.cli.terminal import Terminal
from kleash.reports.formatting import as_sentence
from kleash.store import Audit, Finding


def print_audit(audit: Audit) -> None:
    """Print the verdict on one function, and the kinds of its findings."""
    console = Terminal(markup=True)
    arguments = ", ".join(f"{name}={value}" for name, value in audit.arguments.items())
    console.print()
    console.print(
        f"[bold]{escape(audit.target)}[/bold]{escape(f'({arguments})') if arguments else ''}", soft_wrap=True
    )
    console.print(f"{escape(audit.summary)}, taken as a {audit.place}", style="dim", soft_wrap=True)
    for line in audit.verdict:
        console.print(f"  - {escape(as_sentence(line))}", soft_wrap=True)
    faults = dict.fromkeys(f"{finding.kind} ({finding.severity})" for finding in audit.faults)
    if faults:
        console.print(f"  [red]faults:[/red] {', '.join(faults)}", soft_wrap=True)
    notes = dict.fromkeys(finding.kind for finding in audit.findings if finding.severity == "note")
    if notes:
        console.print(f"  [yellow]notes:[/yellow] {', '.join(notes)}", soft_wrap=True)
    for kind, remedy in {finding.kind: finding.remedy for finding in audit.faults if finding.remedy}.items():
        console.print(f"  change {kind}: {escape(remedy)}", soft_wrap=True)


def print_audit_counts(audits: Sequence[Audit], page: Path | None) -> None:
    """Print how many functions were audited and have faults, and the path of the page, if there is one."""
    console = Terminal(markup=True)
    num_faulty = sum(bool(audit.faults) for audit in audits)
    num_wrong = sum(bool(audit.failing({"wrong"})) for audit in audits)
    functions = f"{len(audits)} function{'s' if len(audits) > 1 else ''} audited"
    console.print()
    severities = f": {num_wrong} wrong, {num_faulty - num_wrong} only fragile" if num_faulty else ""
    console.print(f"{functions}, {num_faulty} with faults{severities}")
    if page is not None:
        console.print(f"page: {escape(str(page))}", soft_wrap=True)


def print_failures(failures: Sequence[tuple[Audit, Finding]]) -> None:
    """Print the findings that made the command fail, at the end of its output."""
    console = Terminal(stderr=True, markup=True)
    for audit, finding in failures:
        console.print(
            f"kleash: {escape(audit.target)} fails: {escape(_sentence_of(finding))}", soft_wrap=True
        )


def _sentence_of(finding: Finding) -> str:
    """The kind of a finding, its sentence, and where it was seen."""
    place = f" ({finding.where})" if finding.where else ""
    return f"{finding.kind}: {finding.sentence}{place}"
