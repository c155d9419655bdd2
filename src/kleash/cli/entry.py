"""From the words of the command line to an exit code."""

import codecs
import sys
from collections.abc import Sequence
from io import TextIOWrapper

from kleash.cli.streams import command_streams, json_escape
from kleash.errors import KleashError

DONE, FAILED, CANNOT, INTERRUPTED, UNHEARD = 0, 1, 2, 130, 141


def main(words: Sequence[str] | None = None) -> int:
    """Run ``kleash``.

    Args:
        words: the arguments; those of the process if not given.

    Returns:
        0 done, 1 a check failed, 2 the request cannot be met, 130 interrupted, 141 nobody reads the output
        any more.
    """
    arguments = list(sys.argv[1:] if words is None else words)
    _print_whatever_comes()
    with command_streams():
        return _main(arguments)


def _main(arguments: list[str]) -> int:
    try:
        code = _run(arguments)
        sys.stdout.flush()
        return code
    except KleashError as error:
        _say(str(error))
        return CANNOT
    except KeyboardInterrupt as stop:
        _say(str(stop) or "interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # of "kleash … | head"
        return UNHEARD
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):  # rich's way to end then
            return UNHEARD
        return stop.code if isinstance(stop.code, int) else DONE


def _say(sentence: str) -> None:
    """Print an error; what another's text broke into lines does not begin where kleash's own lines do."""
    print("kleash: " + sentence.replace("\n", "\n  "), file=sys.stderr)


def _print_whatever_comes() -> None:
    """Where the terminal's encoding lacks a character, write it as JSON does, and do not stop the run for it."""
    codecs.register_error("kleash.escape", _escaped)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="kleash.escape")


def _escaped(error: UnicodeError) -> tuple[str, int]:
    """``\\u00b1`` for a character that cannot be encoded; two of these where JSON takes two."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return json_escape(error.object[error.start : error.end]), error.end


def _run(arguments: list[str]) -> int:
    from kleash.cli.parsing import read_words
    from kleash.cli.requirements import require_packages

    try:
        command = read_words(arguments)
    except SystemExit:  # help, the version or a completion script was printed
        return DONE if arguments else CANNOT
    require_packages(command)
    from kleash.cli import dispatch

    return dispatch.run(command)
