"""How a run is going, on the terminal, while it goes."""

import sys
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from kleash.records import Number


class Progress:
    """A watcher that draws a bar on standard error: sequences, tokens per second, KL so far, time left."""

    def __init__(self, doing: str = "measuring", step: str = "scoring") -> None:
        """Draw nothing before the run begins.

        Args:
            doing: what the run does.
            step: what it does with a sequence.
        """
        self._doing, self._step = doing, step
        self._console = Console(file=sys.stderr, highlight=False)
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}"),
            TextColumn("{task.fields[kl]}"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task: Any = None
        self._tokens = 0

    def __enter__(self) -> "Progress":
        """Begin to draw."""
        self._bar.start()
        self._task = self._bar.add_task("loading", total=None, speed="", kl="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take the bar away."""
        # Older versions of rich end what was not begun, too: with an empty line.
        if self._console.is_terminal:
            self._bar.stop()

    def said(self, sentence: str) -> None:
        """Print the sentence above the bar."""
        self._console.print(escape(sentence), style="dim", soft_wrap=True)

    def planned(self, sequences: int | None) -> None:
        """Show how much there is to do."""
        self._bar.reset(self._task, total=sequences, description=self._doing)

    def generated(self, tokens: int) -> None:
        """Count drawn tokens."""
        self._count(tokens, "generating")

    def scored(self, sequences: int, tokens: int) -> None:
        """Move the bar on."""
        self._count(tokens, self._step)
        self._bar.update(self._task, advance=sequences)

    def shard_written(self, kl: Number) -> None:
        """Show the running mean."""
        self._bar.update(self._task, kl=f"KL {kl}")

    def _count(self, tokens: int, doing: str) -> None:
        self._tokens += tokens
        task = self._bar.tasks[0]
        speed = f"{self._tokens / task.elapsed:,.0f} tokens/s" if task.elapsed else ""
        self._bar.update(self._task, speed=speed, description=doing)
