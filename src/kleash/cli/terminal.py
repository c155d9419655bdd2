"""A rich console for a command's own sentences and tables."""

import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from kleash.cli.streams import CommandStream, printable


class Terminal(Console):
    """A console that shows text as it is: no markup, no emoji names, and control characters escaped."""

    def __init__(self, *, stderr: bool = False, **more: Any) -> None:
        """Write to standard output, or to standard error; ``more`` is rich's."""
        stream: Any = sys.stderr if stderr else sys.stdout
        file = stream.styled if isinstance(stream, CommandStream) else stream
        plain = {"file": file, "markup": False, "highlight": False, "emoji": False}
        super().__init__(**{**plain, "force_terminal": file.isatty(), **more})

    def render_str(self, text: str, **more: Any) -> Text:  # type: ignore[override]
        """A string as rich's text, which would drop some control characters unseen."""
        return super().render_str(printable(text), **more)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """What rich draws, with every piece of text made safe."""
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control else Segment(printable(text), style)


def say(console: Console, sentence: str, *, style: str = "") -> None:
    """Print a sentence on one line, however wide the terminal is."""
    console.print(Text(printable(sentence), style=style), soft_wrap=True)


def remark(console: Console, kind: str, sentence: str, colour: str = "yellow") -> None:
    """Print ``kind: sentence``, the kind in colour."""
    console.print(Text.assemble((f"{kind}:", colour), f" {printable(sentence)}"), soft_wrap=True)


def can_redraw(console: Console) -> bool:
    """Whether lines can be drawn over: on a terminal, and not in a file or a pipe."""
    return console.is_terminal and not console.is_dumb_terminal
