"""How a run is going, on standard error, while it goes: a bar on a terminal, a line now and then elsewhere."""

from collections.abc import Callable
from time import monotonic
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from kleash.cli.numbers import with_error
from kleash.cli.terminal import Terminal, can_redraw, say
from kleash.store import Number

LONGEST_SILENCE = 30.0
"""Seconds after which a line is due, however little was done."""
SHORTEST_SILENCE = 5.0
"""Seconds before which none is, however much was done."""
SHARE = 0.05
"""Of the work, after which a line is due between the two."""


class Progress:
    """A ProgressReporter for the terminal: sequences, tokens per second, running KL and time left.

    Where standard error is a file or a pipe (nohup, SLURM, ``2> log``) nothing is drawn over: there is a line
    for every 5 % of the work, at least 5 and at most about 30 seconds apart.
    """

    def __init__(
        self,
        doing: str = "measuring",
        step: str = "scoring",
        console: Console | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """Draw nothing before the run begins.

        Args:
            doing: what the run does.
            step: what it does with a sequence.
            console: where; standard error if not given.
            clock: seconds, from anywhere.
        """
        self._doing, self._step, self._clock = doing, step, clock
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
        self._began = self._last = clock()
        self._total: int | None = None
        self._sequences = self._tokens = self._last_sequences = 0
        self._kl = ""

    def __enter__(self) -> "Progress":
        """Begin to draw."""
        if self._draws:
            self._bar.start()
            self._task = self._bar.add_task("loading", total=None, speed="", kl="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take the bar away."""
        if self._draws:
            self._bar.stop()

    def note(self, sentence: str) -> None:
        """Print the sentence above the bar."""
        say(self._console, sentence, style="dim")

    def set_total(self, sequences: int | None) -> None:
        """Show how much there is to do."""
        self._total, self._began = sequences, self._clock()
        if self._draws:
            self._bar.reset(self._task, total=sequences, description=self._doing)
        elif sequences is not None:
            say(self._console, f"{self._doing}: {sequences:,} sequences to do", style="dim")
        self._last = self._began

    def add_generated(self, tokens: int) -> None:
        """Count drawn tokens."""
        self._count(0, tokens, "generating")

    def add_scored(self, sequences: int, tokens: int) -> None:
        """Move the bar on."""
        self._count(sequences, tokens, self._step)

    def update_kl(self, kl: Number) -> None:
        """Show the running mean."""
        self._kl = f"KL {with_error(kl)}"
        if self._draws:
            self._bar.update(self._task, kl=self._kl)

    def _count(self, sequences: int, tokens: int, doing: str) -> None:
        self._sequences += sequences
        self._tokens += tokens
        if self._draws:
            self._bar.update(self._task, advance=sequences, speed=self._speed(), description=doing)
        elif self._is_due():
            say(self._console, self._line(), style="dim")
            self._last, self._last_sequences = self._clock(), self._sequences

    def _is_due(self) -> bool:
        silence = self._clock() - self._last
        done = self._sequences - self._last_sequences
        enough = self._total is not None and done >= SHARE * self._total
        return silence >= LONGEST_SILENCE or (enough and silence >= SHORTEST_SILENCE)

    def _speed(self) -> str:
        elapsed = self._clock() - self._began
        return f"{self._tokens / elapsed:,.0f} tokens/s" if elapsed > 0 else ""

    def _line(self) -> str:
        """How far the run is: "measuring: 120 of 1,000 sequences (12 %), 3,400 tokens/s, KL …, 4 min left"."""
        done = f"{self._sequences:,} sequences"
        left = ""
        if self._total:
            done = f"{self._sequences:,} of {self._total:,} sequences ({self._sequences / self._total:.0%})"
            if self._sequences:
                elapsed = self._clock() - self._began
                left = f"about {in_words(elapsed * (self._total / self._sequences - 1))} left"
        return f"{self._doing}: {', '.join(filter(None, (done, self._speed(), self._kl, left)))}"


def in_words(seconds: float | int) -> str:
    """A length of time: "40 s", "12 min", "3.5 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
