"""Progress of a measurement on standard error: a bar on a terminal, lines at intervals in a file or pipe."""

from collections.abc import Callable
from time import monotonic
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from kleash.cli.terminal import Terminal, can_redraw, say
from kleash.reports.formatting import format_duration
from kleash.store import Number
from kleash.store.number import with_error

MAX_SECONDS_BETWEEN_LINES = 30.0
MIN_SECONDS_BETWEEN_LINES = 5.0
WORK_BETWEEN_LINES = 0.05
"""Fraction of the work after which a line is printed, within these limits of time."""


class Progress:
    """A ProgressReporter for the terminal: sequences, tokens per second, running KL and time left.

    If standard error is a file or a pipe (nohup, SLURM, ``2> log``), a line is printed for every 5 % of the work, at
    intervals of at least 5 and at most about 30 seconds.
    """

    def __init__(
        self,
        activity: str = "measuring",
        step: str = "scoring",
        console: Console | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """Prepare the display; drawing starts with the context.

        Args:
            activity: what the run does, in words.
            step: what it does with a sequence, in words.
            console: where to print; None for standard error.
            clock: returns seconds since any fixed time.
        """
        self._activity, self._step, self._clock = activity, step, clock
        self._console = console if console is not None else Terminal(stderr=True)
        self._draws = can_redraw(self._console)
        self._bar = Bar(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}", markup=False),
            TextColumn("{task.fields[kl]}", markup=False),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not self._draws,
        )
        self._task: Any = None
        self._start_time = self._last_line_time = clock()
        self._total: int | None = None
        self._sequences = self._tokens = self._last_line_sequences = 0
        self._kl = ""

    def __enter__(self) -> "Progress":
        """Start drawing."""
        if self._draws:
            self._bar.start()
            self._task = self._bar.add_task("loading", total=None, speed="", kl="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the bar."""
        if self._draws:
            self._bar.stop()

    def note(self, sentence: str) -> None:
        """Print a sentence above the bar."""
        say(self._console, sentence, style="dim")

    def set_total(self, sequences: int | None) -> None:
        """Show the total number of sequences, None if it is unknown, and count from 0 again."""
        self._total, self._start_time = sequences, self._clock()
        self._sequences = self._tokens = self._last_line_sequences = 0
        if self._draws:
            self._bar.reset(self._task, total=sequences, description=self._activity)
        elif sequences is not None:
            say(self._console, f"{self._activity}: {sequences:,} sequences to do", style="dim")
        self._last_line_time = self._start_time

    def add_generated(self, tokens: int) -> None:
        """Add generated tokens to the count."""
        self._count(0, tokens, "generating")

    def add_scored(self, sequences: int, tokens: int) -> None:
        """Add scored sequences to the count and advance the bar."""
        self._count(sequences, tokens, self._step)

    def update_kl(self, kl: Number) -> None:
        """Show the running mean of the KL."""
        self._kl = f"KL so far {with_error(kl)}"
        if self._draws:
            self._bar.update(self._task, kl=self._kl)

    def _count(self, sequences: int, tokens: int, step: str) -> None:
        """Add to the counts, and update the bar or print a line."""
        self._sequences += sequences
        self._tokens += tokens
        if self._draws:
            self._bar.update(self._task, advance=sequences, speed=self._speed(), description=step)
        elif self._is_line_due():
            say(self._console, self._line(), style="dim")
            self._last_line_time, self._last_line_sequences = self._clock(), self._sequences

    def _is_line_due(self) -> bool:
        """Whether enough time has passed, or enough work has been done, since the last line."""
        seconds = self._clock() - self._last_line_time
        sequences = self._sequences - self._last_line_sequences
        has_progressed = self._total is not None and sequences >= WORK_BETWEEN_LINES * self._total
        return seconds >= MAX_SECONDS_BETWEEN_LINES or (
            has_progressed and seconds >= MIN_SECONDS_BETWEEN_LINES
        )

    def _speed(self) -> str:
        """Tokens per second, in words; empty before any time has passed."""
        seconds = self._clock() - self._start_time
        return f"{self._tokens / seconds:,.0f} tokens/s" if seconds > 0 else ""

    def _line(self) -> str:
        """A line such as "measuring: 120 of 1,000 sequences (12 %), 3,400 tokens/s, KL so far …, about 4 min left"."""
        count = f"{self._sequences:,} sequences"
        time_left = ""
        if self._total:
            count = f"{self._sequences:,} of {self._total:,} sequences ({self._sequences / self._total:.0%})"
            if 0 < self._sequences < self._total:
                seconds = self._clock() - self._start_time
                time_left = f"about {format_duration(seconds * (self._total / self._sequences - 1))} left"
        return f"{self._activity}: {', '.join(filter(None, (count, self._speed(), self._kl, time_left)))}"
