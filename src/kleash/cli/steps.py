"""Progress of training on standard error: a table of the last steps on a terminal, elsewhere a line for each step."""

import math
from collections import deque
from collections.abc import Callable
from time import monotonic
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kleash.cli.terminal import Terminal, can_redraw, remark, say
from kleash.reports.formatting import format_duration
from kleash.store import StepRecord
from kleash.store.number import bare_number, with_error

MAX_ROWS = 12
"""Steps in the table on a terminal."""
SECONDS_BETWEEN_LINES = 30.0
"""Seconds between lines about a step that is not finished."""
COLUMN_WIDTH = 11
"""Approximate width of a column in characters."""
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
"""Heading, metric, and metric of its standard error; columns that a run does not have are left out."""


class Steps:
    """Shows training steps on standard error: a table of the last ones on a terminal, elsewhere a line for each."""

    def __init__(
        self, steps: int, console: Console | None = None, clock: Callable[[], float] = monotonic
    ) -> None:
        """Prepare the display of ``steps`` steps on a console; None for standard error.

        ``clock`` returns seconds since any fixed time.
        """
        self._steps, self._clock = steps, clock
        self._first_step, self._start_time, self._last_line_time = 0, clock(), clock()
        self._console = console if console is not None else Terminal(stderr=True)
        self._draws = can_redraw(self._console)
        self._recent: deque[StepRecord] = deque(maxlen=MAX_ROWS)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)

    def __enter__(self) -> "Steps":
        """Start drawing."""
        if self._draws:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop drawing; the last steps stay on the terminal."""
        if self._draws:
            self._live.stop()
            if self._recent:
                self._console.print(self._table())

    def note(self, sentence: str) -> None:
        """Print a sentence above the table."""
        say(self._console, sentence, style="dim")

    def working(self, step: int, activity: str) -> None:
        """Show what is done in a step that is not finished; in a log, at most every 30 seconds."""
        if not self._first_step or step < self._first_step:
            self._first_step, self._start_time = step, self._clock()
        if self._draws:
            self._draw(f"step {step}: {activity}")
        elif self._clock() - self._last_line_time >= SECONDS_BETWEEN_LINES:
            say(self._console, f"step {step}/{self._steps}: {activity}", style="dim")
            self._last_line_time = self._clock()

    def stepped(self, record: StepRecord) -> None:
        """Show a step with its events and alerts, and the time that the rest takes at the pace so far."""
        if (
            not self._first_step or record.step < self._first_step
        ):  # a trainer that does not tell what it works on
            self._first_step, self._start_time = record.step, self._clock()
        seconds, done = self._clock() - self._start_time, record.step - self._first_step + 1
        left = seconds / done * (self._steps - record.step)
        time_left = f"about {format_duration(left)} left" if left > 0 else ""
        self._last_line_time = self._clock()
        self._recent.append(record)
        for event in record.events:
            say(self._console, f"step {record.step}: {event}", style="dim")
        for alert in record.alerts:
            remark(self._console, f"alert, step {record.step}", alert.sentence)
        if self._draws:
            self._draw(time_left)
        else:
            parts = filter(None, (_metrics_line(record), time_left))
            say(self._console, f"step {record.step}/{self._steps}: {', '.join(parts)}")

    def _draw(self, line: str) -> None:
        """Draw the table of the last steps, and a line below it."""
        self._live.update(Group(self._table(), Text(line, style="dim")), refresh=True)

    def _table(self) -> Table:
        """The table of the last steps, with as many columns as the terminal's width allows."""
        table = Table(box=None, pad_edge=False)
        columns = [
            column for column in COLUMNS if any(column[1] in record.metrics for record in self._recent)
        ]
        columns = columns[: max(2, self._console.width // COLUMN_WIDTH - 1)]
        table.add_column(f"step of {self._steps}", justify="right")
        for heading, _, _ in columns:
            table.add_column(heading, justify="right", no_wrap=True)
        for record in self._recent:
            table.add_row(str(record.step), *(_cell(record, name, error) for _, name, error in columns))
        return table


def _metrics_line(record: StepRecord) -> str:
    """The metrics of a step on one line."""
    columns = [column for column in COLUMNS if column[1] in record.metrics]
    return ", ".join(f"{heading} {_cell(record, name, error)}" for heading, name, error in columns)


def _cell(record: StepRecord, name: str, error_name: str | None) -> str:
    """A metric of a step with its standard error, the metric ``error_name``; empty if the step lacks the metric."""
    value = record.metrics.get(name)
    if value is None:
        return ""
    standard_error = record.metrics.get(error_name) if error_name else None
    if standard_error is None or not math.isfinite(standard_error) or standard_error <= 0:
        return f"{value:.3g}"
    return with_error(bare_number(value, standard_error))
