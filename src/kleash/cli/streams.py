"""Standard output and standard error of a command: control characters are escaped, and failures are sentences.

Names of files and tensors, prompts, and the errors of other people's code can hold anything, a terminal's
control sequences included. Whatever is printed while a command runs passes through here, once.
"""

import errno
import os
import re
import sys
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from typing import Any

from kleash.errors import KleashError

CONTROLS = re.compile(
    "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f"  # C0 but for line break and tab, DEL, and C1
    "\\u061c\\u180e\\u200b\\u200e\\u200f\\u202a-\\u202e\\u2060-\\u206f\\ufeff"  # bidirectional and invisible
    "\\u2028\\u2029\\ufff9-\\ufffb\\U000e0000-\\U000e007f]"  # other line breaks, annotations, tags
)
STREAMS = {1: "standard output", 2: "standard error"}


class OutputError(KleashError, OSError):
    """Standard output that cannot be written."""


def printable(text: str) -> str:
    """``text`` with each control character as JSON escapes it, ``\\u001b``; line breaks and tabs stay."""
    return CONTROLS.sub(lambda match: json_escape(match.group()), text)


def json_escape(characters: str) -> str:
    """Each character as ``\\u`` and four digits, two of these where JSON takes two."""
    units = characters.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[n : n + 2].hex()}" for n in range(0, len(units), 2))


class CommandStream:
    """A standard stream for the time of a command.

    What standard output refuses (a full device, a closed descriptor) raises ``OutputError``; a reader that has
    gone away raises ``BrokenPipeError``, as ever. What standard error refuses is lost: a run does not end
    because its progress cannot be shown.
    """

    def __init__(self, stream: Any, number: int, *, escapes: bool = True) -> None:
        """Write to ``stream``, the process's file ``number``.

        It is whatever stands in ``sys.stdout``, in a notebook no file of Python's; None is one that is closed.
        """
        self._stream, self._number, self._escapes = stream, number, escapes

    def __getattr__(self, name: str) -> Any:
        """Whatever else a stream has."""
        return getattr(self._stream, name)

    @property
    def styled(self) -> "CommandStream":
        """The same stream for a writer that escapes by itself, and whose colours are meant."""
        return CommandStream(self._stream, self._number, escapes=False)

    @property
    def encoding(self) -> str:
        """The stream's encoding."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        try:
            return self._stream is not None and self._stream.isatty()
        except ValueError:  # closed meanwhile
            return False

    def write(self, text: str) -> int:
        """Write ``text``, its control characters escaped.

        Raises:
            OutputError: if standard output cannot be written.
        """
        try:
            if self._stream is None:
                raise OSError(errno.EBADF, "it is closed")
            self._stream.write(printable(text) if self._escapes else text)
        except (OSError, ValueError) as error:
            self._failed(error)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each of ``lines``."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Write what is still buffered.

        Raises:
            OutputError: if standard output cannot be written.
        """
        try:
            if self._stream is not None:
                self._stream.flush()
        except (OSError, ValueError) as error:
            self._failed(error)

    def _failed(self, error: OSError | ValueError) -> None:
        if isinstance(error, UnicodeError):
            raise error
        if self._stream is not None:
            with suppress(OSError, ValueError):
                lead_nowhere(self._stream.fileno())
        if isinstance(error, BrokenPipeError) and self._number == 1:
            raise error
        if self._number == 1:
            reason = getattr(error, "strerror", None) or str(error)
            raise OutputError(
                f"{STREAMS[1]} cannot be written ({reason}); files that were written stay"
            ) from error


def lead_nowhere(number: int) -> None:
    """Let what is still buffered for a file of the process go nowhere, so that Python does not fail at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    if nowhere != number:
        os.dup2(nowhere, number)
        os.close(nowhere)


@contextmanager
def command_streams() -> Generator[None]:
    """Inside, ``sys.stdout`` and ``sys.stderr`` are command streams; afterwards they are as they were."""
    before = sys.stdout, sys.stderr
    for number, stream in ((1, before[0]), (2, before[1])):
        if stream is None:  # a closed descriptor, whose number the next file to be opened would get
            with suppress(OSError):
                lead_nowhere(number)
    sys.stdout, sys.stderr = CommandStream(before[0], 1), CommandStream(before[1], 2)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
