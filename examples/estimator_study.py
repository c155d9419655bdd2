"""The study of the estimators, on the terminal and as a page.

python examples/estimator_study.py                              # tables
python examples/estimator_study.py --out study.html             # and a page with pictures
python examples/estimator_study.py --run kleash-runs/…          # your own measured run as well
python examples/estimator_study.py --json > study.json          # for programs
python examples/estimator_study.py --markdown                   # the tables of docs/study.md
"""

import argparse
import sys
from pathlib import Path

from kleash.auditing.study import estimator_study
from kleash.errors import KleashError
from kleash.records.study import Study
from kleash.reports.study import FIT_HEADER, HEADER, fit_cells, row_cells, write_study

WIDTH = 108
"""Columns that the widest table needs; a terminal that has fewer folds the lines."""


def main(words: list[str] | None = None) -> int:
    """Run the study; 0 when it worked, 2 when the request could not be met."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path, help="a folder of `kleash measure`")
    parser.add_argument("--out", type=Path, help="write a page")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--markdown", action="store_true", help="print Markdown instead of tables")
    wanted = parser.parse_args(words)
    try:
        study = estimator_study(wanted.run)
        if wanted.out:
            write_study(wanted.out, study)
    except KleashError as error:
        print(f"estimator_study: {error}", file=sys.stderr)
        return 2
    if wanted.json:
        print(study.to_json(), end="")
    elif wanted.markdown:
        print(markdown(study))
    else:
        print_tables(study)
    if wanted.out:
        print(f"page: {wanted.out}", file=sys.stderr)
    return 0


def print_tables(study: Study) -> None:
    """Every case as a table."""
    from rich.console import Console
    from rich.markup import escape
    from rich.padding import Padding
    from rich.table import Table

    console = Console(highlight=False)
    console.width = max(console.width, WIDTH)
    for title, header, rows, notes in tables_of(study):
        table = Table(box=None, pad_edge=False)
        for place, name in enumerate(header):
            table.add_column(name, justify="right" if place else "left", no_wrap=True)
        for row in rows:
            table.add_row(*map(escape, row))
        console.print(f"[bold]{escape(title)}[/bold]", soft_wrap=True)
        console.print(Padding(table, (0, 0, 0, 2)))
        for note in notes:
            console.print(f"  {escape(note)}", style="dim", soft_wrap=True)
        console.print()


def markdown(study: Study) -> str:
    """Every case as Markdown."""
    parts: list[str] = []
    for title, header, rows, notes in tables_of(study):
        lines = [header, ("---", *["---:"] * (len(header) - 1)), *rows]
        table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        told = "; ".join(notes)
        parts.append(f"### {title}\n\n{table}" + (f"\n\n{told[:1].upper()}{told[1:]}." if told else ""))
    return "\n\n".join(parts)


Cells = tuple[str, ...]


def tables_of(study: Study) -> list[tuple[str, Cells, list[Cells], Cells]]:
    """Title, header, rows and notes of each table."""
    tables = [
        (
            f"{case.title}: KL {case.kl.value:.4g} nats",
            HEADER,
            [row_cells(case, row) for row in case.rows],
            case.notes,
        )
        for case in study.cases
    ]
    found = study.two_modes
    fits = [fit_cells(fit) for fit in (found.start, *found.projections, *found.followed)]
    return [*tables, ("One Gaussian for two modes: where each estimator leads", FIT_HEADER, fits, ())]


if __name__ == "__main__":
    sys.exit(main())
