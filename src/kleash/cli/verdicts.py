"""What a person reads of an audit on the terminal."""

from collections.abc import Sequence
from pathlib import Path

from rich.markup import escape

from kleash.cli.terminal import Terminal
from kleash.reports.formatting import as_sentence
from kleash.store import Audit, Finding


def print_audit(audit: Audit) -> None:
    """One function's verdict, and the kinds of findings behind it."""
    console = Terminal(markup=True)
    bound = ", ".join(f"{name}={value}" for name, value in audit.arguments.items())
    console.print()
    console.print(
        f"[bold]{escape(audit.target)}[/bold]{escape(f'({bound})') if bound else ''}", soft_wrap=True
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


def print_whole(audits: Sequence[Audit], page: Path | None) -> None:
    """How many there were, and where the tables are, if a page was made."""
    console = Terminal(markup=True)
    faulty = sum(bool(audit.faults) for audit in audits)
    wrong = sum(bool(audit.failing({"wrong"})) for audit in audits)
    functions = f"{len(audits)} function{'s' if len(audits) > 1 else ''} audited"
    console.print()
    which = f": {wrong} wrong, {faulty - wrong} only fragile" if faulty else ""
    console.print(f"{functions}, {faulty} with faults{which}")
    if page is not None:
        console.print(f"page: {escape(str(page))}", soft_wrap=True)


def print_failures(failures: Sequence[tuple[Audit, Finding]]) -> None:
    """What made the command fail, for whoever reads a log from its end."""
    console = Terminal(stderr=True, markup=True)
    for audit, finding in failures:
        console.print(
            f"kleash: {escape(audit.target)} fails: {escape(_sentence_of(finding))}", soft_wrap=True
        )


def _sentence_of(finding: Finding) -> str:
    where = f" ({finding.where})" if finding.where else ""
    return f"{finding.kind}: {finding.sentence}{where}"
