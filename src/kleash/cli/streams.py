"""Standard output and standard error of a command: escapes control characters and reports errors of writing.

Names of files and tensors, prompts, and error messages of other packages can contain any characters, including control
sequences of the terminal. Everything that is printed while a command runs passes through these streams once.
"""

import errno
import os
import sys
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from typing import Any

from kleash.errors import KleashError, printable


class OutputError(KleashError, OSError):
    """Standard output cannot be written."""


class CommandStream:
    """A standard stream while a command runs.

    An error of writing to standard output (a full device, a closed descriptor) raises ``OutputError``, or
    ``BrokenPipeError`` if its reader is gone. An error of writing to standard error is ignored, so that a run continues
    when its progress cannot be shown.
    """

    def __init__(self, stream: Any, number: int, *, escapes: bool = True) -> None:
        """Wrap a standard stream.

        Args:
            stream: the value of ``sys.stdout`` or ``sys.stderr``, which in a notebook is not a file; None if it is
                closed.
            number: 1 for standard output, 2 for standard error.
            escapes: whether to escape control characters.
        """
        self._stream, self._number, self._escapes = stream, number, escapes

    def __getattr__(self, name: str) -> Any:
        """Other attributes of the stream."""
        return getattr(self._stream, name)

    @property
    def styled(self) -> "CommandStream":
        """The stream without escaping, for rich, which writes colours and escapes the texts."""
        return CommandStream(self._stream, self._number, escapes=False)

    @property
    def encoding(self) -> str:
        """The stream's encoding."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        """Whether the stream is a terminal."""
        try:
            return self._stream is not None and self._stream.isatty()
        except ValueError:  # it was closed
            return False

    def write(self, text: str) -> int:
        """Write ``text`` with control characters escaped.

        Raises:
            OutputError: if standard output cannot be written.
        """
        try:
            if self._stream is None:
                raise OSError(errno.EBADF, "it is closed")
            self._stream.write(printable(text) if self._escapes else text)
        except (OSError, ValueError) as error:
            self._handle_error(error)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each of ``lines``."""
        self.write("".join(lines))

    def flush(self) -> None:
        """Write buffered text.

        Raises:
            OutputError: if standard output cannot be written.
        """
        try:
            if self._stream is not None:
                self._stream.flush()
        except (OSError, ValueError) as error:
            self._handle_error(error)

    def _handle_error(self, error: OSError | ValueError) -> None:
        """Raise an error of standard output; ignore one of standard error."""
        if isinstance(error, UnicodeError):
            raise error
        if self._stream is not None:
            with suppress(OSError, ValueError):
                redirect_to_null(self._stream.fileno())
        if isinstance(error, BrokenPipeError) and self._number == 1:
            raise error
        if self._number == 1:
            reason = getattr(error, "strerror", None) or str(error)
            raise OutputError(
                f"standard output cannot be written ({reason}); files that were written stay"
            ) from error


def redirect_to_null(number: int) -> None:
    """Redirect a file descriptor to the null device, so that Python can flush its buffer at exit without an error."""
    null_device = os.open(os.devnull, os.O_WRONLY)
    if null_device != number:
        os.dup2(null_device, number)
        os.close(null_device)


@contextmanager
def command_streams() -> Generator[None]:
    """Context in which ``sys.stdout`` and ``sys.stderr`` are ``CommandStream``s; restores them on exit."""
    stdout, stderr = sys.stdout, sys.stderr
    for number, stream in ((1, stdout), (2, stderr)):
        if stream is None:  # a closed descriptor, whose number the next opened file would get
            with suppress(OSError):
                redirect_to_null(number)
    sys.stdout, sys.stderr = CommandStream(stdout, 1), CommandStream(stderr, 2)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = stdout, stderr
