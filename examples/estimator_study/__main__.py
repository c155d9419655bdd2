"""The study of the estimators, on the terminal.

python examples/estimator_study                              # tables
python examples/estimator_study --run kleash-runs/…          # and your own measured run
python examples/estimator_study --json > study.json          # for programs
python examples/estimator_study --markdown                   # the tables of README.md
"""

import argparse
import sys
from pathlib import Path

if not __package__:  # run as a folder, which puts the folder itself on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from estimator_study.results import Study
from estimator_study.study import estimator_study, markdown, tables_of
from kleash.errors import KleashError

WIDTH = 108
"""Columns that the widest table needs; a narrower terminal wraps the lines."""


def main(arguments: list[str] | None = None) -> int:
    """Run the study; 0 on success, 2 when the request could not be met."""
    parser = argparse.ArgumentParser(
        prog="estimator_study",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--run", type=Path, help="a folder of `kleash measure`")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--markdown", action="store_true", help="print Markdown instead of tables")
    options = parser.parse_args(arguments)
    try:
        study = estimator_study(options.run)
    except KleashError as error:
        print(f"estimator_study: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(study.to_json(), end="")
    elif options.markdown:
        print(markdown(study))
    else:
        print_tables(study)
    return 0


def print_tables(study: Study) -> None:
    """Print every case as a table."""
    from rich.console import Console
    from rich.markup import escape
    from rich.padding import Padding
    from rich.table import Table

    console = Console(highlight=False)
    console.width = max(console.width, WIDTH)
    for title, header, rows, notes in tables_of(study):
        table = Table(box=None, pad_edge=False)
        for column, name in enumerate(header):
            table.add_column(name, justify="right" if column else "left", no_wrap=True)
        for row in rows:
            table.add_row(*map(escape, row))
        console.print(f"[bold]{escape(title)}[/bold]", soft_wrap=True)
        console.print(Padding(table, (0, 0, 0, 2)))
        for note in notes:
            console.print(f"  {escape(note)}", style="dim", soft_wrap=True)
        console.print()


if __name__ == "__main__":
    sys.exit(main())
