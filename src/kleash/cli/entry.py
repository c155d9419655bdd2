"""The entry point ``main``: runs a command line and returns its exit code.

SIGTERM stops a command as Ctrl-C does, so that it says how to resume: torchrun sends it to the other processes when one
has ended, and batch systems send it before they take a machine away.
"""

import atexit
import codecs
import gc
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from io import TextIOWrapper
from types import FrameType
from typing import Any

from kleash.cli.streams import command_streams
from kleash.errors import KleashError, RankError, json_escape, lacking_memory
from kleash.launch_environment import launched_rank, launched_world_size

EXIT_SUCCESS, EXIT_ERROR, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 0, 2, 130, 141
COLLECTION = (20_000, 50, 2)
"""Objects that may be made before Python looks for cycles among them, and such searches before it looks among older
ones, and among all: with its defaults of 700, 10 and 10, importing torch and transformers takes a fifth longer."""
FIRST_PRINTS_S = 2.0
"""Seconds for which a process other than the first keeps an error to itself."""
# what an error of torch says in the processes of a run that have lost another
LOST_PROCESS = re.compile(r"^\[\S*gloo\S*\] (?P<of_gloo>.*?)(\. |$)|ncclRemoteError")
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
        """Raise KeyboardInterrupt in the main thread; a repeated signal does nothing where repetition is ignored."""
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
    defaults = {
        number: handler
        for number in (signal.SIGTERM, signal.SIGINT)
        if (handler := signal.getsignal(number)) in _DEFAULTS
    }
    for number in defaults:
        signal.signal(number, termination)
    try:
        yield termination
    finally:
        for number, handler in defaults.items():
            signal.signal(number, handler)


def run_process() -> int:
    """``main`` of a process that then ends without freeing what it imported, which takes a second with transformers.

    Threads are awaited and what was registered with ``atexit`` while the command ran is called before, as at any end.
    """
    codes: list[int] = []
    atexit.register(_end_process, codes)  # called last, since it is registered first
    codes.append(main())
    return codes[0]


def _end_process(codes: Sequence[int]) -> None:
    """End the process with the exit code of its command, unless it raised or what it printed cannot be written."""
    for code in codes:
        with suppress(OSError, ValueError):
            print(end="", flush=True)
            print(end="", flush=True, file=sys.stderr)
            os._exit(code)


def main(words: Sequence[str] | None = None) -> int:
    """Run ``kleash``.

    Args:
        words: the arguments; None for those of the process.

    Returns:
        0 for success, 1 if a check failed or training stopped early, 2 for an error in the request, 3 if a
        gate is undecided, 130 if interrupted, 143 if terminated by SIGTERM, 141 if the reader of standard
        output is gone.
    """
    arguments = list(sys.argv[1:] if words is None else words)
    _escape_unencodable_characters()
    gc.set_threshold(*COLLECTION)
    with command_streams(), handling_termination() as termination:
        return _exit_code(arguments, termination)


def _exit_code(arguments: list[str], termination: Termination) -> int:
    """Run the command, print an error as one sentence, and return the exit code."""
    try:
        code = _run(arguments)
        sys.stdout.flush()
        return code
    except KleashError as error:
        if not (isinstance(error, RankError) and error.is_reported):
            _print_error(str(error))
        return termination.exit_code(EXIT_ERROR)
    except KeyboardInterrupt as stop:
        return _interrupted(stop, termination)
    except BrokenPipeError:  # such as "kleash … | head"
        return EXIT_BROKEN_PIPE
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):  # rich exits after a broken pipe
            return EXIT_BROKEN_PIPE
        return stop.code if isinstance(stop.code, int) else EXIT_SUCCESS
    except Exception as error:
        if lack := lacking_memory(error):
            _print_error(
                f"{lack}; give a smaller --batch-tokens, which a training takes with --resume, too, or more memory"
            )
        elif lost := LOST_PROCESS.search(str(error)):
            _print_error(
                f"a process is gone ({lost['of_gloo'] or lost[0]}), and its own message says why; go on with --resume"
            )
        elif termination.received is None:
            raise
        else:  # an interrupted import may raise another exception, as numpy's does
            return _interrupted(KeyboardInterrupt(), termination)
        return termination.exit_code(EXIT_ERROR)


def _interrupted(stop: KeyboardInterrupt, termination: Termination) -> int:
    """Print why the command was interrupted, and what was saved, of several ranks one; return the exit code.

    A library that catches the exception of the signal may raise another one, without its message, as Ray does.
    """
    if launched_rank() == 0:
        _print_error(str(stop) or termination.reason)
    return termination.exit_code(EXIT_INTERRUPTED)


def _print_error(message: str) -> None:
    """Print an error message; its further lines are indented, so that they cannot pass for messages of kleash.

    Of several processes the first often prints the same, and the launcher then ends the others, which wait for that.
    """
    with suppress(KeyboardInterrupt):
        if launched_rank() != 0:
            time.sleep(FIRST_PRINTS_S)
        print("kleash: " + message.replace("\n", "\n  "), file=sys.stderr)


def _escape_unencodable_characters() -> None:
    """Let standard streams write characters that their encoding lacks as JSON escapes, instead of raising."""
    codecs.register_error("kleash.escape", _escape)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="kleash.escape")


def _escape(error: Any) -> tuple[str, int]:
    """The JSON escapes of characters that cannot be encoded, such as ``\\u00b1``, and where to continue."""
    return json_escape(error.object[error.start : error.end]), error.end


def _run(arguments: list[str]) -> int:
    """Parse and run the command; what it needs is imported only then."""
    from kleash.cli.parsing import SUBCOMMANDS, DryRun, read_words
    from kleash.cli.requirements import require_packages
    from kleash.jobs.reading_jobs import AuditJob, CompareJob, DoctorJob, EnvJob, MismatchJob, ReportJob

    try:
        command = read_words(arguments)
    except SystemExit:  # help, the version or a completion script was printed
        return EXIT_ERROR if " ".join(arguments) in SUBCOMMANDS else EXIT_SUCCESS
    reads = isinstance(command, ReportJob | CompareJob | MismatchJob | DoctorJob | AuditJob | DryRun)
    if reads and launched_rank() != 0:  # of several launched processes the first does the work
        return EXIT_SUCCESS
    require_packages(command.job if isinstance(command, DryRun) else command)
    # dispatch imports rich, which a base install lacks
    modules: dict[type, str] = {AuditJob: "audit_command", EnvJob: "environment"}
    return import_module(f"kleash.cli.{modules.get(type(command), 'dispatch')}").run(command)
