"""Termination signals of a command: SIGTERM stops it as Ctrl-C does, so that it says how to resume.

torchrun sends SIGTERM to the other processes when one has ended, and batch systems send it before they take a machine
away.
"""

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

from kleash.launch_environment import launched_world_size

_DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)
"""Handlers that are replaced; a program that calls ``main`` may have handlers of its own."""


class Termination:
    """The handler of SIGTERM and SIGINT while a command runs."""

    def __init__(self, *, ignores_repetition: bool) -> None:
        """Begin without a signal.

        Args:
            ignores_repetition: whether signals after the first do nothing. A launcher repeats the Ctrl-C that its
                processes got from the terminal, and kills them if they do not end.
        """
        self.received: int | None = None
        """The number of the first signal."""
        self._ignores_repetition = ignores_repetition

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Raise KeyboardInterrupt in the main thread."""
        if self.received is not None and self._ignores_repetition:
            return
        self.received = self.received or number
        raise KeyboardInterrupt(self.reason)

    @property
    def reason(self) -> str:
        """Why the command ends, for the user."""
        return "terminated by SIGTERM" if self.received == signal.SIGTERM else "interrupted"

    def exit_code(self, default: int) -> int:
        """128 and the number of the signal; ``default`` if none arrived."""
        return default if self.received is None else 128 + self.received


@contextmanager
def handling_termination() -> Generator[Termination]:
    """Context in which SIGTERM and SIGINT raise KeyboardInterrupt, as far as this process does not ignore them.

    Outside the main thread, which alone can have handlers, nothing is changed.
    """
    termination = Termination(ignores_repetition=launched_world_size() > 1)
    if threading.current_thread() is not threading.main_thread():
        yield termination
        return
    handlers_before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    defaults = {number: handler for number, handler in handlers_before.items() if handler in _DEFAULTS}
    for number in defaults:
        signal.signal(number, termination)
    try:
        yield termination
    finally:
        for number, handler in defaults.items():
            signal.signal(number, handler)
