"""How training is going, on the terminal, while it goes."""

import math
from collections import deque
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table

from kleash.cli.terminal import Terminal, can_redraw, remark, say
from kleash.store import Number, StepRecord

SHOWN = 12
"""Steps that a terminal shows at once."""
WIDTH = 11
"""Characters that a column takes, more or less."""
COLUMNS = (
    ("reward", "reward/score", "reward/score_error"),
    ("adjusted", "reward/adjusted", None),
    ("KL/sequence", "kl/exact_per_sequence", "kl/exact_per_sequence_error"),
    ("KL/token", "kl/exact_per_token", None),
    ("target", "kl/target", None),
    ("beta", "beta", None),
    ("entropy", "policy/entropy", None),
    ("length", "response/length", None),
    ("accuracy", "pairs/accuracy", None),
    ("margin", "pairs/margin", None),
    ("divergence", "teacher/divergence", None),
    ("repeated", "response/repetition", None),
)
"""Heading, metric, and its error; those that a run does not have are left out."""


class Steps:
    """Shows every step on standard error: a table that rolls on a terminal, elsewhere a line for each."""

    def __init__(self, steps: int, console: Console | None = None) -> None:
        """Draw nothing before the first of so many ``steps``; on standard error, or another console."""
        self._steps = steps
        self._console = console if console is not None else Terminal(stderr=True)
        self._draws = can_redraw(self._console)
        self._recent: deque[StepRecord] = deque(maxlen=SHOWN)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)

    def __enter__(self) -> "Steps":
        """Begin to draw."""
        if self._draws:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the last steps standing."""
        if self._draws:
            self._live.stop()
            if self._recent:
                self._console.print(self._table())

    def note(self, sentence: str) -> None:
        """Print the sentence above the table."""
        say(self._console, sentence, style="dim")

    def stepped(self, record: StepRecord) -> None:
        """Show a step, and what is to be said about it."""
        self._recent.append(record)
        for event in record.events:
            say(self._console, f"step {record.step}: {event}", style="dim")
        for alert in record.alerts:
            remark(self._console, f"alert, step {record.step}", alert.sentence)
        if self._draws:
            self._live.update(self._table(), refresh=True)
        else:
            say(self._console, f"step {record.step}/{self._steps}: {_in_a_line(record)}")

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False)
        there = [column for column in COLUMNS if any(column[1] in record.metrics for record in self._recent)]
        there = there[
            : max(2, self._console.width // WIDTH - 1)
        ]  # the last ones give way on a narrow terminal
        table.add_column(f"step of {self._steps}", justify="right")
        for heading, _, _ in there:
            table.add_column(heading, justify="right", no_wrap=True)
        for record in self._recent:
            table.add_row(str(record.step), *(_cell(record, name, error) for _, name, error in there))
        return table


def _in_a_line(record: StepRecord) -> str:
    there = [
        (heading, _cell(record, name, error)) for heading, name, error in COLUMNS if name in record.metrics
    ]
    return ", ".join(f"{heading} {cell}" for heading, cell in there)


def _cell(record: StepRecord, name: str, error: str | None) -> str:
    value = record.metrics.get(name)
    if value is None:
        return ""
    uncertain = record.metrics.get(error) if error else None
    if uncertain is None or not math.isfinite(uncertain) or uncertain <= 0:
        return f"{value:.3g}"
    return str(Number.with_error(value, uncertain))
