"""Progress on standard error: of a measurement a bar on a terminal and lines elsewhere, of training a line a step."""

from collections.abc import Callable
from time import monotonic
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from kleash.cli.terminal import Terminal, remark, say
from kleash.estimate import Estimate
from kleash.measuring.progress import ProgressReporter
from kleash.reports.formatting import format_duration
from kleash.store import StepRecord, TrainingResult
from kleash.store.metrics import METRICS, number_of, per_what
from kleash.store.summary import counted, with_error

MAX_SECONDS_BETWEEN_LINES = 30.0
MIN_SECONDS_BETWEEN_LINES = 5.0
GENERATING = "generating"
WORK_BETWEEN_LINES = 0.05
"""Fraction of the work after which a line is printed, within these limits of time."""


class Progress(ProgressReporter):
    """A ProgressReporter for the terminal: sequences, tokens per second, running KL and time left.

    If standard error is a file or a pipe (nohup, SLURM, ``2> log``), a line is printed for every 5 % of the work, at
    intervals of at least 5 and at most about 30 seconds.

    The time left is the sum over the stages, generating and scoring, of the sequences that are left times the seconds
    that one took so far; before anything was scored, that of generating alone.
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
        self._draws = self._console.is_terminal and not self._console.is_dumb_terminal  # over the last line
        self._bar = Bar(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[state]}", markup=False),
            console=self._console,
            transient=True,
            disable=not self._draws,
        )
        self._task = self._bar.add_task("loading", total=None, state="")
        self._total: int | None = None
        self._begin_counts()

    def __enter__(self) -> "Progress":
        """Start drawing."""
        self._bar.start()
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
        self._total = sequences
        self._begin_counts()
        if self._draws:
            self._bar.reset(
                self._task,
                total=None if sequences is None else 1.0,
                description=self._activity,
                state="",
            )
        elif sequences is not None:
            say(self._console, f"{self._activity}: {counted(sequences, 'sequence')} to do", style="dim")

    def add_generated(self, tokens: int, sequences: float) -> None:
        """Add generated tokens and finished parts of sequences to the count, and advance the bar."""
        self._count(sequences, tokens, GENERATING)

    def add_scored(self, sequences: int, tokens: int) -> None:
        """Add scored sequences to the count and advance the bar."""
        self._count(sequences, tokens, self._step)

    def update_kl(self, kl: Estimate) -> None:
        """Show the running mean of the KL."""
        self._kl = f"KL so far {with_error(kl)}"

    def _begin_counts(self) -> None:
        """Count from 0, and forget the KL of what was measured before."""
        self._tokens, self._last_line_share = 0, 0.0
        self._kl = ""
        self._done: dict[str, float] = {}
        self._seconds: dict[str, float] = {}
        self._start_time = self._last_line_time = self._last_count_time = self._clock()

    def _count(self, sequences: float, tokens: int, step: str) -> None:
        """Add to the counts, and update the bar or print a line."""
        now = self._clock()
        self._tokens += tokens
        self._done[step] = self._done.get(step, 0.0) + sequences
        self._seconds[step] = self._seconds.get(step, 0.0) + now - self._last_count_time
        self._last_count_time = now
        if self._draws:
            self._bar.update(self._task, completed=self._share(), state=self._state(), description=step)
        elif self._is_line_due():
            say(self._console, f"{self._activity}: {self._state()}", style="dim")
            self._last_line_time, self._last_line_share = now, self._share()

    def _is_line_due(self) -> bool:
        """Whether ``MAX_SECONDS_BETWEEN_LINES`` have passed since the last line, or fewer with enough work done.

        With ``WORK_BETWEEN_LINES`` done since then, ``MIN_SECONDS_BETWEEN_LINES`` are enough.
        """
        seconds = self._clock() - self._last_line_time
        has_progressed = self._share() - self._last_line_share >= WORK_BETWEEN_LINES
        return seconds >= MAX_SECONDS_BETWEEN_LINES or (
            has_progressed and seconds >= MIN_SECONDS_BETWEEN_LINES
        )

    def _seconds_left(self) -> float:
        """Seconds that the rest takes at the pace of each stage; 0 if the total is not known."""
        left = 0.0
        for step, done in self._done.items():
            # What other processes generated is known once it is scored.
            done = max(done, self._done.get(self._step, 0.0))
            if self._total is not None and 0 < done < self._total:
                left += self._seconds[step] / done * (self._total - done)
        return left

    def _share(self) -> float:
        """The part of the work that is done, of the time that it takes; 0 if the total is not known."""
        spent = sum(self._seconds.values())
        return spent / (spent + self._seconds_left()) if self._total and spent > 0 else 0.0

    def _state(self) -> str:
        """What is done, such as "120 of 1,000 sequences (12 %), 3,400 tokens/s, KL so far …, about 4 min left"."""
        scored, left = int(self._done.get(self._step, 0.0)), self._seconds_left()
        count = f"{scored:,} sequences"
        if self._total:
            generated = int(self._done.get(GENERATING, 0.0) + 1e-6)
            drawn = f", {generated:,} generated" if generated > scored else ""
            count = f"{scored:,} of {self._total:,} sequences{drawn} ({100 * self._share():.0f} %)"
        time_left = f"about {format_duration(left)} left" if left > 0 else ""
        seconds = self._clock() - self._start_time
        speed = f"{self._tokens / seconds:,.0f} tokens/s" if seconds > 0 else ""
        return ", ".join(filter(None, (count, speed, self._kl, time_left)))


class Steps:
    """Shows training steps on standard error, a line for each."""

    def __init__(
        self,
        steps: int,
        console: Console | None = None,
        clock: Callable[[], float] = monotonic,
        *,
        target_per: str = TrainingResult.target_per,
    ) -> None:
        """Prepare to show ``steps`` steps on a console; None for standard error.

        ``clock`` returns seconds since any fixed time; a target of the KL is of a ``target_per``.
        """
        self._steps, self._clock, self._target_per = steps, clock, target_per
        self._first_step, self._start_time, self._last_line_time = 0, clock(), clock()
        self._console = console if console is not None else Terminal(stderr=True)

    def note(self, sentence: str) -> None:
        """Print a sentence."""
        say(self._console, sentence, style="dim")

    def working(self, step: int, activity: str) -> None:
        """Say what is done in a step that is not finished, at most every 30 seconds.

        The time is counted from the first step of this process, or from one that is done again.
        """
        if not self._first_step or step < self._first_step:
            self._first_step, self._start_time = step, self._clock()
        if self._clock() - self._last_line_time >= MAX_SECONDS_BETWEEN_LINES:
            say(self._console, f"step {step}/{self._steps}: {activity}", style="dim")
            self._last_line_time = self._clock()

    def stepped(self, record: StepRecord) -> None:
        """Show a step with its events and alerts, and the time that the rest takes at the pace so far."""
        seconds, done = self._clock() - self._start_time, max(record.step - self._first_step, 0) + 1
        left = seconds / done * (self._steps - record.step)
        time_left = f"about {format_duration(left)} left" if left > 0 and record.step > 0 else ""
        self._last_line_time = self._clock()
        for event in record.events:
            say(self._console, f"step {record.step}: {event}", style="dim")
        for alert in record.alerts:
            remark(self._console, f"alert, step {record.step}", alert.sentence)
        cells = [
            f"{metric.heading} {_cell(record, name)}{' nats' if metric.unit == 'nats' else ''}"
            f"{per_what(name, self._target_per)}"
            for name, metric in METRICS.items()
            if metric.heading and name in record.metrics
        ]
        parts = filter(None, (", ".join(cells), time_left))
        say(self._console, f"step {record.step}/{self._steps}: {', '.join(parts) or 'evaluated'}")


def _cell(record: StepRecord, name: str) -> str:
    """A metric of a step with its standard error, if the step has one."""
    number = number_of(record.metrics, name)
    return with_error(number) if number.has_error else f"{number.value:.3g}"
