"""From the words of the command line to an exit code."""

import codecs
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from io import TextIOWrapper

from kleash.errors import KleashError
from kleash.extras import need
from kleash.version import __version__

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
    if arguments == ["--version"]:
        print(f"kleash {__version__}")
        return DONE
    try:
        code = _run(arguments)
        sys.stdout.flush()
        return code
    except KleashError as error:
        print(f"kleash: {error}", file=sys.stderr)
        return CANNOT
    except KeyboardInterrupt as stop:
        print(f"kleash: {str(stop) or 'interrupted'}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # of "kleash … | head"
        _print_no_more()
        return UNHEARD
    except SystemExit as stop:
        # tyro's way to end after --help or a misspelt option, and rich's after a broken pipe.
        if isinstance(stop.__context__, BrokenPipeError):
            return UNHEARD
        return stop.code if isinstance(stop.code, int) else DONE


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
    lost = error.object[error.start : error.end].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{lost[n : n + 2].hex()}" for n in range(0, len(lost), 2)), error.end


def _print_no_more() -> None:
    """Let what is still to be written go nowhere, so that Python does not complain of it at its end."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(arguments: list[str]) -> int:
    tyro = need("tyro", "cli")
    need("rich", "cli")
    from kleash.cli import running
    from kleash.cli.commands import Command

    command = tyro.cli(
        Command,
        prog="kleash",
        description="KL divergence between language models: measured exactly and with error bars.",
        args=arguments,
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    return running.run(command)
