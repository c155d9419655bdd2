"""A rich console for sentences and tables, with control characters escaped."""

import sys
import warnings
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from kleash.cli.streams import CommandStream
from kleash.errors import TrackerWarning, on_one_line, printable


class Terminal(Console):
    """A console that shows text as it is: no markup, no emoji names, and control characters escaped."""

    def __init__(self, *, stderr: bool = False, **more: Any) -> None:
        """Write to standard output, or to standard error; ``more`` are arguments of rich's ``Console``."""
        stream: Any = sys.stderr if stderr else sys.stdout
        file = stream.styled if isinstance(stream, CommandStream) else stream
        defaults: dict[str, Any] = {"file": file, "markup": False, "highlight": False, "emoji": False}
        super().__init__(**defaults | {"force_terminal": file.isatty()} | more)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The segments that rich draws, with control characters in texts escaped."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text), style, control)


def say(console: Console, sentence: str, *, style: str = "") -> None:
    """Print a sentence on one line, whatever the terminal's width and the names in it."""
    console.print(Text(on_one_line(sentence), style=style), soft_wrap=True)


def remark(console: Console, kind: str, sentence: str, colour: str = "yellow") -> None:
    """Print ``kind: sentence`` on one line, with the kind in colour."""
    console.print(Text.assemble((f"{kind}:", colour), f" {on_one_line(sentence)}"), soft_wrap=True)


def terminal_sentence(text: str) -> str:
    """A sentence of the report with the spaces and minus signs of the terminal's tables."""
    for typographic, plain in (("\u202f%", " %"), ("\u202f", ","), ("−", "-")):
        text = text.replace(typographic, plain)
    return text


@contextmanager
def trackers_as_sentences() -> Generator[None]:
    """Context in which a ``TrackerWarning`` is printed as a sentence on standard error, and any other as before."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", TrackerWarning)
        show_other = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
            if issubclass(category, TrackerWarning):
                print(f"kleash: warning: {message}", file=sys.stderr)
            else:
                show_other(message, category, *place, **more)

        warnings.showwarning = show
        yield
